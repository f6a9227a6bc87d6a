"""RMSNorm of the language model, LayerNorm of the vision tower."""

from collections.abc import Iterator
from functools import partial

from torch.nn import functional

from tilewright.bench.row import Calls, Row, close, random, rotation
from tilewright.bench.shapes import MODELS
from tilewright.ops import norm
from tilewright.ops.torch_backend import norm as reference

EPS = 1e-6
TOKENS = (8, 4096)


def rows() -> Iterator[Row]:
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

    return Calls(ours, theirs, lambda: close(norm.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS)))


def _residual(tokens: int, width: int) -> Calls:
    x, weight, residual = random(tokens, width, scale=0.1), random(width, seed=1), random(tokens, width, seed=2)
    expected = reference.rms_norm(x, weight, EPS, residual=residual.clone())
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
        return close(norm.layer_norm(x, weight, bias, EPS), reference.layer_norm(x, weight, bias, EPS))

    return Calls(ours, theirs, check)
