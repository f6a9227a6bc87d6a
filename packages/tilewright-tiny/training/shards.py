"""Weights as files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

MAX_SHARD_BYTES = 15_900_000


def write_weights(folder: Path, weights: Mapping[str, torch.Tensor], stem: str = "model") -> None:
    """The weights in bf16: one file, or shards that each stay below `MAX_SHARD_BYTES` and an index of them."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    room = MAX_SHARD_BYTES
    for name, tensor in weights.items():
        tensor = tensor.detach().to("cpu", torch.bfloat16).contiguous()
        if tensor.nbytes > room:
            shards.append({})
            room = MAX_SHARD_BYTES
        shards[-1][name] = tensor
        room -= tensor.nbytes
    folder.mkdir(parents=True, exist_ok=True)
    if len(shards) == 1:
        save_file(shards[0], folder / f"{stem}.safetensors", metadata={"format": "pt"})
        return
    names = [f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for file, shard in zip(names, shards, strict=True):
        save_file(shard, folder / file, metadata={"format": "pt"})
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for shard in shards for tensor in shard.values())},
        "weight_map": {name: file for file, shard in zip(names, shards, strict=True) for name in shard},
    }
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def read_weights(folder: Path, stem: str = "") -> dict[str, torch.Tensor]:
    """All weights of a folder's files whose names begin so, in fp32."""
    found = [load_file(file) for file in sorted(folder.glob(f"{stem}*.safetensors"))]
    return {name: tensor.float() for shard in found for name, tensor in shard.items()}
