"""Encoded features of a medium as a message part, for another engine of the same model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.engine.run.executor import Executor
from tilewright.inputs.precomputed import TYPES, Precomputed
from tilewright.inputs.precomputed_values import checksum
from tilewright.inputs.processor import MediaProcessor, PreparedMedium
from tilewright.types import Medium, RequestError

Encode = Callable[[Sequence[Medium]], list[Tensor]]


def features_part(processor: MediaProcessor, medium: Mapping[str, Any], encode: Encode) -> dict[str, Any]:
    """Return the message part with the features that `encode` makes of a medium, itself a message part."""
    described = processor.describe(medium)
    if described.feature_width:
        raise RequestError(f"{described.name}: it is {medium['type']} already, expected a medium to encode")
    if described.kind == "video" and described.sound:
        raise RequestError(
            f"{described.name}: use_audio_in_video is asked for, and features have no sound: encode it too"
        )
    inputs = processor.chat([{"role": "user", "content": [medium]}])
    values = torch.cat(encode(inputs.media))
    return part_of(f"{described.kind}_features", values, described)


def part_of(value_type: str, values: Tensor, described: PreparedMedium) -> dict[str, Any]:
    """Return values of a medium as a message part, with the description needed to use them."""
    grid = described.grid
    if TYPES[value_type].kind == "audio":
        grid = 1, sum(piece.grid[1] for piece in described.sound), grid[2]
    given = Precomputed(value_type, values, grid, tiling=described.tiling, times_s=described.times_s)
    part = {"type": value_type, value_type: values, "grid": grid, "key": checksum(given)}
    if given.tiling != (1, 1):
        part["tiling"] = given.tiling
    if given.times_s:
        part["times_s"] = given.times_s
    return part


def encode_now(executor: Executor, media: Sequence[Medium]) -> list[Tensor]:
    """Return copies of the features of media, encoded one by one. Runs on the engine's thread between two steps."""
    cache, found = executor.features, []
    for medium in media:
        cache.pin(medium.key)
        try:
            if not cache.has(medium.key):
                executor.encode([medium])
            features = executor.model_runner.features[cache.id_of(medium.key)]
            found.append(features.to("cpu", copy=True))
        finally:
            cache.unpin(medium.key)
    return found
