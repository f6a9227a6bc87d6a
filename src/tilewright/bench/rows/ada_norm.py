"""Adaptive norms and gated adds of diffusion transformers, with one modulation for a sample."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from tilewright.bench.row import Calls, Row, close, random, rotation
from tilewright.ops.ada_norm import ada_layer_norm, gated_add
from tilewright.ops.torch_backend import ada_norm as reference

EPS = 1e-6
SHAPES = ((4096, 3072), (1024, 1536))  # picture tokens, width


def rows() -> Iterator[Row]:
    for tokens, width in SHAPES:
        elements = tokens * width
        shape = f"[1, {tokens}, {width}]"
        yield Row("ada_layer_norm", shape, 4 * elements, 10 * elements, partial(_norm, tokens, width))
        yield Row("ada_layer_norm gated add", shape, 8 * elements, 12 * elements, partial(_fused, tokens, width))
        yield Row("gated_add", shape, 6 * elements, 2 * elements, partial(_add, tokens, width))


def _inputs(tokens: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    scale, shift, gate = (random(1, width, seed=seed) for seed in (1, 2, 3))
    return random(1, tokens, width, scale=0.1), scale, shift, gate


def _norm(tokens: int, width: int) -> Calls:
    x, scale, shift, _ = _inputs(tokens, width)
    sets = rotation(x, x.clone())

    def ours(call: int) -> object:
        source, out = sets[call % len(sets)]
        return ada_layer_norm(source, scale, shift, EPS, out=out)

    def theirs(call: int) -> object:
        normed = functional.layer_norm(sets[call % len(sets)][0], (width,), eps=EPS)
        return torch.addcmul(shift, normed, 1 + scale)

    def check() -> bool:
        return close(ada_layer_norm(x, scale, shift, EPS), reference.ada_layer_norm(x, scale, shift, EPS))

    return Calls(ours, theirs, check)


def _fused(tokens: int, width: int) -> Calls:
    x, scale, shift, gate = _inputs(tokens, width)
    residual = random(1, tokens, width, seed=4)
    actual = ada_layer_norm(x, scale, shift, EPS, residual=residual.clone(), gate=gate)
    expected = reference.ada_layer_norm(x, scale, shift, EPS, residual=residual.clone(), gate=gate)
    sets = rotation(x, residual, x.clone())

    def ours(call: int) -> object:
        source, total, out = sets[call % len(sets)]
        return ada_layer_norm(source, scale, shift, EPS, residual=total, gate=gate, out=out)

    def theirs(call: int) -> object:
        source, total, _ = sets[call % len(sets)]
        normed = functional.layer_norm(total.addcmul_(source, gate), (width,), eps=EPS)
        return torch.addcmul(shift, normed, 1 + scale)

    return Calls(ours, theirs, lambda: close(actual, expected))


def _add(tokens: int, width: int) -> Calls:
    x, _, _, gate = _inputs(tokens, width)
    residual = random(1, tokens, width, seed=4)
    sets = rotation(x, residual, x.clone())

    def ours(call: int) -> object:
        source, total, out = sets[call % len(sets)]
        return gated_add(total, source, gate, out=out)

    def theirs(call: int) -> object:
        source, total, out = sets[call % len(sets)]
        return torch.addcmul(total, source, gate, out=out)

    return Calls(ours, theirs, lambda: close(gated_add(residual, x, gate), reference.gated_add(residual, x, gate)))
