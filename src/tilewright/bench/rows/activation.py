"""The gated activation of the language model, the gelu of the vision tower, residual add, sigmoid gates, snakes."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from tilewright.bench.row import Calls, Row, close, random, rotation
from tilewright.bench.shapes import MODELS
from tilewright.ops import activation
from tilewright.ops.torch_backend import activation as reference

TOKENS = (8, 4096)
# Rows and channels of the stages of Qwen3-Omni's code2wav, of four frames.
SNAKES = ((128, 768), (7680, 96))


def rows() -> Iterator[Row]:
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
        yield Row("add", shape, 6 * elements, elements, partial(_add, tokens, model.hidden))
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
        return activation.silu_and_mul(source, out=out)

    def theirs(call: int) -> object:
        source, out = sets[call % len(sets)]
        return torch.mul(functional.silu(source[:, :width]), source[:, width:], out=out)

    return Calls(ours, theirs, lambda: close(activation.silu_and_mul(x), reference.activate_and_mul(x, "silu")))


def _gelu(tokens: int, width: int) -> Calls:
    x = random(tokens, width)
    sets = rotation(x, x.clone())

    def ours(call: int) -> object:
        source, out = sets[call % len(sets)]
        return activation.gelu_tanh(source, out=out)

    def theirs(call: int) -> object:
        return functional.gelu(sets[call % len(sets)][0], approximate="tanh")

    return Calls(ours, theirs, lambda: close(activation.gelu_tanh(x), reference.activate(x, "gelu_tanh")))


def _add(tokens: int, width: int) -> Calls:
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
