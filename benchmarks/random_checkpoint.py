"""What checkpoints of random weights are made of: a tokenizer of bytes, and tensors by the names a model asks for.

Weights are one block of random numbers over and over, begun elsewhere for every tensor: they are written as fast as the
folder's file system takes them, by many threads.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import tokenizers
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers

BLOCK_ELEMENTS = 1 << 24
DEVIATION = 0.02  # of random weights: what training starts from
SHARD_BYTES = 1 << 30  # enough of them for every thread of 16 to have one of 21 GB
ITEM_BYTES = 2  # bf16
STORED_AS = {torch.bfloat16: "BF16", torch.float32: "F32"}

Shapes = Mapping[str, tuple[int, ...]]
# The value of a tensor that must not be random, bf16 or fp32; None: a block of random numbers in bf16.
Choose = Callable[[str, tuple[int, ...]], torch.Tensor | None]


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


def write_tensors(folder: Path, shapes: Shapes, choose: Choose, num_threads: int = os.cpu_count() or 1) -> int:
    """How many parameters there are; the tensors go to files of 1 GB and an index of them."""
    generator = torch.Generator().manual_seed(0)
    values = (torch.randn(BLOCK_ELEMENTS, generator=generator) * DEVIATION).bfloat16()
    block = _bytes_of(values)
    shards = _shards(shapes)
    files = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]

    def write(file: str, names: list[str]) -> int:
        return _write_shard(folder / file, {name: shapes[name] for name in names}, choose, block)

    with ThreadPoolExecutor(num_threads) as pool:
        size_bytes = sum(pool.map(write, files, shards))
    weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
    index = {"metadata": {"total_size": size_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return sum(math.prod(shape) for shape in shapes.values())


def _shards(shapes: Shapes) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size_bytes = 0
    for name, shape in shapes.items():
        if size_bytes >= SHARD_BYTES:
            shards.append([])
            size_bytes = 0
        shards[-1].append(name)
        size_bytes += ITEM_BYTES * math.prod(shape)
    return shards


def _write_shard(path: Path, shapes: Shapes, choose: Choose, block: memoryview) -> int:
    """The bytes of its tensors. A safetensors file: the length of a header, the header, one tensor after the other."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    chosen = {name: choose(name, shape) for name, shape in shapes.items()}
    end = 0
    for name, shape in shapes.items():
        value = chosen[name]
        begin, end = end, end + (ITEM_BYTES if value is None else value.itemsize) * math.prod(shape)
        stored_as = STORED_AS[torch.bfloat16 if value is None else value.dtype]
        header[name] = {"dtype": stored_as, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            value = chosen[name]
            if value is None:
                _write_random(file, name, ITEM_BYTES * math.prod(shape), block)
            else:
                file.write(_bytes_of(value))
    return end


def _write_random(file: BinaryIO, name: str, size_bytes: int, block: memoryview) -> None:
    begin = zlib.crc32(name.encode()) % BLOCK_ELEMENTS * ITEM_BYTES
    while size_bytes:
        written = file.write(block[begin : begin + size_bytes])
        size_bytes, begin = size_bytes - written, 0


def _bytes_of(value: torch.Tensor) -> memoryview:
    return memoryview(value.flatten().view(torch.uint8).numpy())
