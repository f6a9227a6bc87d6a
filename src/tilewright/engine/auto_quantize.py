"""Which of the formats weights are rounded to, where the user leaves it to us: by memory and measured speed."""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path

import torch

from tilewright import host_memory
from tilewright.layers import precision
from tilewright.ops.linear import linear, pack_weight
from tilewright.ops.packed import weight_format
from tilewright.weights.checkpoint import Checkpoint, open_checkpoint

AUTO = "auto"

# Of the memory that is free: the rest is for keys and values, and for what a step computes.
_SHARE = 0.7
# So much faster must a format be than one that rounds less: below, its rounding buys nothing.
_LEAST_GAIN = 1.2
# What is timed: the product of one token, as decoding is made of. Several weights in turn, so that none stays in the
# caches: 8 of bf16 take 64 MiB.
_ROWS, _COLUMNS, _NUM_WEIGHTS, _ROUNDS = 2048, 2048, 8, 3

_log = logging.getLogger(__name__)


def choose(model: str | Path, mmproj: str | None = None) -> str | None:
    """What `quantize` should be for a model, for `layers.precision.named`; the log says why in one line."""
    checkpoint = open_checkpoint(model, mmproj)
    chosen, reason = _choice(checkpoint, host_memory.available_bytes())
    # A warning, since commands show those: who leaves a choice to us is told it.
    _log.warning("quantize auto: %s, because %s", chosen or "as the checkpoint is", reason)
    return chosen


def _choice(checkpoint: Checkpoint, available_bytes: int) -> tuple[str | None, str]:
    if any(checkpoint.quantized_as(name) for name in checkpoint.shapes):
        return None, "it is quantised already"
    limit = _SHARE * available_bytes
    plain = sum(checkpoint.size_bytes(name) for name in checkpoint.shapes)
    num_values = sum(math.prod(shape) for shape in checkpoint.shapes.values())
    sizes = {"int8": num_values * 1.0, "fp8": num_values * (1 + 4 / 128)}
    room = f"of {available_bytes / 1e9:.1f} GB free"
    if sizes["int8"] > limit:
        return "int4", f"int8 would take {sizes['int8'] / 1e9:.1f} GB {room}"
    seconds = {name: _seconds(name) for name in (None, "fp8", "int8")}
    # fp8 rounds weights alone: int8 must be faster to be worth more.
    best = "int8" if seconds["fp8"] > _LEAST_GAIN * seconds["int8"] or sizes["fp8"] > limit else "fp8"
    gain = seconds[None] / seconds[best]
    if plain <= limit and gain < _LEAST_GAIN:
        return None, f"{best} would be {gain:.2f} x as fast here, and {plain / 1e9:.1f} GB fit {room}"
    return best, f"a product is {gain:.2f} x as fast as in bf16 here, and {sizes[best] / 1e9:.1f} GB fit {room}"


def _seconds(name: str | None) -> float:
    """The time of a product of one token with a weight of this size, in a format that `quantize` names or in bf16."""
    products = precision.named(name).products
    format = torch.bfloat16 if products is None else weight_format(*products)
    weight = torch.zeros(_ROWS, _COLUMNS, dtype=torch.bfloat16)
    weights = [pack_weight(weight, dtype=format) for _ in range(_NUM_WEIGHTS)]
    x = torch.ones(1, _COLUMNS, dtype=torch.bfloat16)

    def once() -> float:
        start_s = time.perf_counter()
        for packed in weights:
            linear(x, packed)
        return time.perf_counter() - start_s

    return min(once() for _ in range(_ROUNDS + 1))
