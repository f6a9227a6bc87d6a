"""Rope of q and k within a packed qkv, with and without the norm of Qwen3's heads; the table of cosines."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from tilewright.bench.row import Calls, Row, close, random, rotation
from tilewright.bench.shapes import MODELS
from tilewright.ops import rope
from tilewright.ops.torch_backend import rope as reference

EPS = 1e-6
TOKENS = (8, 4096)
MROPE_SECTION = [24, 20, 20]


def rows() -> Iterator[Row]:
    for model in MODELS:
        heads, kv_heads, width = model.num_heads, model.num_kv_heads, model.head_width
        for tokens in TOKENS:
            elements = tokens * (heads + kv_heads) * width
            moved = 4 * elements + 4 * tokens * width
            shape = f"{model.name} [{tokens}, {heads}+{kv_heads}, {width}]"
            make = partial(_norm_rope, tokens, heads, kv_heads, width)
            yield Row("qk_norm_rope", shape, moved, 7 * elements, make)
        vision = model.vision
        elements = TOKENS[-1] * 2 * vision.num_heads * vision.head_width
        shape = f"{model.name} vision [{TOKENS[-1]}, {vision.num_heads}+{vision.num_heads}, {vision.head_width}]"
        moved = 4 * elements + 4 * TOKENS[-1] * vision.head_width
        yield Row(
            "rope_qk", shape, moved, 3 * elements, partial(_rope, TOKENS[-1], vision.num_heads, vision.head_width)
        )
    frequencies = TOKENS[-1] * sum(MROPE_SECTION)
    yield Row("rope_table", f"[{TOKENS[-1]}, {sum(MROPE_SECTION)}]", 8 * frequencies, 30 * frequencies, _table)


def _table_inputs(tokens: int, num_frequencies: int) -> tuple[Tensor, Tensor, Tensor]:
    positions = torch.arange(tokens)[None].repeat(3, 1)
    inv_freq = 5e6 ** -(torch.arange(num_frequencies) / num_frequencies)
    return positions, inv_freq, rope.interleaved_axes(MROPE_SECTION)


def _table() -> Calls:
    inputs = _table_inputs(TOKENS[-1], sum(MROPE_SECTION))
    positions, inv_freq, axes = inputs
    out = rope.rope_table(*inputs)

    def theirs(_: int) -> object:
        angle = positions[axes.long()].T.float() * inv_freq
        return angle.cos(), angle.sin()

    def check() -> bool:
        return all(
            close(a, b, 1e-3) for a, b in zip(rope.rope_table(*inputs), reference.rope_table(*inputs), strict=True)
        )

    return Calls(lambda _: rope.rope_table(*inputs, out=out), theirs, check)


def _heads(qkv: Tensor, heads: int, kv_heads: int, width: int) -> tuple[Tensor, Tensor]:
    q, k = qkv[:, : heads * width], qkv[:, heads * width : (heads + kv_heads) * width]
    return q.view(-1, heads, width), k.view(-1, kv_heads, width)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As the models of transformers do it: cos and sin [T, 1, K] in the type of x."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _widened(table: Tensor) -> Tensor:
    return torch.cat((table, table), dim=-1)[:, None].to(torch.bfloat16)


def _norm_rope(tokens: int, heads: int, kv_heads: int, width: int) -> Calls:
    qkv = random(tokens, (heads + 2 * kv_heads) * width)
    q_weight, k_weight = random(width, seed=1), random(width, seed=2)
    cos, sin = rope.rope_table(*_table_inputs(tokens, width // 2))
    their_cos, their_sin = _widened(cos), _widened(sin)
    expected = [
        reference.norm_rope(x, weight, EPS, cos, sin)
        for x, weight in zip(_heads(qkv, heads, kv_heads, width), (q_weight, k_weight), strict=True)
    ]
    checked = _heads(qkv.clone(), heads, kv_heads, width)
    rope.qk_norm_rope(*checked, q_weight, k_weight, EPS, cos, sin)
    sets = [_heads(copy, heads, kv_heads, width) for (copy,) in rotation(qkv)]

    def ours(call: int) -> None:
        rope.qk_norm_rope(*sets[call % len(sets)], q_weight, k_weight, EPS, cos, sin)

    def theirs(call: int) -> object:
        q, k = sets[call % len(sets)]
        q, k = functional.rms_norm(q, (width,), q_weight, EPS), functional.rms_norm(k, (width,), k_weight, EPS)
        return _rotated(q, their_cos, their_sin), _rotated(k, their_cos, their_sin)

    return Calls(ours, theirs, lambda: all(close(a, b) for a, b in zip(checked, expected, strict=True)))


def _rope(tokens: int, heads: int, width: int) -> Calls:
    qkv = random(tokens, 3 * heads * width)
    angle = random(tokens, width // 2, dtype=torch.float32, seed=1)
    cos, sin = angle.cos(), angle.sin()
    their_cos, their_sin = _widened(cos), _widened(sin)
    expected = [reference.rope(x, cos, sin) for x in _heads(qkv, heads, heads, width)]
    checked = _heads(qkv.clone(), heads, heads, width)
    rope.rope_qk(*checked, cos, sin)
    sets = [_heads(copy, heads, heads, width) for (copy,) in rotation(qkv)]

    def ours(call: int) -> None:
        rope.rope_qk(*sets[call % len(sets)], cos, sin)

    def theirs(call: int) -> object:
        q, k = sets[call % len(sets)]
        return _rotated(q, their_cos, their_sin), _rotated(k, their_cos, their_sin)

    return Calls(ours, theirs, lambda: all(close(a, b) for a, b in zip(checked, expected, strict=True)))
