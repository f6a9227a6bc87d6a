"""Packed linears of a layer of the language model and of the vision tower, and the head."""

from collections.abc import Iterator
from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.nn import functional

from tilewright.bench.row import Calls, Row, close, random, rotation
from tilewright.bench.shapes import MODELS, Vision
from tilewright.ops import reference
from tilewright.ops.linear import PackedWeight, linear, pack_weight

ROWS = (1, 4, 16, 128, 512, 1024)
HEAD_ROWS = (1, 16)
VISION_ROWS = (1024, 4096)
# The twin runs in fp32: this many rows and outputs of it are enough to see a wrong kernel.
CHECKED_ROWS, CHECKED_OUTPUTS = 64, 4096


def rows() -> Iterator[Row]:
    for model in MODELS:
        for name, (n, k) in model.linears.items():
            for m in ROWS:
                yield _row("linear", f"{model.name} {name}", m, n, k, f"linear M={m}")
        n, k = model.linears["gate_up"]
        for m in ROWS:
            group = f"linear silu_and_mul M={m}"
            yield _row("linear silu_and_mul", f"{model.name} gate_up", m, n, k, group, gated=True)
        for m in HEAD_ROWS:
            yield _row("linear", f"{model.name} lm_head", m, model.vocabulary, model.hidden, f"linear lm_head M={m}")
        for name, (n, k) in model.vision.linears.items():
            for m in VISION_ROWS:
                yield _row("linear", f"{model.name} vision {name}", m, n, k, f"linear vision M={m}")
        vision, patches = model.vision, VISION_ROWS[-1]
        frame = vision.patch_elements // 2  # of a still: the kernel is summed over its two frames
        moved = 2 * (vision.hidden * frame + patches * (frame + vision.hidden))
        shape = f"{model.name} {patches} patches of {vision.patch} x {vision.patch}"
        yield Row("patch embedding", shape, moved, 2 * patches * vision.hidden * frame, partial(_patches, vision))


def _row(name: str, label: str, m: int, n: int, k: int, group: str, *, gated: bool = False) -> Row:
    outputs = n // 2 if gated else n
    moved = 2 * (n * k + m * k + m * outputs)
    return Row(name, f"{label} M={m} N={n} K={k}", moved, 2 * m * n * k, partial(_calls, m, n, k, gated), group)


def _calls(m: int, n: int, k: int, gated: bool) -> Calls:
    x = random(m, k)
    weights, packed = _weights(n, k, gated)
    activation = "silu" if gated else "none"
    out = torch.empty(m, n // 2 if gated else n, dtype=x.dtype)

    def ours(call: int) -> object:
        return linear(x, packed[call % len(packed)], activation=activation, out=out)

    def theirs(call: int) -> object:
        y = functional.linear(x, weights[call % len(weights)])
        return functional.silu(y[:, : n // 2]) * y[:, n // 2 :] if gated else y

    return Calls(ours, theirs, lambda: _agrees(x, weights[0], packed[0], activation))


def _patches(vision: Vision) -> Calls:
    """A still as one frame and a summed kernel, against two equal frames and a convolution, as the model has it."""
    patches, frame = VISION_ROWS[-1], vision.patch_elements // 2
    x, kernel = (
        random(patches, frame),
        random(vision.hidden, 3, 2, vision.patch, vision.patch, scale=frame**-0.5, seed=1),
    )
    bias = random(vision.hidden, seed=2)
    weight = kernel.float().sum(2).to(torch.bfloat16).view(vision.hidden, frame)
    packed = pack_weight(weight, bias)
    out = torch.empty(patches, vision.hidden, dtype=x.dtype)
    frames = x.view(patches, 3, 1, vision.patch, vision.patch).expand(-1, -1, 2, -1, -1).contiguous()

    def check() -> bool:
        return close(linear(x, packed), reference.linear(x, weight, bias))

    return Calls(
        lambda _: linear(x, packed, out=out), lambda _: functional.conv3d(frames, kernel, bias, kernel.shape[2:]), check
    )


@lru_cache(maxsize=1)  # rows of one weight follow each other
def _weights(n: int, k: int, gated: bool) -> tuple[list[Tensor], list[PackedWeight]]:
    """A rotation of weights that keep the sums near 1, plain and packed."""
    # One block of random numbers repeated: by the billion they would take minutes.
    block = random(min(n, 2048), k, scale=k**-0.5, seed=1)
    weights = [copy for (copy,) in rotation(block.repeat(-(-n // block.shape[0]), 1)[:n].contiguous())]
    return weights, [pack_weight(weight, gated=gated) for weight in weights]


def _agrees(x: Tensor, weight: Tensor, packed: PackedWeight, activation: str) -> bool:
    x = x[-CHECKED_ROWS:]
    y = linear(x, packed, activation=activation)
    if packed.gated:
        return close(y, reference.linear(x, weight, gated=True, activation=activation))
    return close(y[:, -CHECKED_OUTPUTS:], reference.linear(x, weight[-CHECKED_OUTPUTS:], activation=activation))
