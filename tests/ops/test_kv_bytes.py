"""Keys and values in 8 bits: what they are read as, and attention over them beside the same values in bf16."""

import pytest
import torch
from helpers import poisoned, rand
from test_attention import Pool, starts_of

from tilewright.ops import attention, backend
from tilewright.ops.attention import BYTE_FORMATS, LARGEST, KvCache, bytes_per_token, kv_store
from tilewright.ops.torch_backend.attention import rounded

BYTES = pytest.mark.parametrize("kv_dtype", list(BYTE_FORMATS), ids=["int8", "fp8"])
WIDTHS = [15, 72]


def poisoned_cache(num_pages, page_size, heads, width, kv_dtype):
    """Whose bytes are all ones: a scale there is NaN."""
    cache = KvCache.empty(num_pages, page_size, heads, width, kv_dtype)
    cache.data.fill_(255)
    return cache


@BYTES
@pytest.mark.parametrize("width", WIDTHS)
def test_a_row_is_read_as_numbers_times_its_scale(kv_dtype, width, dtype):
    cache = poisoned_cache(4, 64, 3, width, kv_dtype)
    rows = rand(100, 3, 3, width, dtype=dtype) * torch.logspace(-6, 4, 100)[:, None, None, None].to(dtype)
    k, v = rows[:, 1], rows[:, 2]  # slices: rows have gaps between them
    slots = torch.randperm(256, generator=torch.Generator().manual_seed(1))[:100]
    slots[7] = -1
    kv_store(k, v, cache, slots)
    kept = torch.arange(100) != 7
    untouched = torch.ones(256, dtype=torch.bool)
    untouched[slots[kept]] = False
    for read, given in zip(cache.read(), (k, v), strict=True):
        assert read[untouched].isnan().all()
        found, expected = read[slots[kept]].float(), rounded(given[kept], kv_dtype).float()
        # A product may be fused with what rounds it: one in a thousand ties falls to the other side.
        assert (found == expected).float().mean() > 0.999
        step = given[kept].float().abs().amax(-1, keepdim=True) / LARGEST[kv_dtype]
        error = (found - given[kept].float()).abs()
        if kv_dtype == torch.int8:  # half a step, and what bf16 rounds
            assert (error <= 0.501 * step + 2**-8 * given[kept].float().abs()).all()
        else:  # of three bits of mantissa
            assert (error <= (2**-4 + 2**-8) * given[kept].float().abs() + 2**-9 * step).all()


@BYTES
@pytest.mark.parametrize("name", backend.NAMES)
def test_what_is_no_number_stays_none_and_zeros_stay_zeros(kv_dtype, name):
    k = torch.ones(4, 1, 40)
    k[0, 0, 3], k[1, 0, 39], k[2] = torch.nan, -torch.inf, 0.0
    with backend.use(name):
        cache = KvCache.empty(1, 32, 1, 40, kv_dtype)
        kv_store(k, k, cache, torch.arange(4))
        keys, values = cache.read()
    for read in (keys, values):
        assert read[:2].isnan().all() and (read[2] == 0).all()
        assert torch.allclose(read[3].float(), torch.ones(1, 40), rtol=2**-8)  # the largest is exact but for bf16


def in_bf16(pool):
    """A cache of bf16 with what the pool's stands for, NaN where it has no token."""
    cache = pool.cache
    heads = cache.data.shape[1]
    same = KvCache.empty(cache.num_pages, cache.page_size, heads, cache.head_width, torch.bfloat16)
    keys, values = cache.read()
    kv_store(keys, values, same, torch.arange(len(keys)))
    return same


@BYTES
@pytest.mark.parametrize("width", [15, 64, 129])
@pytest.mark.parametrize("heads,kv_heads", [(8, 2), (40, 1)])
def test_attention_has_the_bits_of_a_cache_in_bf16(isa, dtype, kv_dtype, width, heads, kv_heads):
    check_bits(dtype, kv_dtype, [1, 37, 1, 5, 1], [1, 37, 600, 261, 32], heads, kv_heads, width)


@BYTES
@pytest.mark.parametrize("options", [{"window": 100}, {"soft_cap": 2.0}, {"causal": False}, {"scale": -0.3}])
def test_rules_hold_for_bytes_too(isa, kv_dtype, options):
    check_bits(torch.bfloat16, kv_dtype, [1, 40, 0], [1500, 700, 5], 4, 2, 64, **options)


def check_bits(dtype, kv_dtype, query_lengths, kv_lengths, heads, kv_heads, width, **options):
    pool = Pool(kv_lengths, 64, kv_heads, width, kv_dtype, values_dtype=dtype)
    q, lengths = rand(sum(query_lengths), heads, width, dtype=dtype), torch.tensor(kv_lengths, dtype=torch.int32)
    outs = []
    for cache in (pool.cache, in_bf16(pool)):
        out = poisoned(*q.shape, dtype=dtype)
        attention.paged_attention(q, cache, pool.table, starts_of(query_lengths), lengths, out=out, **options)
        outs.append(out)
    assert torch.equal(*outs) and not outs[0].isnan().any()


@BYTES
def test_the_backends_agree(isa, dtype, kv_dtype):
    outs = []
    q, lengths = rand(12, 4, 64, dtype=dtype), torch.tensor([300, 11], dtype=torch.int32)
    for name in backend.NAMES:
        with backend.use(name):
            pool = Pool([300, 11], 32, 2, 64, kv_dtype, values_dtype=dtype)
            outs.append(attention.paged_attention(q, pool.cache, pool.table, starts_of([1, 11]), lengths))
    assert torch.allclose(outs[0].float(), outs[1].float(), atol=0.02)


@BYTES
def test_chunks_and_decode_give_the_bits_of_one_prefill(isa, kv_dtype):
    pool = Pool([1400], 64, 2, 64, kv_dtype, values_dtype=torch.bfloat16)
    q = rand(1400, 4, 64, dtype=torch.bfloat16)
    whole = attention.paged_attention(q, pool.cache, pool.table, starts_of([1400]), torch.tensor([1400]).int())
    for begin, end in [(0, 33), (700, 739), (1399, 1400)]:
        lengths = torch.tensor([end], dtype=torch.int32)
        out = attention.paged_attention(q[begin:end], pool.cache, pool.table, starts_of([end - begin]), lengths)
        assert torch.equal(out, whole[begin:end])


def test_a_token_takes_half_of_bf16_and_its_scales():
    assert bytes_per_token(128, torch.bfloat16) == 512
    assert bytes_per_token(128, torch.int8) == bytes_per_token(128, torch.float8_e4m3fn) == 256 + 8
    assert KvCache.empty(3, 64, 2, 128, torch.int8).data.nbytes == 3 * 64 * 2 * 264


def test_a_cache_of_another_type_than_its_format_is_refused():
    cache = KvCache.empty(2, 32, 2, 16, torch.int8)
    wrong = KvCache(cache.data, 32, 16, torch.bfloat16)
    with pytest.raises(ValueError, match="cache is uint8, which is not the type of its format"):
        kv_store(torch.zeros(1, 2, 16), torch.zeros(1, 2, 16), wrong, torch.zeros(1, dtype=torch.int64))
