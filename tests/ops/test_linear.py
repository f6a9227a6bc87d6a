import mmap
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import assert_close, in_fp16, poisoned, rand

from tilewright.ops.linear import PackedWeight, linear, pack_weight
from tilewright.ops.plan import HUGE_PAGE_BYTES
from tilewright.ops.torch_backend import linear as reference

ACTIVATIONS = ["none", "silu", "gelu_tanh", "gelu_erf", "gelu_quick"]
SHAPES = [  # M, N, K
    (1, 33, 31),
    (33, 100, 129),
]


@pytest.mark.parametrize("m,n,k", SHAPES)
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=["w32", "w16"])
def test_linear(isa, dtype, weight_dtype, m, n, k):
    x, weight, bias = rand(m, k, dtype=dtype), rand(n, k, dtype=weight_dtype, seed=1), rand(n, seed=2)
    packed = pack_weight(weight, bias)
    for out_dtype in {dtype, torch.float32}:
        out = linear(x, packed, out=poisoned(m, n, dtype=out_dtype))
        expected = reference.plain_linear(x, weight, bias, out_dtype=out_dtype)
        # Sums in fp16 leave 2^-10.5 of their size, of thousands of them some four times that.
        wide = in_fp16() and dtype == weight_dtype == torch.bfloat16
        assert_close(out, expected, atol=expected.float().abs().mean().item() * 2**-7 if wide else None)


@pytest.mark.parametrize("m,n,k", [(1, 2, 3), (20, 66, 33)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gated", [False, True])
def test_epilogues(isa, dtype, m, n, k, activation, gated):
    x, weight, bias = rand(m, k, dtype=dtype), rand(n, k, dtype=dtype, seed=1, scale=k**-0.5), rand(n, seed=2)
    residual = rand(m, n // 2 if gated else n, dtype=dtype, seed=3)
    packed = pack_weight(weight, bias, gated=gated)
    expected = reference.plain_linear(x, weight, bias, gated=gated, activation=activation, residual=residual)
    out = poisoned(*expected.shape, dtype=dtype)
    assert_close(linear(x, packed, activation=activation, residual=residual, out=out), expected)
    # In place on the residual, as a decoder layer does.
    assert torch.equal(linear(x, packed, activation=activation, residual=residual, out=residual), out)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("n,k", [(2, 1), (70, 100)])
def test_pack_round_trip(dtype, n, k, gated):
    weight = rand(n, k, dtype=dtype)
    assert torch.equal(pack_weight(weight, gated=gated).unpack(), weight)


def test_inputs_of_any_rank_and_strided_rows(isa, dtype):
    weight = rand(40, 48, dtype=dtype)
    packed = pack_weight(weight)
    for shape in [(48,), (2, 48), (2, 3, 48), (2, 1, 3, 48)]:
        x = rand(*shape, dtype=dtype, seed=1)
        assert_close(linear(x, packed), reference.plain_linear(x, weight))
    wide = rand(7, 100, dtype=dtype, seed=2)
    wide_out = poisoned(7, 90, dtype=dtype)
    linear(wide[:, 10:58], packed, out=wide_out[:, 20:60])
    assert_close(wide_out[:, 20:60], reference.plain_linear(wide[:, 10:58], weight))
    assert wide_out[:, :20].isnan().all() and wide_out[:, 60:].isnan().all()


def test_a_sum_of_zeros_has_no_sign(isa, dtype):
    """However many rows there are: equal bits, not only equal numbers."""
    packed = pack_weight(-rand(40, 128, dtype=dtype).abs())
    for rows in (1, 3, 8, 9, 17):
        assert not linear(torch.zeros(rows, 128, dtype=dtype), packed).signbit().any()


def test_fp32_activations_keep_their_precision_with_bf16_weights(isa):
    x, weight = rand(3, 256), rand(32, 256, dtype=torch.bfloat16, seed=1)
    expected = torch.nn.functional.linear(x.double(), weight.double())
    assert (linear(x, pack_weight(weight)) - expected).abs().max() < 2e-4


def test_no_rows(isa):
    assert linear(torch.zeros(0, 8), pack_weight(torch.zeros(4, 8))).shape == (0, 4)


def test_errors():
    packed = pack_weight(torch.zeros(4, 8), torch.zeros(4))
    with pytest.raises(ValueError, match=r"linear: x has shape \[2, 7\], expected \[..., K=8\]"):
        linear(torch.zeros(2, 7), packed)
    with pytest.raises(ValueError, match=r"linear: out has shape \[2, 5\], expected \[..., N=4\]"):
        linear(torch.zeros(2, 8), packed, out=torch.zeros(2, 5))
    with pytest.raises(ValueError, match="residual is bfloat16, expected float32 as out"):
        linear(torch.zeros(2, 8), packed, residual=torch.zeros(2, 4).bfloat16())
    with pytest.raises(ValueError, match="activation is 'relu', expected one of none, silu"):
        linear(torch.zeros(2, 8), packed, activation="relu")
    with pytest.raises(ValueError, match=r"bias has shape \[3\], expected \[N=4\]"):
        pack_weight(torch.zeros(4, 8), torch.zeros(3))
    with pytest.raises(ValueError, match="even number of rows, got 5"):
        pack_weight(torch.zeros(5, 8), gated=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"name": "int3"},
            "linear: the weight's format is 'int3', expected one of float32, bfloat16, ",
        ),
        ({"name": "bfloat16"}, "linear: weight is float32, its format bfloat16"),
        ({"group_size": 32}, "linear: the weight has groups of 32 values, float32 has none"),
        ({"layout": "rows"}, "linear: the weight's layout is 'rows', this level reads 'tiles of 32 x 16 in pairs"),
    ],
)
def test_a_weight_that_no_kernel_reads_is_an_error(change, message):
    packed = pack_weight(torch.zeros(4, 8))
    form = replace(packed.form, format=replace(packed.form.format, **change))
    with pytest.raises(ValueError, match=message):
        linear(torch.zeros(2, 8), PackedWeight(packed.data, form))
    with pytest.raises(ValueError, match="linear: weight has scales, float32 has none"):
        linear(torch.zeros(2, 8), PackedWeight(packed.data, packed.form, scales=torch.zeros(4)))


def mapping_flags(address: int) -> list[str]:
    """The VmFlags of the mapping that has `address`."""
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            found = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif found and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(f"no mapping has {address:#x}")


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="huge pages are not asked for on this system")
def test_large_weights_can_have_huge_pages():
    data = pack_weight(torch.zeros(1024, 2100), dtype=torch.bfloat16).data
    assert data.data_ptr() % HUGE_PAGE_BYTES == 0
    flags = mapping_flags(data.data_ptr())
    # hg: asked for; sh: shared memory, to which Linux gives none by default.
    assert "hg" in flags and "sh" not in flags
    last = mapping_flags(data.data_ptr() + data.numel() * 2 - 1)
    assert "hg" not in last  # the rest after the last whole page
