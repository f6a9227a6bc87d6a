"""Packed linears of a layer of the language model and of the vision tower, and the head."""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.nn import functional

from tilewright.bench.row import Calls, Row, close, num_copies, random, rotation
from tilewright.bench.shapes import MODELS, Vision
from tilewright.bench.torch_dtype import fastest_dtype
from tilewright.ops.linear import PackedWeight, linear, pack_weight
from tilewright.ops.packed import PackedForm, rounded, weight_format
from tilewright.ops.quantized import Quantized, scale_dtype
from tilewright.ops.torch_backend import linear as reference

ROWS = (1, 4, 16, 128, 512, 1024)
QUANTIZED = (
    ("int8", 0),
    ("int8_rotated", 0),
    ("int4", 32),
    ("int4", 128),
    ("int4_rotated", 32),
    ("mxfp4", 32),
    ("fp8", 128),
    ("int8_exact", 0),
)
QUANTIZED_ROWS = (1, 8, 512)
HEAD_ROWS = (1, 16)
VISION_ROWS = (1024, 4096)
# The reference runs in fp32: this many rows and outputs are enough to show a wrong kernel.
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
        for format in QUANTIZED:
            for m in QUANTIZED_ROWS:
                yield _quantized_row(f"{model.name} gate_up", m, n, k, format)
        for m in HEAD_ROWS:
            yield _row("linear", f"{model.name} lm_head", m, model.vocabulary, model.hidden, f"linear lm_head M={m}")
        for name, (n, k) in model.vision.linears.items():
            for m in VISION_ROWS:
                yield _row("linear", f"{model.name} vision {name}", m, n, k, f"linear vision M={m}")
        vision, patches = model.vision, VISION_ROWS[-1]
        frame = vision.patch_elements // 2  # of a picture: the kernel is summed over its two frames
        moved = 2 * (vision.hidden * frame + patches * (frame + vision.hidden))
        shape = f"{model.name} {patches} patches of {vision.patch} x {vision.patch}"
        yield Row("patch embedding", shape, moved, 2 * patches * vision.hidden * frame, partial(_patches, vision))


def _row(name: str, label: str, m: int, n: int, k: int, group: str, *, gated: bool = False) -> Row:
    outputs = n // 2 if gated else n
    moved = 2 * (n * k + m * k + m * outputs)
    return Row(name, f"{label} M={m} N={n} K={k}", moved, 2 * m * n * k, partial(_calls, m, n, k, gated), group)


def _quantized_row(label: str, m: int, n: int, k: int, format: tuple[str, int]) -> Row:
    """Beside our own product of the same weight in bf16."""
    name, group = format
    form = PackedForm(weight_format(*format), n, k)
    num_scales, scale_bytes = form.num_scales, 1 if form.format.has_steps else scale_dtype(name, group).itemsize
    moved = form.num_elements + num_scales * scale_bytes + 2 * m * (k + n)
    title = f"linear {name}" + (f" in groups of {group}" if group else "")
    shape = f"{label} M={m} N={n} K={k}, beside bf16"
    return Row(title, shape, moved, 2 * m * n * k, partial(_quantized_calls, m, n, k, format), f"{title} M={m}")


def _quantized_calls(m: int, n: int, k: int, format: tuple[str, int]) -> Calls:
    x = random(m, k)
    plain = _weights(n, k, False)[1]
    weight, packed = _quantized_weights(n, k, format)
    out = torch.empty(m, n, dtype=x.dtype)

    def agrees() -> bool:
        y = linear(x[-CHECKED_ROWS:], packed[0])[:, :CHECKED_OUTPUTS]
        return close(y, reference.plain_linear(x[-CHECKED_ROWS:], weight))

    return Calls(
        lambda call: linear(x, packed[call % len(packed)], out=out),
        lambda call: linear(x, plain[call % len(plain)], out=out),
        agrees,
    )


@lru_cache(maxsize=1)
def _quantized_weights(n: int, k: int, format: tuple[str, int]) -> tuple[Quantized, list[PackedWeight]]:
    """The first rows of a weight rounded, and a rotation of all of it packed."""
    weight = _weight(n, k)
    packed = pack_weight(weight, dtype=weight_format(*format))
    copies = -(-num_copies(weight) * weight.nbytes // packed.size_bytes)
    rotated = [replace(packed, data=packed.data.clone()) for _ in range(copies)]
    return rounded(weight[:CHECKED_OUTPUTS], weight_format(*format)), rotated


def _calls(m: int, n: int, k: int, gated: bool) -> Calls:
    x = random(m, k)
    weight, packed = _weights(n, k, gated)
    their_weights = _their_weights(n, k, fastest_dtype(m))
    their_x = x.to(their_weights[0].dtype)
    activation = "silu" if gated else "none"
    out = torch.empty(m, n // 2 if gated else n, dtype=x.dtype)

    def ours(call: int) -> object:
        return linear(x, packed[call % len(packed)], activation=activation, out=out)

    def theirs(call: int) -> object:
        y = functional.linear(their_x, their_weights[call % len(their_weights)])
        return functional.silu(y[:, : n // 2]) * y[:, n // 2 :] if gated else y

    return Calls(ours, theirs, lambda: _agrees(x, weight, packed[0], activation))


def _patches(vision: Vision) -> Calls:
    """A picture as one frame with a summed kernel, against the model's two equal frames and convolution."""
    patches, frame = VISION_ROWS[-1], vision.patch_elements // 2
    x, kernel = (
        random(patches, frame),
        random(vision.hidden, 3, 2, vision.patch, vision.patch, scale=frame**-0.5, seed=1),
    )
    bias = random(vision.hidden, seed=2)
    weight = kernel.float().sum(2).to(torch.bfloat16).view(vision.hidden, frame)
    packed = pack_weight(weight, bias)
    out = torch.empty(patches, vision.hidden, dtype=x.dtype)
    dtype = fastest_dtype(patches)
    frames = x.to(dtype).view(patches, 3, 1, vision.patch, vision.patch).expand(-1, -1, 2, -1, -1).contiguous()
    their_kernel, their_bias = kernel.to(dtype), bias.to(dtype)

    def check() -> bool:
        return close(linear(x, packed), reference.plain_linear(x, weight, bias))

    def theirs(_: int) -> Tensor:
        return functional.conv3d(frames, their_kernel, their_bias, kernel.shape[2:])

    return Calls(lambda _: linear(x, packed, out=out), theirs, check)


@lru_cache(maxsize=1)  # rows of one weight follow each other
def _weights(n: int, k: int, gated: bool) -> tuple[Tensor, list[PackedWeight]]:
    """A weight that keeps the sums near 1, and a rotation of it packed."""
    weight = _weight(n, k)
    return weight, [pack_weight(weight, gated=gated) for _ in range(num_copies(weight))]


@lru_cache(maxsize=1)
def _their_weights(n: int, k: int, dtype: torch.dtype) -> list[Tensor]:
    """A rotation of the same weight, plain and in torch's type."""
    return [copy for (copy,) in rotation(_weight(n, k).to(dtype))]


def _weight(n: int, k: int) -> Tensor:
    # One block of random numbers, repeated: billions of them would take minutes.
    block = random(min(n, 2048), k, scale=k**-0.5, seed=1)
    return block.repeat(-(-n // block.shape[0]), 1)[:n].contiguous()


def _agrees(x: Tensor, weight: Tensor, packed: PackedWeight, activation: str) -> bool:
    x = x[-CHECKED_ROWS:]
    y = linear(x, packed, activation=activation)
    if packed.gated:
        return close(y, reference.plain_linear(x, weight, gated=True, activation=activation))
    return close(y[:, -CHECKED_OUTPUTS:], reference.plain_linear(x, weight[-CHECKED_OUTPUTS:], activation=activation))
