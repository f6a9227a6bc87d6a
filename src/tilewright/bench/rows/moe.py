"""The router and the experts of a layer of a sparse model."""

from collections.abc import Iterator
from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.nn import functional

from tilewright.bench.row import Calls, Row, close, random
from tilewright.bench.shapes import SPARSE_MODELS, Experts
from tilewright.bench.torch_dtype import fastest_dtype
from tilewright.ops.moe import PackedExperts, moe, route
from tilewright.ops.torch_backend import moe as reference

TOKENS = (1, 8, 64, 1024)
ROUTED_TOKENS = (1, 1024)
# The experts of a layer are four times the largest cache we have seen, so calls rotate among routings, not among
# copies: 16 routings of 8 experts per token use every expert.
NUM_ROUTINGS = 16
# The reference runs in fp32: this many tokens are enough to show a wrong kernel.
CHECKED_TOKENS = 4


def rows() -> Iterator[Row]:
    for model in SPARSE_MODELS:
        for tokens in ROUTED_TOKENS:
            label = f"{model.name} {tokens} tokens, {model.top_k} of {model.num_experts}"
            moved = tokens * (4 * model.num_experts + 8 * model.top_k)
            yield Row("route", label, moved, 0, partial(_route_calls, model, tokens))
        for tokens in TOKENS:
            yield _moe_row(model, tokens)


def _routings(model: Experts, tokens: int) -> list[tuple[Tensor, Tensor]]:
    """ids and weights of each call: every expert equally often, as routers are trained to do.

    Neighbouring calls of one token have no expert in common until all had their turn.
    """
    generator = torch.Generator().manual_seed(0)
    needed = NUM_ROUTINGS * tokens
    per_deal = model.num_experts // model.top_k  # tokens that one shuffled deck of experts is dealt to
    decks = [torch.randperm(model.num_experts, generator=generator) for _ in range(-(-needed // per_deal))]
    hands = torch.cat([deck[: per_deal * model.top_k].view(per_deal, model.top_k) for deck in decks]).int()
    weights = torch.softmax(torch.randn(hands.shape, generator=generator), -1)
    # Tokens of a call come from different decks, so that some meet at an expert.
    calls = [slice(call, needed, NUM_ROUTINGS) for call in range(NUM_ROUTINGS)]
    return [(hands[call].contiguous(), weights[call].contiguous()) for call in calls]


def _moe_row(model: Experts, tokens: int) -> Row:
    num_hit = sum(ids.unique().numel() for ids, _ in _routings(model, tokens)) // NUM_ROUTINGS
    moved = 2 * (num_hit * model.expert_elements + 2 * tokens * model.hidden)
    flops = 2 * tokens * model.top_k * model.expert_elements
    label = f"{model.name} {tokens} tokens, {num_hit} experts hit"
    return Row("moe", label, moved, flops, partial(_moe_calls, model, tokens))


def _moe_calls(model: Experts, tokens: int) -> Calls:
    x = random(tokens, model.hidden)
    gate_up, down, packed = _experts(model)
    routings = _routings(model, tokens)
    out = torch.empty_like(x)
    dtype = fastest_dtype(max(1, tokens * model.top_k // model.num_experts))  # the rows that an expert gets
    their_x, their_weights = x.to(dtype), (gate_up.to(dtype), down.to(dtype))

    def ours(call: int) -> object:
        return moe(x, *routings[call % NUM_ROUTINGS], *packed, out=out)

    def theirs(call: int) -> object:
        return _torch_moe(their_x, *routings[call % NUM_ROUTINGS], *their_weights)

    def check() -> bool:
        ids, weights = (t[:CHECKED_TOKENS] for t in routings[0])
        expected = reference.plain_moe(x[:CHECKED_TOKENS], ids, weights, gate_up, down)
        return close(moe(x, *routings[0], *packed)[:CHECKED_TOKENS], expected, steps=3.0)

    return Calls(ours, theirs, check)


def _torch_moe(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The loop over the used experts of models written in torch."""
    y = torch.zeros_like(x)
    for expert in ids.unique().tolist():
        tokens, choice = torch.where(ids == expert)
        gate, up = functional.linear(x[tokens], gate_up[expert]).chunk(2, dim=-1)
        output = functional.linear(functional.silu(gate) * up, down[expert])
        y.index_add_(0, tokens, output * weights[tokens, choice, None].to(x.dtype))
    return y


@lru_cache(maxsize=1)  # rows of one model follow each other
def _experts(model: Experts) -> tuple[Tensor, Tensor, tuple[PackedExperts, PackedExperts]]:
    """gate|up and down of all experts, plain and packed, of one expert's random numbers."""
    hidden, inner, count = model.hidden, model.intermediate, model.num_experts
    plain = (
        random(2 * inner, hidden, scale=hidden**-0.5).repeat(count, 1, 1),
        random(hidden, inner, scale=inner**-0.5, seed=1).repeat(count, 1, 1),
    )
    packed = []
    for weights, gated in zip(plain, (True, False), strict=True):
        # Rolled, so that all experts differ and a wrong one shows.
        for expert in range(count):
            weights[expert] = weights[expert].roll(expert, 0)
        experts = PackedExperts.empty(count, weights.shape[1], weights.shape[2], gated, weights.dtype)
        for expert in range(count):
            experts.pack(expert, weights[expert])
        packed.append(experts)
    return *plain, (packed[0], packed[1])


def _route_calls(model: Experts, tokens: int) -> Calls:
    logits = random(tokens, model.num_experts, dtype=torch.float32)
    out = torch.empty(tokens, model.top_k, dtype=torch.int32), torch.empty(tokens, model.top_k)

    def theirs(_: int) -> object:
        weights, ids = torch.softmax(logits, -1).topk(model.top_k, -1)
        return ids, weights / weights.sum(-1, keepdim=True)

    def check() -> bool:
        ids, weights = route(logits, model.top_k, renormalize=True)
        expected_ids, expected_weights = reference.route(logits, model.top_k, renormalize=True)
        return torch.equal(ids, expected_ids) and close(weights, expected_weights, steps=0.01)

    return Calls(lambda _: route(logits, model.top_k, renormalize=True, out=out), theirs, check)
