"""Rows of activations and norms of language models, vision towers, diffusion transformers and autoencoders."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from tilewright.bench.row import Calls, Row, close, random, rotation
from tilewright.bench.shapes import MODELS
from tilewright.ops import activation, norm
from tilewright.ops.norm import ada_layer_norm, gated_add, group_norm
from tilewright.ops.torch_backend import activation as reference
from tilewright.ops.torch_backend import norm as norm_reference

TOKENS = (8, 4096)
# Rows and channels of stages of Qwen3-Omni's code2wav, for four frames.
SNAKES = ((128, 768), (7680, 96))


def activation_rows() -> Iterator[Row]:
    for model in MODELS:
        for tokens in TOKENS:
            elements = tokens * model.intermediate
            shape = f"{model.name} [{tokens}, 2 x {model.intermediate}]"
            yield Row("silu_and_mul", shape, 6 * elements, 20 * elements, partial(_gated, tokens, model.intermediate))
        tokens, vision = TOKENS[-1], model.vision
        elements = tokens * vision.mlp
        shape = f"{model.name} vision [{tokens}, {vision.mlp}]"
        yield Row("gelu_tanh", shape, 4 * elements, 22 * elements, partial(_gelu, tokens, vision.mlp))
        elements = tokens * model.hidden
        shape = f"{model.name} [{tokens}, {model.hidden}]"
        yield Row("add", shape, 6 * elements, elements, partial(_add_row, tokens, model.hidden))
        yield Row("sigmoid_gate", shape, 6 * elements, 12 * elements, partial(_sigmoid_gate, tokens, model.hidden))
    for length, channels in SNAKES:
        elements = length * channels
        shape = f"voice [{length}, {channels}]"
        yield Row("snake", shape, 4 * elements, 20 * elements, partial(_snake, length, channels))


def _gated(tokens: int, width: int) -> Calls:
    x = random(tokens, 2 * width)
    sets = rotation(x, torch.empty(tokens, width, dtype=x.dtype))

    def ours(call: int) -> object:
        source, out = sets[call % len(sets)]
        return activation.activate_and_mul(source, "silu", out=out)

    def theirs(call: int) -> object:
        source, out = sets[call % len(sets)]
        return torch.mul(functional.silu(source[:, :width]), source[:, width:], out=out)

    return Calls(
        ours, theirs, lambda: close(activation.activate_and_mul(x, "silu"), reference.activate_and_mul(x, "silu"))
    )


def _gelu(tokens: int, width: int) -> Calls:
    x = random(tokens, width)
    sets = rotation(x, x.clone())

    def ours(call: int) -> object:
        source, out = sets[call % len(sets)]
        return activation.activate(source, "gelu_tanh", out=out)

    def theirs(call: int) -> object:
        return functional.gelu(sets[call % len(sets)][0], approximate="tanh")

    return Calls(ours, theirs, lambda: close(activation.activate(x, "gelu_tanh"), reference.activate(x, "gelu_tanh")))


def _add_row(tokens: int, width: int) -> Calls:
    return _of_two(tokens, width, activation.add, torch.add, reference.add)


def _sigmoid_gate(tokens: int, width: int) -> Calls:
    def theirs(x: Tensor, gate: Tensor, out: Tensor) -> Tensor:
        return torch.mul(x, torch.sigmoid(gate), out=out)

    return _of_two(tokens, width, activation.sigmoid_gate, theirs, reference.sigmoid_gate)


def _of_two(
    tokens: int, width: int, op: Callable[..., Tensor], theirs: Callable[..., Tensor], twin: Callable[..., Tensor]
) -> Calls:
    x, y = random(tokens, width), random(tokens, width, seed=1)
    sets = rotation(x, y, x.clone())

    def call_of(function: Callable[..., Tensor]) -> Callable[[int], object]:
        def call(number: int) -> object:
            a, b, out = sets[number % len(sets)]
            return function(a, b, out=out)

        return call

    return Calls(call_of(op), call_of(theirs), lambda: close(op(x, y), twin(x, y)))


def _snake(length: int, channels: int) -> Calls:
    x = random(length, channels)
    scale, share = (random(channels, seed=seed).float() for seed in (1, 2))
    sets = rotation(x, x.clone())

    def ours(call: int) -> object:
        source, out = sets[call % len(sets)]
        return activation.snake(source, scale, share, out=out)

    def theirs(call: int) -> object:
        source = sets[call % len(sets)][0]
        return source + torch.sin(source * scale).square() * share

    return Calls(ours, theirs, lambda: close(activation.snake(x, scale, share), reference.snake(x, scale, share)))


EPS = 1e-6


def norm_rows() -> Iterator[Row]:
    for model in MODELS:
        for tokens in TOKENS:
            elements = tokens * model.hidden
            shape = f"{model.name} [{tokens}, {model.hidden}]"
            yield Row("rms_norm", shape, 4 * elements, 4 * elements, partial(_rms, tokens, model.hidden))
            yield Row("rms_norm residual", shape, 8 * elements, 5 * elements, partial(_residual, tokens, model.hidden))
        width = model.vision.hidden
        elements = TOKENS[-1] * width
        shape = f"{model.name} vision [{TOKENS[-1]}, {width}]"
        yield Row("layer_norm", shape, 4 * elements, 8 * elements, partial(_layer, TOKENS[-1], width))


def _rms(tokens: int, width: int) -> Calls:
    x, weight = random(tokens, width), random(width, seed=1)
    sets = rotation(x, x.clone())

    def ours(call: int) -> object:
        source, out = sets[call % len(sets)]
        return norm.rms_norm(source, weight, EPS, out=out)

    def theirs(call: int) -> object:
        return functional.rms_norm(sets[call % len(sets)][0], (width,), weight, EPS)

    return Calls(ours, theirs, lambda: close(norm.rms_norm(x, weight, EPS), norm_reference.rms_norm(x, weight, EPS)))


def _residual(tokens: int, width: int) -> Calls:
    x, weight, residual = random(tokens, width, scale=0.1), random(width, seed=1), random(tokens, width, seed=2)
    expected = norm_reference.rms_norm(x, weight, EPS, residual=residual.clone())
    actual = norm.rms_norm(x, weight, EPS, residual=residual.clone())
    sets = rotation(x, residual, x.clone())

    def ours(call: int) -> object:
        source, total, out = sets[call % len(sets)]
        return norm.rms_norm(source, weight, EPS, residual=total, out=out)

    def theirs(call: int) -> object:
        source, total, _ = sets[call % len(sets)]
        return functional.rms_norm(total.add_(source), (width,), weight, EPS)

    return Calls(ours, theirs, lambda: close(actual, expected))


def _layer(tokens: int, width: int) -> Calls:
    x, weight, bias = random(tokens, width), random(width, seed=1), random(width, seed=2)
    sets = rotation(x, x.clone())

    def ours(call: int) -> object:
        source, out = sets[call % len(sets)]
        return norm.layer_norm(source, weight, bias, EPS, out=out)

    def theirs(call: int) -> object:
        return functional.layer_norm(sets[call % len(sets)][0], (width,), weight, bias, EPS)

    def check() -> bool:
        return close(norm.layer_norm(x, weight, bias, EPS), norm_reference.layer_norm(x, weight, bias, EPS))

    return Calls(ours, theirs, check)


SHAPES = ((4096, 3072), (1024, 1536))  # image tokens, width


def ada_norm_rows() -> Iterator[Row]:
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
        return close(ada_layer_norm(x, scale, shift, EPS), norm_reference.ada_layer_norm(x, scale, shift, EPS))

    return Calls(ours, theirs, check)


def _fused(tokens: int, width: int) -> Calls:
    x, scale, shift, gate = _inputs(tokens, width)
    residual = random(1, tokens, width, seed=4)
    actual = ada_layer_norm(x, scale, shift, EPS, residual=residual.clone(), gate=gate)
    expected = norm_reference.ada_layer_norm(x, scale, shift, EPS, residual=residual.clone(), gate=gate)
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

    return Calls(ours, theirs, lambda: close(gated_add(residual, x, gate), norm_reference.gated_add(residual, x, gate)))


GROUP_EPS, GROUPS = 1e-6, 32
GROUP_SHAPES = ((64, 512), (256, 256), (512, 128))  # pixels on a side, channels


def group_norm_rows() -> Iterator[Row]:
    for size, channels in GROUP_SHAPES:
        elements = size * size * channels
        shape = f"[1, {size}, {size}, {channels}]"
        yield Row("group_norm silu", shape, 6 * elements, 16 * elements, partial(_calls, size, channels))


def _calls(size: int, channels: int) -> Calls:
    x, weight, bias = random(1, size, size, channels), random(channels, seed=1), random(channels, seed=2)
    sets = rotation(x, x.clone())

    def ours(call: int) -> object:
        source, out = sets[call % len(sets)]
        return group_norm(source, GROUPS, weight, bias, GROUP_EPS, activation="silu", out=out)

    def theirs(call: int) -> object:
        source = sets[call % len(sets)][0].movedim(-1, 1)  # channels_last
        return functional.silu(functional.group_norm(source, GROUPS, weight, bias, GROUP_EPS), inplace=True)

    def check() -> bool:
        actual = group_norm(x, GROUPS, weight, bias, GROUP_EPS, activation="silu")
        return close(actual, norm_reference.group_norm(x, GROUPS, weight, bias, GROUP_EPS, activation="silu"))

    return Calls(ours, theirs, check)
