"""A Llama-3.2-Vision with random weights, as fast as it can be written: python benchmarks/random_mllama.py FOLDER

Without a config it has about a billion parameters: big enough for a step to be bound by the machine and not by Python,
small enough for two cores. `--config` takes a real one's sizes. benchmarks/peers.py and
`tilewright serve` take the folder as any checkpoint's. Its tokens are bytes.

  python benchmarks/random_mllama.py /tmp/mllama-1b
  python benchmarks/random_mllama.py /dev/shm/mllama-11b --config Llama-3.2-11B-Vision-Instruct.json
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from time import perf_counter

import torch
from random_checkpoint import byte_tokenizer, write_tensors
from shapes import biases_of
from tokenizers import processors

from tilewright.models.registry import family_of
from tilewright.weights.spec import iter_weights

SPECIAL = ["<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"]
BILLION = {
    "architectures": ["MllamaForConditionalGeneration"],
    "model_type": "mllama",
    "dtype": "bfloat16",
    "image_token_index": 32_000,
    "text_config": {
        "model_type": "mllama_text_model",
        "vocab_size": 32_000,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 16,
        "cross_attention_layers": [3, 8, 13],
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "pad_token_id": 0,
        "bos_token_id": 257,
        "eos_token_id": 256,
        "tie_word_embeddings": False,
    },
    "vision_config": {
        "model_type": "mllama_vision_model",
        "hidden_size": 768,
        "intermediate_size": 3072,
        "attention_heads": 12,
        "num_hidden_layers": 16,
        "num_global_layers": 4,
        "intermediate_layers_indices": [3, 7, 11, 14],
        "vision_output_dim": 5 * 768,
        "image_size": 560,
        "patch_size": 14,
        "max_num_tiles": 4,
        "num_channels": 3,
        "hidden_act": "gelu",
        "norm_eps": 1e-5,
    },
}
TEMPLATE = """{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n
{%- if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}
{%- if part.type == 'image' %}<|image|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|eot_id|>{% endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"""


def shapes_of(config: dict) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint by its name, biases included."""
    model = family_of(config).build(config, biases_of(config))
    return {source.name: source.shape for weight in iter_weights(model) for source in weight.sources}


def chosen_value(name: str, shape: tuple[int, ...]) -> torch.Tensor | None:
    """Norms of one, gates half open, all else random."""
    if "norm" in name and name.endswith(".weight"):
        return torch.ones(shape, dtype=torch.bfloat16)
    if "gate" in name.rsplit(".", 1)[-1]:
        return torch.full(shape, 0.5, dtype=torch.bfloat16)
    return None


def write_tokenizer(folder: Path, config: dict) -> None:
    """Bytes, what Llama puts around turns, and fillers up to the picture's token, which the head has no row for."""
    picture_id = config["image_token_index"]
    special = {token: 256 + i for i, token in enumerate(SPECIAL)} | {"<|image|>": picture_id}
    tokenizer = byte_tokenizer(special, picture_id)
    begin = SPECIAL[1]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, tokenizer.token_to_id(begin))]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"eos_token": SPECIAL[0], "bos_token": begin, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def write_preprocessing(folder: Path, config: dict) -> None:
    vision = config["vision_config"]
    settings = {
        "image_processor_type": "MllamaImageProcessor",
        "size": {"height": vision["image_size"], "width": vision["image_size"]},
        "max_image_tiles": vision["max_num_tiles"],
        "resample": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the checkpoint goes")
    parser.add_argument("--config", type=Path, help="a config.json (default: a billion parameters)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="that write (default: all)")
    options = parser.parse_args()
    config = json.loads(options.config.read_text()) if options.config else BILLION
    options.folder.mkdir(parents=True, exist_ok=True)
    begin = perf_counter()
    num_parameters = write_tensors(options.folder, shapes_of(config), chosen_value, options.threads)
    (options.folder / "config.json").write_text(json.dumps(config, indent=1))
    write_tokenizer(options.folder, config)
    write_preprocessing(options.folder, config)
    print(f"{options.folder}: {num_parameters / 1e9:.2f}B parameters in {perf_counter() - begin:.1f} s")


if __name__ == "__main__":
    main()
