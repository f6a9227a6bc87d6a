"""Rows of attention (vision tower, autoencoder, decode step, chunk of a prompt), the KV store, and rope."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from tilewright.bench.row import Calls, Row, close, random, rotation
from tilewright.bench.shapes import MODELS
from tilewright.bench.torch_dtype import fastest_dtype
from tilewright.ops import attention, embedding
from tilewright.ops.attention import KvCache, bytes_per_token, kv_store
from tilewright.ops.torch_backend import attention as reference
from tilewright.ops.torch_backend import embedding as rope_reference
from tilewright.ops.torch_backend.attention import rounded

PATCHES = (1024, 2048, 4096)
AUTOENCODER = (4096, 1, 512)  # pixels, heads, width: the middle of an autoencoder of 512 channels
PAGE_SIZE = 128
BATCH, CONTEXT = 8, 4096
CHUNK = 1024
BYTES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}  # types of keys and values
# fp32 scores of the reference for 4096 patches take 1 GB; this many queries suffice to show a wrong kernel.
CHECKED_QUERIES = 64


def attention_rows() -> Iterator[Row]:
    pixels, heads, width = AUTOENCODER
    shape = f"autoencoder {pixels} pixels, {heads} head of {width}"
    flops = 4 * pixels * pixels * heads * width
    yield Row("varlen_attention", shape, 8 * pixels * heads * width, flops, partial(_varlen, *AUTOENCODER))
    for model in MODELS:
        vision = model.vision
        for patches in PATCHES:
            heads, width = vision.num_heads, vision.head_width
            shape = f"{model.name} vision {patches} patches, {heads} heads of {width}"
            flops = 4 * patches * patches * heads * width
            make = partial(_varlen, patches, heads, width)
            yield Row("varlen_attention", shape, 8 * patches * heads * width, flops, make, "varlen_attention")
        heads, kv_heads, width = model.num_heads, model.num_kv_heads, model.head_width
        sizes = f"{heads}/{kv_heads} heads of {width}"
        kv_bytes = 4 * CONTEXT * kv_heads * width
        shape = f"{model.name} batch {BATCH}, context {CONTEXT}, {sizes}"
        flops = 4 * BATCH * CONTEXT * heads * width
        make = partial(_paged, BATCH, 1, heads, kv_heads, width)
        yield Row("paged_attention decode", shape, BATCH * (kv_bytes + 4 * heads * width), flops, make)
        for name, dtype in BYTES.items():
            moved = CONTEXT * kv_heads * bytes_per_token(width, dtype) + 4 * heads * width
            make = partial(_paged, BATCH, 1, heads, kv_heads, width, dtype)
            yield Row("paged_attention decode", f"{shape}, {name}", BATCH * moved, flops, make)
        shape = f"{model.name} {CHUNK} on a prefix of {CONTEXT - CHUNK}, {sizes}"
        flops = 4 * CHUNK * (CONTEXT - CHUNK // 2) * heads * width
        make = partial(_paged, 1, CHUNK, heads, kv_heads, width)
        yield Row("paged_attention prefill", shape, kv_bytes + 4 * CHUNK * heads * width, flops, make)
        shape = f"{model.name} [{CHUNK}, {kv_heads}, {width}]"
        yield Row("kv_store", shape, 8 * CHUNK * kv_heads * width, 0, partial(_store, kv_heads, width))
        for name, dtype in BYTES.items():
            moved = CHUNK * kv_heads * (4 * width + bytes_per_token(width, dtype))
            yield Row("kv_store", f"{shape}, {name}", moved, 0, partial(_store, kv_heads, width, dtype))


def _as_kept(x: Tensor, kv_dtype: torch.dtype) -> Tensor:
    """Return keys or values as attention reads them from the cache."""
    return x if kv_dtype == torch.bfloat16 else rounded(x, kv_dtype)


def _starts(*starts: int) -> Tensor:
    return torch.tensor(starts, dtype=torch.int32)


def _varlen(patches: int, heads: int, width: int) -> Calls:
    q, k, v = random(3 * patches, heads, width).chunk(3)
    starts = _starts(0, patches)
    out = torch.empty_like(q)
    their_q, their_k, their_v = (t.to(fastest_dtype(patches)).transpose(0, 1)[None] for t in (q, k, v))

    def check() -> bool:
        actual = attention.varlen_attention(q, k, v, starts)[-CHECKED_QUERIES:]
        return close(
            actual, reference.varlen_attention(q[-CHECKED_QUERIES:], k, v, _starts(0, CHECKED_QUERIES), starts), 4
        )

    return Calls(
        lambda _: attention.varlen_attention(q, k, v, starts, out=out),
        lambda _: functional.scaled_dot_product_attention(their_q, their_k, their_v),
        check,
    )


def _paged(
    batch: int, num_queries: int, heads: int, kv_heads: int, width: int, kv_dtype: torch.dtype = torch.bfloat16
) -> Calls:
    """Return the calls for `num_queries` new tokens per sequence, the last of CONTEXT."""
    pages = CONTEXT // PAGE_SIZE
    cache = KvCache.empty(batch * pages, PAGE_SIZE, kv_heads, width, kv_dtype)
    k, v = random(2 * batch * CONTEXT, kv_heads, width).chunk(2)
    # Pages in random order, as in a server that has run for a while.
    block_table = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(1)).to(torch.int32)
    slots = block_table.long()[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)
    kv_store(k, v, cache, slots.flatten())
    block_table = block_table.view(batch, pages)
    q = random(batch * num_queries, heads, width, seed=2)
    starts = _starts(*range(0, batch * num_queries + 1, num_queries))
    lengths = torch.full((batch,), CONTEXT, dtype=torch.int32)
    caches = [KvCache(data, PAGE_SIZE, width, cache.dtype) for (data,) in rotation(cache.data)]
    out = torch.empty_like(q)
    dtype = fastest_dtype(batch * num_queries)
    by_head = [t.to(dtype).view(batch, CONTEXT, kv_heads, width).transpose(1, 2).contiguous() for t in (k, v)]
    theirs_kv = rotation(*by_head)
    theirs_q = q.to(dtype).view(batch, num_queries, heads, width).transpose(1, 2)
    seen = torch.ones(num_queries, CONTEXT, dtype=torch.bool).tril(CONTEXT - num_queries) if num_queries > 1 else None

    def theirs(call: int) -> object:
        keys, values = theirs_kv[call % len(theirs_kv)]
        return functional.scaled_dot_product_attention(theirs_q, keys, values, attn_mask=seen, enable_gqa=True)

    def check() -> bool:
        actual = attention.paged_attention(q, cache, block_table, starts, lengths)[-1:]
        keys, values = (_as_kept(x[-CONTEXT:], kv_dtype) for x in (k, v))
        last = reference.varlen_attention(q[-1:], keys, values, _starts(0, 1), _starts(0, CONTEXT))
        return close(actual, last, 4)

    return Calls(
        lambda call: attention.paged_attention(q, caches[call % len(caches)], block_table, starts, lengths, out=out),
        theirs,
        check,
    )


def _store(kv_heads: int, width: int, kv_dtype: torch.dtype = torch.bfloat16) -> Calls:
    cache = KvCache.empty(4 * CHUNK // PAGE_SIZE, PAGE_SIZE, kv_heads, width, kv_dtype)
    k, v = random(2 * CHUNK, kv_heads, width).chunk(2)
    slots = torch.arange(CHUNK) + CHUNK
    plain = torch.empty(2, 4 * CHUNK, kv_heads, width, dtype=torch.bfloat16)

    def theirs(_: int) -> None:
        plain[0].index_copy_(0, slots, k)
        plain[1].index_copy_(0, slots, v)

    def check() -> bool:
        kv_store(k, v, cache, slots)
        return all(
            torch.equal(read[slots], _as_kept(x, kv_dtype)) for read, x in zip(cache.read(), (k, v), strict=True)
        )

    return Calls(lambda _: kv_store(k, v, cache, slots), theirs, check)


EPS = 1e-6
TOKENS = (8, 4096)
MROPE_SECTION = [24, 20, 20]


def rope_rows() -> Iterator[Row]:
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
    return positions, inv_freq, embedding.interleaved_axes(MROPE_SECTION)


def _table() -> Calls:
    inputs = _table_inputs(TOKENS[-1], sum(MROPE_SECTION))
    positions, inv_freq, axes = inputs
    out = embedding.rope_table(*inputs)

    def theirs(_: int) -> object:
        angle = positions[axes.long()].T.float() * inv_freq
        return angle.cos(), angle.sin()

    def check() -> bool:
        return all(
            close(a, b, 1e-3)
            for a, b in zip(embedding.rope_table(*inputs), rope_reference.rope_table(*inputs), strict=True)
        )

    return Calls(lambda _: embedding.rope_table(*inputs, out=out), theirs, check)


def _heads(qkv: Tensor, heads: int, kv_heads: int, width: int) -> tuple[Tensor, Tensor]:
    q, k = qkv[:, : heads * width], qkv[:, heads * width : (heads + kv_heads) * width]
    return q.view(-1, heads, width), k.view(-1, kv_heads, width)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x rotated as in the models of transformers: cos and sin [T, 1, K] in the dtype of x."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _widened(table: Tensor) -> Tensor:
    return torch.cat((table, table), dim=-1)[:, None].to(torch.bfloat16)


def _norm_rope(tokens: int, heads: int, kv_heads: int, width: int) -> Calls:
    qkv = random(tokens, (heads + 2 * kv_heads) * width)
    q_weight, k_weight = random(width, seed=1), random(width, seed=2)
    cos, sin = embedding.rope_table(*_table_inputs(tokens, width // 2))
    their_cos, their_sin = _widened(cos), _widened(sin)
    expected = [
        rope_reference.norm_rope(x, weight, EPS, cos, sin)
        for x, weight in zip(_heads(qkv, heads, kv_heads, width), (q_weight, k_weight), strict=True)
    ]
    checked = _heads(qkv.clone(), heads, kv_heads, width)
    embedding.qk_norm_rope(*checked, q_weight, k_weight, EPS, cos, sin)
    sets = [_heads(copy, heads, kv_heads, width) for (copy,) in rotation(qkv)]

    def ours(call: int) -> None:
        embedding.qk_norm_rope(*sets[call % len(sets)], q_weight, k_weight, EPS, cos, sin)

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
    expected = [rope_reference.rope(x, cos, sin) for x in _heads(qkv, heads, heads, width)]
    checked = _heads(qkv.clone(), heads, heads, width)
    embedding.rope_qk(*checked, cos, sin)
    sets = [_heads(copy, heads, heads, width) for (copy,) in rotation(qkv)]

    def ours(call: int) -> None:
        embedding.rope_qk(*sets[call % len(sets)], cos, sin)

    def theirs(call: int) -> object:
        q, k = sets[call % len(sets)]
        return _rotated(q, their_cos, their_sin), _rotated(k, their_cos, their_sin)

    return Calls(ours, theirs, lambda: all(close(a, b) for a, b in zip(checked, expected, strict=True)))
