"""What checkpoints of random weights are made of: a tokenizer of bytes, and tensors by the names a model asks for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers

SHARD_BYTES = 2 << 30


def byte_tokenizer(special: Mapping[str, int], size: int) -> tokenizers.Tokenizer:
    """A token per byte, the special ones at their ids, and fillers that no text has up to `size`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: i for i, character in enumerate(alphabet)} | special
    taken = set(vocabulary.values())
    vocabulary |= {f"<|reserved_{i}|>": i for i in range(size) if i not in taken}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return tokenizer


def write_tensors(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], make: Callable[[str, tuple[int, ...]], torch.Tensor]
) -> int:
    """How many parameters there are; the tensors go to files of 2 GB, so that no more is in memory."""
    files: dict[str, str] = {}
    for index, names in enumerate(_shards(shapes)):
        file = f"model-{index:05}.safetensors"
        save_file({name: make(name, shapes[name]) for name in names}, folder / file)
        files |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return sum(torch.Size(shape).numel() for shape in shapes.values())


def _shards(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[list[str]]:
    names: list[str] = []
    size_bytes = 0
    for name, shape in shapes.items():
        tensor_bytes = 2 * torch.Size(shape).numel()
        if names and size_bytes + tensor_bytes > SHARD_BYTES:
            yield names
            names, size_bytes = [], 0
        names.append(name)
        size_bytes += tensor_bytes
    yield names
