"""The model's tokenizer: Qwen's format and special tokens over a small vocabulary.

A word that follows a space is one token if our questions and answers use it; all else is single bytes, so that what is
read in an image is spelled out letter by letter.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
ROLES = ("system", "user", "assistant")  # a token each: they come with every turn
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = """\
{%- macro parts(content) -%}
  {%- if content is string -%}
    {{- content -}}
  {%- else -%}
    {%- for part in content -%}
      {%- if part.type == 'image' or 'image' in part or 'image_url' in part -%}
        <|vision_start|><|image_pad|><|vision_end|>
      {%- elif part.type == 'video' or 'video' in part -%}
        <|vision_start|><|video_pad|><|vision_end|>
      {%- elif 'text' in part -%}
        {{- part.text -}}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
  {{- '<|im_start|>' + message.role + '\\n' + parts(message.content) + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def byte_letters() -> dict[int, str]:
    """The printable character that stands for each byte in byte-level vocabularies."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in letters]
    return {**letters, **{byte: chr(256 + rank) for rank, byte in enumerate(others)}}


def tokenizer_json(words: list[str], special_tokens: Sequence[str] = SPECIAL_TOKENS) -> dict[str, Any]:
    letters = byte_letters()
    vocabulary = {letter: rank for rank, letter in enumerate(letters[byte] for byte in range(256))}
    merges = []
    for word in words:
        start = letters[ord(" ")]
        # From the left, a letter at a time: then a word without its space is never merged.
        for letter in word:
            if start + letter not in vocabulary:
                merges.append([start, letter])
                vocabulary[start + letter] = len(vocabulary)
            start += letter
    plain = {"lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {
            **plain,
            "id": len(vocabulary) + rank,
            "content": token,
            "single_word": token in ROLES,
            "special": token in special_tokens,
        }
        for rank, token in enumerate((*special_tokens, *ROLES))
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": SPLIT}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": merges,
        },
    }


def write_tokenizer(
    folder: Path,
    words: list[str],
    *,
    special_tokens: Sequence[str] = SPECIAL_TOKENS,
    named_tokens: Mapping[str, str] | None = None,
    chat_template: str = CHAT_TEMPLATE,
) -> None:
    """A tokenizer in which each of the words is one token where it follows a space.

    `named_tokens` are special ones that a processor asks for by a name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer_json(words, special_tokens)
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "model_max_length": 4096,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "bos_token": None,
        "unk_token": None,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "errors": "replace",
        "split_special_tokens": False,
        "additional_special_tokens": list(special_tokens[1:]),
        **(named_tokens or {}),
        "added_tokens_decoder": {
            str(token["id"]): {key: value for key, value in token.items() if key != "id"}
            for token in tokenizer["added_tokens"]
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
