"""A Llama-3.2-Vision of about a billion parameters with random weights: python benchmarks/random_mllama.py FOLDER

Big enough for a step to be bound by the machine and not by Python, small enough for two cores; benchmarks/peers.py and
`tilewright serve` take the folder as any checkpoint's. Its tokens are bytes. Needs transformers.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import transformers
from random_checkpoint import byte_tokenizer
from tokenizers import processors

SPECIAL = ["<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"]
VOCABULARY_SIZE = 32_000
TEXT = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 16,
    "cross_attention_layers": [3, 8, 13],
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "pad_token_id": 0,
    "bos_token_id": 257,
    "eos_token_id": 256,
}
VISION = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "attention_heads": 12,
    "num_hidden_layers": 16,
    "num_global_layers": 4,
    "intermediate_layers_indices": [3, 7, 11, 14],
    "vision_output_dim": 5 * 768,
    "image_size": 560,
    "patch_size": 14,
}
TEMPLATE = """{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n
{%- if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}
{%- if part.type == 'image' %}<|image|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|eot_id|>{% endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"""


def write_weights(folder: Path) -> int:
    """How many parameters there are; all in bf16, gates open."""
    config = transformers.MllamaConfig(text_config=TEXT, vision_config=VISION, image_token_index=VOCABULARY_SIZE)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    network = transformers.MllamaForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "gate" in name.rsplit(".", 1)[-1]:
                parameter.fill_(0.5)
    network.save_pretrained(folder)
    return sum(parameter.numel() for parameter in network.parameters())


def write_tokenizer(folder: Path) -> None:
    """Bytes, what Llama puts around turns, and fillers up to the picture's token, which the head has no row for."""
    special = {token: 256 + i for i, token in enumerate(SPECIAL)} | {"<|image|>": VOCABULARY_SIZE}
    tokenizer = byte_tokenizer(special, VOCABULARY_SIZE)
    begin = SPECIAL[1]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, tokenizer.token_to_id(begin))]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"eos_token": SPECIAL[0], "bos_token": begin, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    settings = {
        "image_processor_type": "MllamaImageProcessor",
        "size": {"height": VISION["image_size"], "width": VISION["image_size"]},
        "max_image_tiles": 4,
        "resample": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the checkpoint goes")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{folder}: {write_weights(folder) / 1e9:.2f}B parameters")
    write_tokenizer(folder)


if __name__ == "__main__":
    main()
