import pytest
import torch
from helpers import assert_close, in_fp16, poisoned, rand

from tilewright.ops import attention, backend
from tilewright.ops.attention import KvCache, kv_store
from tilewright.ops.native import kernels


def starts_of(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def qkv(num_queries, num_keys, heads, kv_heads, width, dtype):
    q = rand(num_queries, heads, width, dtype=dtype, seed=1)
    return q, *(rand(num_keys, kv_heads, width, dtype=dtype, seed=s) for s in (2, 3))


def assert_attention(out, expected, values, score_size=1.0):
    """In bf16 the softmax weights are rounded to 8 bits too, an error that scales with the values. In fp32 their errors
    are those of the scores, which are sums over the width of a head; in fp16 those of scores of more than 1."""
    bf16 = torch.bfloat16 in (out.dtype, values.dtype)
    atol = None
    if bf16 and values.numel():
        atol = 8e-3 * values.float().abs().mean().item() * max(score_size, 1.0)
    elif out.shape[-1] > 256:
        atol = 1e-4 * expected.abs().mean().item()
    assert_close(out, expected, atol=atol, rtol=2**-7 if bf16 else None)


def on_both_backends(call):
    """What the op gives on each; `call` makes what the backend lays out itself."""
    outs = []
    for name in backend.NAMES:
        with backend.use(name):
            outs.append(call())
    return outs


def check_varlen(dtype, lengths, heads, kv_heads, width, key_lengths=None, **options):
    key_lengths = key_lengths or lengths
    q, k, v = qkv(sum(lengths), sum(key_lengths), heads, kv_heads, width, dtype)
    starts = starts_of(lengths), starts_of(key_lengths)
    ours, theirs = on_both_backends(
        lambda: attention.varlen_attention(q, k, v, *starts, out=poisoned(*q.shape, dtype=dtype), **options)
    )
    score_size = options.get("scale", 0.0) * width**0.5 if in_fp16() and dtype == torch.bfloat16 else 1.0
    assert_attention(ours, theirs, v, score_size)


VARLEN = {  # lengths, heads, kv heads, width, options
    "one row": ([1], 1, 1, 16, {}),
    "shared heads": ([1, 33, 70], 5, 1, 24, {}),
    "causal": ([2, 1, 3, 31, 32, 33], 6, 2, 128, {"causal": True}),
    "no tokens": ([0, 40, 0], 4, 2, 256, {"causal": True}),
    "more than a block": ([300, 5], 4, 2, 72, {}),
    "window": ([9, 333, 560], 4, 2, 48, {"window": 64}),
    "window of one": ([9, 70], 4, 2, 48, {"window": 1, "causal": True}),
    "window beyond a block": ([9, 333, 560], 4, 2, 48, {"window": 300, "causal": True}),
    "scale": ([290, 40], 2, 2, 64, {"scale": 1.0}),
    "negative scale and cap": ([290, 40], 2, 2, 64, {"scale": -0.3, "soft_cap": 3.0, "causal": True}),
    "other keys": ([40, 3, 70], 4, 2, 64, {"key_lengths": [7, 300, 70]}),
    "no keys": ([40, 3, 70], 4, 2, 64, {"key_lengths": [60, 300, 0]}),
    "as wide as a picture's channels": ([33, 70], 1, 1, 600, {}),
    "that wide, more keys than a block": ([3], 1, 1, 1024, {"key_lengths": [530]}),
}


@pytest.mark.parametrize("case", VARLEN)
def test_varlen(isa, dtype, case):
    lengths, heads, kv_heads, width, options = VARLEN[case]
    check_varlen(dtype, lengths, heads, kv_heads, width, **options)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [("bool", (1, 1, 1)), ("bool", (3, 4, 301)), ("additive", (1, 4, 1)), ("additive", (3, 4, 301)),
     ("additive_bf16", (3, 1, 1))],
)  # fmt: skip
def test_varlen_mask(isa, dtype, kind, shape):
    mask = rand(*shape, 301, seed=9, scale=2.0)
    if kind == "bool":
        mask = mask > -1
        mask[..., 3] = True
    elif kind == "additive":
        mask[..., 5::7] = float("-inf")
    else:
        mask = mask.bfloat16()
    check_varlen(dtype, [5, 301, 64], 4, 2, 64, mask=mask)
    check_varlen(dtype, [5, 301, 64], 4, 2, 64, mask=mask, causal=True, window=50)


def test_a_query_that_sees_nothing_gives_zeros(isa, dtype):
    q, k, v = qkv(3, 3, 2, 2, 32, dtype)
    mask = torch.tensor([[True, True, True], [False, False, False], [True, False, False]])[None, None]
    for out in on_both_backends(lambda: attention.varlen_attention(q, k, v, starts_of([3]), mask=mask)):
        assert (out[1] == 0).all() and not out.isnan().any()


def test_the_torch_backend_keeps_what_is_no_number_in_its_sequence():
    """Sequences share a matrix of scores, where others weigh 0: and 0 times NaN is NaN."""
    q, k, v = qkv(9, 9, 4, 2, 16, torch.float32)
    with backend.use("torch"):
        expected = attention.varlen_attention(q, k, v, starts_of([3, 4, 2]), causal=True)
        v[4], k[8] = torch.nan, torch.inf
        out = attention.varlen_attention(q, k, v, starts_of([3, 4, 2]), causal=True)
    bad = torch.tensor([4, 5, 6, 8])
    assert out[bad].isnan().all() and torch.equal(out[[0, 1, 2, 3, 7]], expected[[0, 1, 2, 3, 7]])


@pytest.mark.parametrize("soft_cap", [0.0, 5.0])
def test_a_key_that_is_no_number_harms_those_who_see_it(isa, dtype, soft_cap, count=70):
    """The first, one among others, the last: a row may see nothing else, or lose it in the maximum of many."""
    q, k, v = qkv(count, count, 4, 2, 40, dtype)
    starts, options = starts_of([count]), {"causal": True, "soft_cap": soft_cap}
    expected = attention.varlen_attention(q, k, v, starts, **options)
    for bad in {0, count * 5 // 7, count - 1}:
        damaged = k.clone()
        damaged[bad, :, 3] = torch.nan
        for name in backend.NAMES:
            with backend.use(name):
                out = attention.varlen_attention(q, damaged, v, starts, **options)
            assert out[bad:].isnan().all() and not out[:bad].isnan().any(), (bad, name)
        if soft_cap:
            continue
        damaged[bad, :, 3] = torch.inf
        out = attention.varlen_attention(q, damaged, v, starts, **options)
        is_highest = (torch.arange(count) >= bad)[:, None] & (q[:, :, 3] > 0)  # elsewhere it is the lowest: no harm
        assert torch.equal(out[:bad], expected[:bad]) and torch.equal(out.isnan().all(-1), is_highest), bad
        assert not out[~is_highest].isnan().any()


def test_large_scores_do_not_overflow(isa, dtype):
    q, k, v = (t * 30 for t in qkv(40, 40, 2, 2, 64, dtype))
    ours, theirs = on_both_backends(lambda: attention.varlen_attention(q, k, v, starts_of([40]), scale=1.0))
    # Scores of 1e5 carry an fp32 error of 1e-2 into the exponent, in the twin too.
    assert_close(ours, theirs, atol=0.5, rtol=0.02)


class Pool:
    """A cache of shuffled pages around NaN: whatever a kernel reads outside its sequence shows."""

    def __init__(self, lengths, page_size, kv_heads, width, dtype, values_dtype=None):
        pages = [-(-n // page_size) for n in lengths]
        self.cache = KvCache.empty(sum(pages) + 3, page_size, kv_heads, width, dtype)
        self.cache.data.fill_(float("nan") if self.cache.data.is_floating_point() else 255)  # bytes: scales of NaN
        order = torch.randperm(sum(pages) + 3, generator=torch.Generator().manual_seed(0)).int()
        self.table = torch.full((len(lengths), max([*pages, 1])), -1, dtype=torch.int32)
        used = 0
        for b, count in enumerate(pages):
            self.table[b, :count] = order[used : used + count]
            used += count
        self.keys, self.values = [], []
        for b, n in enumerate(lengths):
            k, v = (rand(n, kv_heads, width, dtype=values_dtype or dtype, seed=10 * b + s) for s in (1, 2))
            kv_store(k, v, self.cache, self.slots(b, torch.arange(n)))
            self.keys.append(k)
            self.values.append(v)

    def slots(self, b, token):
        size = self.cache.page_size
        return self.table[b].long()[token // size] * size + token % size


def check_paged(dtype, query_lengths, kv_lengths, heads, kv_heads, width, page_size=32, kv_dtype=None, **options):
    q = rand(sum(query_lengths), heads, width, dtype=dtype)
    query_starts, lengths = starts_of(query_lengths), torch.tensor(kv_lengths, dtype=torch.int32)

    def call():
        pool = Pool(kv_lengths, page_size, kv_heads, width, kv_dtype or dtype)
        out = poisoned(*q.shape, dtype=dtype)
        attention.paged_attention(q, pool.cache, pool.table, query_starts, lengths, out=out, **options)
        return out, pool.values

    (ours, values), (theirs, _) = on_both_backends(call)
    for b in range(len(kv_lengths)):
        part = slice(int(query_starts[b]), int(query_starts[b + 1]))
        assert_attention(ours[part], theirs[part], values[b])
    return ours


PAGED = {  # queries and keys of each sequence, heads, kv heads, width, options
    "decode, some without a token": ([1, 0, 1, 1, 0], [70, 45, 300, 1, 0], 4, 2, 16, {}),
    "as many tokens as sequences": ([2, 0, 1], [70, 45, 300], 4, 2, 24, {}),
    "prefill and decode": ([1, 37, 1, 5, 1], [1, 37, 600, 261, 32], 8, 2, 128, {"page_size": 96}),
    "one head of keys": ([1, 37, 1, 5, 1], [1, 37, 600, 261, 32], 40, 1, 72, {"page_size": 512}),
    "wide": ([1, 20, 1], [70, 45, 300], 2, 2, 256, {}),
    "fp32 keys": ([1, 9], [100, 9], 4, 2, 64, {"kv_dtype": torch.float32}),
    "bf16 keys": ([1, 9], [100, 9], 4, 2, 64, {"kv_dtype": torch.bfloat16}),
    "window": ([1, 50, 1], [1500, 700, 40], 4, 2, 64, {"window": 5}),
    "window of a block": ([1, 50, 1], [1500, 700, 40], 4, 2, 64, {"window": 256}),
    "window beyond a block": ([1, 50, 1], [1500, 700, 40], 4, 2, 64, {"window": 257}),
    "soft cap": ([1, 50], [1500, 700], 4, 2, 64, {"soft_cap": 0.5, "scale": 1.0}),
    "soft cap and window": ([1, 50], [1500, 700], 4, 2, 64, {"soft_cap": 20.0, "window": 300}),
}


@pytest.mark.parametrize("case", PAGED)
def test_paged(isa, dtype, case):
    query_lengths, kv_lengths, heads, kv_heads, width, options = PAGED[case]
    check_paged(dtype, query_lengths, kv_lengths, heads, kv_heads, width, **options)


def test_paged_cross_attention(isa, dtype):
    out = check_paged(dtype, [1, 30, 4, 2], [333, 1300, 2, 0], 4, 2, 64, causal=False)
    assert (out[-2:] == 0).all()  # no encoder tokens


def test_spans_that_see_parts_of_the_same_keys(isa, dtype):
    """As tokens of pictures side by side do: each sees as many keys of one group's pages as its place says."""
    q, lengths = rand(48, 4, 64, dtype=dtype), torch.tensor([90, 300, 70, 65], dtype=torch.int32)
    starts = starts_of([1, 40, 6, 1])

    def call():
        pool = Pool([300, 70], 64, 2, 64, dtype)
        out = poisoned(*q.shape, dtype=dtype)
        attention.paged_attention(q, pool.cache, pool.table[[0, 0, 1, 0]], starts, lengths, causal=False, out=out)
        return out, pool

    (ours, pool), (theirs, _) = on_both_backends(call)
    assert_attention(ours, theirs, pool.values[0])
    for part, group, length in ((slice(0, 1), 0, 90), (slice(1, 41), 0, 300), (slice(41, 47), 1, 70)):
        keys, values = pool.keys[group][:length], pool.values[group][:length]
        alone = attention.varlen_attention(q[part], keys, values, starts_of([len(q[part])]), starts_of([length]))
        assert_attention(ours[part], alone, pool.values[0])


@pytest.mark.parametrize(
    ("kv_dtype", "count"), [(None, 1600), (torch.int8, 70), (torch.float8_e4m3fn, 70)], ids=["same", "int8", "fp8"]
)
def test_a_paged_key_that_is_no_number_harms_those_who_see_it(isa, dtype, kv_dtype, count):
    num_queries = min(count, 40)
    q, starts, lengths = rand(num_queries + 1, 4, 64, dtype=dtype), starts_of([num_queries, 1]), [count, 30]
    for bad in {0, count * 5 // 7, count - 1}:
        pool = Pool(lengths, 64, 2, 64, kv_dtype or dtype, dtype)
        damaged = pool.keys[0][bad : bad + 1].clone()
        damaged[:, :, 3] = torch.nan
        kv_store(damaged, pool.values[0][bad : bad + 1], pool.cache, pool.slots(0, torch.tensor([bad])))
        out = attention.paged_attention(q, pool.cache, pool.table, starts, torch.tensor(lengths, dtype=torch.int32))
        sees = torch.arange(count - num_queries, count) >= bad
        assert torch.equal(out[:-1].isnan().flatten(1).all(1), sees) and not out[:-1][~sees].isnan().any()
        assert not out[-1].isnan().any()


@pytest.mark.parametrize("order", ["shuffled", "whole tiles", "across tiles"])
@pytest.mark.parametrize("backend_name", backend.NAMES)
def test_kv_store_round_trip(dtype, order, backend_name):
    with backend.use(backend_name):
        check_store_round_trip(dtype, order, kv_heads=3, width=72)


def check_store_round_trip(dtype, order, kv_heads, width):
    cache = KvCache.empty(4, 64, kv_heads, width, dtype)
    cache.data.fill_(float("nan"))
    packed = rand(100, 3 * kv_heads * width, dtype=dtype).view(100, 3, kv_heads, width)
    k, v = packed[:, 1], packed[:, 2]
    slots = torch.randperm(256, generator=torch.Generator().manual_seed(1))[:100]
    if order != "shuffled":
        slots = torch.arange(100) + (64 if order == "whole tiles" else 85)
    slots[7] = -1
    kv_store(k, v, cache, slots)
    kept = torch.arange(100) != 7
    keys, values = cache.read()
    assert torch.equal(keys[slots[kept]], k[kept]) and torch.equal(values[slots[kept]], v[kept])
    untouched = torch.ones(256, dtype=torch.bool)
    untouched[slots[kept]] = False
    assert keys[untouched].isnan().all() and values[untouched].isnan().all()
    kv_store(k, v, cache, torch.full((100,), -1))  # nothing at all
    assert torch.equal(torch.stack(cache.read()).isnan(), torch.stack([keys, values]).isnan())


def test_chunks_and_decode_give_the_bits_of_one_prefill(isa, dtype):
    """However a prompt is cut, alone or beside others: the same output, bit for bit."""
    pool = Pool([1400, 50], 64, 2, 64, dtype)
    q = rand(1400, 4, 64, dtype=dtype)
    whole = attention.paged_attention(q, pool.cache, pool.table[:1], starts_of([1400]), torch.tensor([1400]).int())
    for begin, end in [(0, 1), (0, 33), (700, 739), (1399, 1400), (1100, 1101), (1000, 1400)]:
        part = torch.cat([q[begin:end], q[:1]])
        lengths = torch.tensor([end, 50], dtype=torch.int32)
        out = attention.paged_attention(part, pool.cache, pool.table, starts_of([end - begin, 1]), lengths)
        assert torch.equal(out[:-1], whole[begin:end])


def test_threads_do_not_change_the_bits(isa, dtype):
    pool = Pool([5000], 64, 2, 64, dtype)
    q, lengths = rand(1, 4, 64, dtype=dtype), torch.tensor([5000], dtype=torch.int32)
    outs = []
    for threads in (1, 2, 5):
        kernels.set_num_threads(threads)
        outs.append(attention.paged_attention(q, pool.cache, pool.table, starts_of([1]), lengths))
    kernels.set_num_threads(0)
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_rows_may_begin_at_any_element(isa):
    """Keys and values as slices of rows of odd length: what packs whole tiles of them asks for no alignment."""
    packed = rand(70, 3 * 128 + 3, dtype=torch.bfloat16)
    q, k, v = (packed[:, first : first + 128].unflatten(1, (2, 64)) for first in (1, 130, 258))
    slices, copies = (KvCache.empty(3, 32, 2, 64, torch.bfloat16) for _ in range(2))
    for cache in (slices, copies):
        cache.data.zero_()
    kv_store(k, v, slices, torch.arange(70))
    kv_store(k.contiguous(), v.contiguous(), copies, torch.arange(70))
    assert torch.equal(slices.data, copies.data)
    out = attention.varlen_attention(q, k, v, starts_of([70]))
    assert torch.equal(out, attention.varlen_attention(*(x.contiguous() for x in (q, k, v)), starts_of([70])))


def test_errors():
    q, k, v = qkv(4, 4, 4, 2, 16, torch.float32)
    with pytest.raises(ValueError, match=r"query_starts\[-1\] is 5, expected the 4 tokens of q"):
        attention.varlen_attention(q, k, v, starts_of([5]))
    with pytest.raises(ValueError, match="q has 4 heads, expected a multiple of the 3 kv heads"):
        attention.varlen_attention(q, *(torch.zeros(4, 3, 16) for _ in "kv"), starts_of([4]))
    with pytest.raises(ValueError, match="head width is 1025, expected 1 to 1024"):
        attention.varlen_attention(*(torch.zeros(4, 1, 1025) for _ in "qkv"), starts_of([4]))
    with pytest.raises(ValueError, match=r"mask is bool \[1, 1, 1, 3\], expected"):
        attention.varlen_attention(q, k, v, starts_of([4]), mask=torch.ones(1, 1, 1, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="query_starts is int64, expected int32"):
        attention.varlen_attention(q, k, v, starts_of([4]).long())
    cache = KvCache.empty(2, 32, 2, 16, torch.float32)
    table, lengths = torch.tensor([[0, 2]], dtype=torch.int32), torch.tensor([40], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"block_table\[0, 1\] is 2, expected 0 to 1"):
        attention.paged_attention(q, cache, table, starts_of([4]), lengths)
    with pytest.raises(ValueError, match=r"kv_lengths\[0\] is 65, expected 0 to 64"):
        attention.paged_attention(q, cache, table, starts_of([4]), torch.tensor([65], dtype=torch.int32))
    with pytest.raises(ValueError, match=r"kv_lengths\[0\] is 3, expected at least the 4 new tokens"):
        attention.paged_attention(q, cache, table, starts_of([4]), torch.tensor([3], dtype=torch.int32))
    with pytest.raises(ValueError, match=r"slots\[1\] is 64, the cache has 64"):
        kv_store(k[:2], v[:2], cache, torch.tensor([0, 64]))
    with pytest.raises(ValueError, match="page_size is 48, expected a multiple of 32"):
        KvCache.empty(2, 48, 2, 16, torch.float32)
