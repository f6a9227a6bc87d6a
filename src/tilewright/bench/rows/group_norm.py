"""GroupNorm with silu, as before each convolution of an autoencoder."""

from collections.abc import Iterator
from functools import partial

from torch.nn import functional

from tilewright.bench.row import Calls, Row, close, random, rotation
from tilewright.ops.group_norm import group_norm
from tilewright.ops.torch_backend import group_norm as reference

EPS, GROUPS = 1e-6, 32
SHAPES = ((64, 512), (256, 256), (512, 128))  # pixels on a side, channels


def rows() -> Iterator[Row]:
    for size, channels in SHAPES:
        elements = size * size * channels
        shape = f"[1, {size}, {size}, {channels}]"
        yield Row("group_norm silu", shape, 6 * elements, 16 * elements, partial(_calls, size, channels))


def _calls(size: int, channels: int) -> Calls:
    x, weight, bias = random(1, size, size, channels), random(channels, seed=1), random(channels, seed=2)
    sets = rotation(x, x.clone())

    def ours(call: int) -> object:
        source, out = sets[call % len(sets)]
        return group_norm(source, GROUPS, weight, bias, EPS, activation="silu", out=out)

    def theirs(call: int) -> object:
        source = sets[call % len(sets)][0].movedim(-1, 1)  # channels_last
        return functional.silu(functional.group_norm(source, GROUPS, weight, bias, EPS), inplace=True)

    def check() -> bool:
        actual = group_norm(x, GROUPS, weight, bias, EPS, activation="silu")
        return close(actual, reference.group_norm(x, GROUPS, weight, bias, EPS, activation="silu"))

    return Calls(ours, theirs, check)
