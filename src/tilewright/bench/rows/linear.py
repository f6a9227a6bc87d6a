"""Rows of packed linears (language model, vision tower, head) and of the router and experts of MoE layers."""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.nn import functional

from tilewright.bench.row import Calls, Row, close, num_copies, random, rotation
from tilewright.bench.shapes import MODELS, SPARSE_MODELS, ExpertShape, VisionShape
from tilewright.bench.torch_dtype import fastest_dtype
from tilewright.ops.linear import PackedWeight, linear, pack_weight
from tilewright.ops.moe import PackedExperts, moe, route
from tilewright.ops.packed import PackedForm, rounded, weight_format
from tilewright.ops.quantized import Quantized, scale_dtype
from tilewright.ops.torch_backend import linear as reference
from tilewright.ops.torch_backend import moe as moe_reference

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
# The reference runs in fp32: this many rows and outputs suffice to show a wrong kernel.
CHECKED_ROWS, CHECKED_OUTPUTS = 64, 4096


def linear_rows() -> Iterator[Row]:
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
        frame = vision.patch_elements // 2  # for an image, whose kernel is summed over the two frames
        moved = 2 * (vision.hidden * frame + patches * (frame + vision.hidden))
        shape = f"{model.name} {patches} patches of {vision.patch} x {vision.patch}"
        yield Row("patch embedding", shape, moved, 2 * patches * vision.hidden * frame, partial(_patches, vision))


def _row(name: str, label: str, m: int, n: int, k: int, group: str, *, gated: bool = False) -> Row:
    outputs = n // 2 if gated else n
    moved = 2 * (n * k + m * k + m * outputs)
    return Row(name, f"{label} M={m} N={n} K={k}", moved, 2 * m * n * k, partial(_calls, m, n, k, gated), group)


def _quantized_row(label: str, m: int, n: int, k: int, format: tuple[str, int]) -> Row:
    """Return a row that compares a quantised linear with the bf16 kernel instead of torch."""
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
    """Return the quantised first rows of a weight for the check, and a rotation of the packed weight."""
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


def _patches(vision: VisionShape) -> Calls:
    """Return the calls of one frame with a summed kernel, and of torch's convolution over two equal frames."""
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


@lru_cache(maxsize=1)  # rows of one weight are consecutive
def _weights(n: int, k: int, gated: bool) -> tuple[Tensor, list[PackedWeight]]:
    """Return a weight that keeps sums near 1, and a rotation of the packed weight."""
    weight = _weight(n, k)
    return weight, [pack_weight(weight, gated=gated) for _ in range(num_copies(weight))]


@lru_cache(maxsize=1)
def _their_weights(n: int, k: int, dtype: torch.dtype) -> list[Tensor]:
    """Return a rotation of the same weight for torch, in `dtype`."""
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


TOKENS = (1, 8, 64, 1024)
ROUTED_TOKENS = (1, 1024)
# The experts of a layer are four times the largest known cache, so calls rotate among routings instead of copies: 16
# routings of 8 experts per token use every expert.
NUM_ROUTINGS = 16
# moe_reference runs in fp32: this many tokens suffice to show a wrong kernel.
CHECKED_TOKENS = 4


def moe_rows() -> Iterator[Row]:
    for model in SPARSE_MODELS:
        for tokens in ROUTED_TOKENS:
            label = f"{model.name} {tokens} tokens, {model.top_k} of {model.num_experts}"
            moved = tokens * (4 * model.num_experts + 8 * model.top_k)
            yield Row("route", label, moved, 0, partial(_route_calls, model, tokens))
        for tokens in TOKENS:
            yield _moe_row(model, tokens)


def _routings(model: ExpertShape, tokens: int) -> list[tuple[Tensor, Tensor]]:
    """Return ids and weights of each call, with every expert equally often, as routers are trained to do.

    Consecutive calls of one token share no expert until all were used.
    """
    generator = torch.Generator().manual_seed(0)
    needed = NUM_ROUTINGS * tokens
    per_deal = model.num_experts // model.top_k  # tokens to which one shuffled deck of experts is dealt
    decks = [torch.randperm(model.num_experts, generator=generator) for _ in range(-(-needed // per_deal))]
    hands = torch.cat([deck[: per_deal * model.top_k].view(per_deal, model.top_k) for deck in decks]).int()
    weights = torch.softmax(torch.randn(hands.shape, generator=generator), -1)
    # Tokens of a call come from different decks, so that some share an expert.
    calls = [slice(call, needed, NUM_ROUTINGS) for call in range(NUM_ROUTINGS)]
    return [(hands[call].contiguous(), weights[call].contiguous()) for call in calls]


def _moe_row(model: ExpertShape, tokens: int) -> Row:
    num_hit = sum(ids.unique().numel() for ids, _ in _routings(model, tokens)) // NUM_ROUTINGS
    moved = 2 * (num_hit * model.expert_elements + 2 * tokens * model.hidden)
    flops = 2 * tokens * model.top_k * model.expert_elements
    label = f"{model.name} {tokens} tokens, {num_hit} experts hit"
    return Row("moe", label, moved, flops, partial(_moe_calls, model, tokens))


def _moe_calls(model: ExpertShape, tokens: int) -> Calls:
    x = random(tokens, model.hidden)
    gate_up, down, packed = _experts(model)
    routings = _routings(model, tokens)
    out = torch.empty_like(x)
    dtype = fastest_dtype(max(1, tokens * model.top_k // model.num_experts))  # rows per expert
    their_x, their_weights = x.to(dtype), (gate_up.to(dtype), down.to(dtype))

    def ours(call: int) -> object:
        return moe(x, *routings[call % NUM_ROUTINGS], *packed, out=out)

    def theirs(call: int) -> object:
        return _torch_moe(their_x, *routings[call % NUM_ROUTINGS], *their_weights)

    def check() -> bool:
        ids, weights = (t[:CHECKED_TOKENS] for t in routings[0])
        expected = moe_reference.plain_moe(x[:CHECKED_TOKENS], ids, weights, gate_up, down)
        return close(moe(x, *routings[0], *packed)[:CHECKED_TOKENS], expected, steps=3.0)

    return Calls(ours, theirs, check)


def _torch_moe(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Return the result of an MoE layer in torch, which loops over the used experts."""
    y = torch.zeros_like(x)
    for expert in ids.unique().tolist():
        tokens, choice = torch.where(ids == expert)
        gate, up = functional.linear(x[tokens], gate_up[expert]).chunk(2, dim=-1)
        output = functional.linear(functional.silu(gate) * up, down[expert])
        y.index_add_(0, tokens, output * weights[tokens, choice, None].to(x.dtype))
    return y


@lru_cache(maxsize=1)  # rows of one model are consecutive
def _experts(model: ExpertShape) -> tuple[Tensor, Tensor, tuple[PackedExperts, PackedExperts]]:
    """Return gate|up and down of all experts, plain and packed, made from one expert's random numbers."""
    hidden, inner, count = model.hidden, model.intermediate, model.num_experts
    plain = (
        random(2 * inner, hidden, scale=hidden**-0.5).repeat(count, 1, 1),
        random(hidden, inner, scale=inner**-0.5, seed=1).repeat(count, 1, 1),
    )
    packed = []
    for weights, gated in zip(plain, (True, False), strict=True):
        # Rolled, so that all experts differ and a wrong expert is detected.
        for expert in range(count):
            weights[expert] = weights[expert].roll(expert, 0)
        experts = PackedExperts.empty(count, weights.shape[1], weights.shape[2], gated, weights.dtype)
        for expert in range(count):
            experts.pack(expert, weights[expert])
        packed.append(experts)
    return *plain, (packed[0], packed[1])


def _route_calls(model: ExpertShape, tokens: int) -> Calls:
    logits = random(tokens, model.num_experts, dtype=torch.float32)
    out = torch.empty(tokens, model.top_k, dtype=torch.int32), torch.empty(tokens, model.top_k)

    def theirs(_: int) -> object:
        weights, ids = torch.softmax(logits, -1).topk(model.top_k, -1)
        return ids, weights / weights.sum(-1, keepdim=True)

    def check() -> bool:
        ids, weights = route(logits, model.top_k, renormalize=True)
        expected_ids, expected_weights = moe_reference.route(logits, model.top_k, renormalize=True)
        return torch.equal(ids, expected_ids) and close(weights, expected_weights, steps=0.01)

    return Calls(lambda _: route(logits, model.top_k, renormalize=True, out=out), theirs, check)
