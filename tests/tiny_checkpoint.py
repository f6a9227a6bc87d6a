"""Folders of whole checkpoints with random weights and a tokenizer of single bytes: small enough to load in a test."""

import json
from collections.abc import Sequence
from pathlib import Path

import tiny_omni
import tiny_qwen3_5
import tokenizers
import torch
import transformers
from tiny import LLAMA3, MLLAMA_TEXT, MLLAMA_VISION, MROPE, TEXT, VISION
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from tilewright.models.qwen3_omni.config import MediaTokens

SPECIAL = ["<|end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
FIRST_SPECIAL = 256
VOCAB = 272  # some rows more than there are tokens, as real ones have
TEMPLATE = """{%- for message in messages -%}
[{{ message.role }}]
{%- if message.content is string %}{{ message.content }}{% else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'video' %}<|video_pad|>
{%- else %}{{ part.text }}{% endif -%}
{%- endfor -%}
{%- endif -%}
<|end|>
{%- endfor -%}
[assistant]"""


OMNI_SPECIAL = [*SPECIAL, "<|audio_start|>", "<|audio_end|>", "<|audio_pad|>"]
OMNI_TEMPLATE = TEMPLATE.replace(
    "<|video_pad|>",
    "<|vision_start|><|video_pad|><|vision_end|>\n"
    "{%- elif part.type == 'audio' %}<|audio_start|><|audio_pad|><|audio_end|>",
)


QWEN_SPECIAL = ["<|im_end|>", "<|im_start|>", "<|endoftext|>"]
QWEN_TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]


LLAMA_SPECIAL = ["<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|image|>"]
LLAMA_TEMPLATE = """{{- bos_token -}}
{%- for message in messages -%}
<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n
{%- if message.content is string %}{{ message.content | trim }}{% else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' %}<|image|>{% else %}{{ part.text | trim }}{% endif -%}
{%- endfor -%}
{%- endif -%}
<|eot_id|>
{%- endfor -%}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif -%}
"""


def write_tokenizer(folder: Path, special: list[str] = SPECIAL, tags: Sequence[str] = (), template=TEMPLATE) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in tags])
    assert tokenizer.token_to_id(special[0]) == FIRST_SPECIAL
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": special[0]}))
    (folder / "chat_template.jinja").write_text(template)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": FIRST_SPECIAL, "do_sample": False}))


def write_text_model(folder: Path) -> Path:
    """A Qwen3 that accepts text only."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**{**TEXT, "vocab_size": VOCAB}, head_dim=32, tie_word_embeddings=True)
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_chat_model(folder: Path) -> Path:
    """A Qwen3 with Qwen3's own chat template, which knows tools and thoughts."""
    torch.manual_seed(0)
    sizes = {**TEXT, "vocab_size": VOCAB, "max_position_embeddings": 8192}
    config = transformers.Qwen3Config(**sizes, head_dim=32, tie_word_embeddings=True)
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    write_tokenizer(folder, QWEN_SPECIAL, QWEN_TAGS, (Path(__file__).parent / "data" / "qwen3.jinja").read_text())
    return folder


def write_experts_model(folder: Path) -> Path:
    """A Qwen3-MoE: 3 of 8 experts for each token in two of its three layers."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        **{**TEXT, "vocab_size": VOCAB},
        head_dim=32,
        moe_intermediate_size=48,
        num_experts=8,
        num_experts_per_tok=3,
        mlp_only_layers=[1],
    )
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_vision_model(folder: Path) -> Path:
    """A Qwen3-VL for images of 16x16 to 64x64 pixels, in patches of 4."""
    torch.manual_seed(0)
    ids = {token: FIRST_SPECIAL + i for i, token in enumerate(SPECIAL)}
    config = transformers.Qwen3VLConfig(
        text_config={**TEXT, "vocab_size": VOCAB, "head_dim": 32, "rope_parameters": MROPE},
        vision_config=VISION,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    transformers.Qwen3VLForConditionalGeneration(config).save_pretrained(folder)
    write_tokenizer(folder)
    write_patch_settings(folder)
    return folder


def write_hybrid_model(folder: Path) -> Path:
    """A Qwen3.5 with its own chat template: recurrent layers, thoughts, tools, images of 16x16 to 64x64 and video."""
    special = QWEN_SPECIAL + SPECIAL[1:]
    ids = {f"{name}_token_id": FIRST_SPECIAL + special.index(f"<|{name}|>") for name in ("vision_start", "vision_end")}
    ids |= {f"{name}_token_id": FIRST_SPECIAL + special.index(f"<|{name}_pad|>") for name in ("image", "video")}
    network = tiny_qwen3_5.make_network("qwen3_5", tiny_qwen3_5.seeing_config(VOCAB, ids))
    network.save_pretrained(folder)
    write_tokenizer(folder, special, QWEN_TAGS, (Path(__file__).parent / "data" / "qwen3_5.jinja").read_text())
    write_patch_settings(folder)
    return folder


def write_omni_model(folder: Path) -> Path:
    """A Qwen3-Omni that hears and sees, with 16 mel bins; its voice is as small as it can be."""
    ids = {token: FIRST_SPECIAL + i for i, token in enumerate(OMNI_SPECIAL)}
    tokens = MediaTokens(
        audio=ids["<|audio_pad|>"],
        audio_start=ids["<|audio_start|>"],
        audio_end=ids["<|audio_end|>"],
        image=ids["<|image_pad|>"],
        video=ids["<|video_pad|>"],
        vision_start=ids["<|vision_start|>"],
        vision_end=ids["<|vision_end|>"],
    )
    config = tiny_omni.config_of(vocab_size=VOCAB, tokens=tokens)
    tiny_omni.make_network(config).save_pretrained(folder)
    write_tokenizer(folder, OMNI_SPECIAL, template=OMNI_TEMPLATE)
    write_patch_settings(folder, feature_size=tiny_omni.BINS)
    return folder


def write_patch_settings(folder: Path, **more: int) -> None:
    settings = {"patch_size": 4, "temporal_patch_size": 2, "merge_size": 2}
    settings |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "size": {"shortest_edge": 256, "longest_edge": 4096}}
    settings |= more
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        (folder / name).write_text(json.dumps(settings))


def write_cross_model(folder: Path) -> Path:
    """A Llama-3.2-Vision for images of up to four tiles of 16x16 pixels, in patches of 4."""
    torch.manual_seed(0)
    image_token_id = FIRST_SPECIAL + LLAMA_SPECIAL.index("<|image|>")  # the first that the head has no row for
    config = transformers.MllamaConfig(
        text_config={**TEXT, **MLLAMA_TEXT, "vocab_size": image_token_id, "rope_parameters": LLAMA3},
        vision_config=MLLAMA_VISION,
        image_token_index=image_token_id,
    )
    network = transformers.MllamaForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "gate" in name.rsplit(".", 1)[-1]:  # closed in a fresh network
                parameter.fill_(0.7)
    network.save_pretrained(folder)
    write_tokenizer(folder, LLAMA_SPECIAL, template=LLAMA_TEMPLATE)
    begin = LLAMA_SPECIAL[1]
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, FIRST_SPECIAL + 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"eos_token": LLAMA_SPECIAL[0], "bos_token": begin, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    settings = {"size": {"height": 16, "width": 16}, "max_image_tiles": 4, "resample": 2, "image_mean": [0.4] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps({**settings, "image_std": [0.3] * 3}))
    return folder
