"""Products with quantised weights against the plain torch of ops.quantized."""

from dataclasses import replace

import pytest
import torch
from helpers import assert_close, poisoned, rand

from tilewright.ops import backend
from tilewright.ops.embedding import embedding
from tilewright.ops.linear import PackedWeight, linear, pack_weight, pack_weight_rows
from tilewright.ops.moe import PackedExperts, moe, route
from tilewright.ops.packed import rounded, weight_format
from tilewright.ops.quantized import (
    TABLES,
    Quantized,
    columns_of,
    concatenate,
    dequantize,
    quantize,
    rotate,
    rotated_length,
)
from tilewright.ops.torch_backend import linear as reference

MULTIPLIES_BYTES = True  # conftest.py: at all levels
FORMATS = [
    ("int8", 0), ("int8", 32), ("int8_min", 16), ("int8_rotated", 0), ("int4", 32), ("int4", 128), ("int4_rotated", 16),
    ("int4_rotated", 32), ("uint4", 32), ("uint4", 64), ("uint4_zero", 128), ("mxfp4", 32), ("iq4_nl", 32), ("fp8", 0),
    ("fp8", 128), ("int8_exact", 0), ("int8_exact", 32),
]  # fmt: skip


@pytest.fixture(params=FORMATS, ids=lambda given: f"{given[0]}-{given[1]}")
def format(request):
    return request.param


def test_linear(isa, dtype, format, m=70, n=33, k=250):
    x, weight, bias = rand(m, k, dtype=dtype), rand(n, k, dtype=dtype, seed=1), rand(n, seed=2)
    packed = pack_weight(weight, bias, dtype=weight_format(*format))
    expected = reference.plain_linear(x, rounded(weight, weight_format(*format)), bias)
    assert_close(linear(x, packed, out=poisoned(m, n, dtype=dtype)), expected)


def test_gate_and_up_with_a_residual(isa, dtype, format, m=20, n=66, k=130):
    x, weight = rand(m, k, dtype=dtype), rand(n, k, dtype=dtype, seed=1, scale=k**-0.5)
    residual = rand(m, n // 2, dtype=dtype, seed=3)
    packed = pack_weight(weight, gated=True, dtype=weight_format(*format))
    given = {"activation": "silu", "residual": residual}
    expected = reference.plain_linear(x, rounded(weight, weight_format(*format)), gated=True, **given)
    assert_close(linear(x, packed, **given, out=poisoned(m, n // 2, dtype=dtype)), expected)


def test_experts(isa, dtype, format):
    num_experts, width, inner = 5, 72, 40
    gate_up = rand(num_experts, 2 * inner, width, scale=width**-0.5, dtype=dtype)
    down = rand(num_experts, width, inner, scale=inner**-0.5, dtype=dtype, seed=1)

    def pack(weights: torch.Tensor, gated: bool) -> PackedExperts:
        packed = PackedExperts.empty(*weights.shape, gated, weight_format(*format))
        for expert, weight in enumerate(weights):
            packed.pack(expert, weight)
        return packed

    for num_tokens in (1, 23):
        x, residual = rand(num_tokens, width, dtype=dtype, seed=2), rand(num_tokens, width, dtype=dtype, seed=3)
        ids, weights = route(rand(num_tokens, num_experts, seed=4), 2, renormalize=True)
        out = moe(x, ids, weights, pack(gate_up, True), pack(down, False), residual=residual)
        with backend.use("torch"):
            expected = moe(x, ids, weights, pack(gate_up, True), pack(down, False), residual=residual)
        # A rounding step of act(gate) * up may round to another byte: one step of 127.
        assert_close(out, expected, atol=0.05, rtol=0.02)


@pytest.mark.parametrize("row_dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_table(isa, format, row_dtype):
    table = rand(70, 100)
    packed = pack_weight_rows(
        lambda begin, end: table[begin:end], 70, 100, dtype=weight_format(*format), row_dtype=row_dtype
    )
    ids = torch.tensor([0, 69, 31, 32, 33])
    expected = dequantize(quantize(table, *format))[ids].to(row_dtype)
    assert_close(embedding(ids, packed), expected)
    assert torch.equal(embedding(ids, packed), packed.unpack()[ids])
    own = embedding(ids, packed, first=30, num_ids=100)
    assert not own[:1].any() and torch.equal(own[2:], packed.unpack()[ids[2:] - 30])


@pytest.mark.parametrize("gated", [False, True])
def test_blocks_of_rows_are_packed_as_the_whole(format, gated, monkeypatch):
    monkeypatch.setattr("tilewright.ops.linear.PACK_BLOCK_BYTES", 8192)
    weight = rand(140, 100)
    whole = pack_weight(weight, gated=gated, dtype=weight_format(*format))
    parts = pack_weight_rows(lambda begin, end: weight[begin:end], 140, 100, gated=gated, dtype=weight_format(*format))
    assert torch.equal(whole.data, parts.data) and torch.equal(whole.scales, parts.scales)
    assert torch.equal(whole.unpack(), dequantize(quantize(weight, *format)))


def test_the_torch_backend_multiplies_as_the_kernels(dtype, format):
    x, weight = rand(9, 130, dtype=dtype), rand(40, 130, dtype=dtype, seed=1)
    expected = linear(x, pack_weight(weight, dtype=weight_format(*format)))
    with backend.use("torch"):
        packed = pack_weight(weight, dtype=weight_format(*format))
        assert_close(linear(x, packed), expected)
        assert torch.equal(packed.unpack(), dequantize(quantize(weight, *format)))


@pytest.mark.parametrize(
    ("format", "bound"),
    [
        (("int8", 0), 0.012),
        (("int8_rotated", 0), 0.012),
        (("int8", 32), 0.007),
        (("int4", 32), 0.09),
        (("iq4_nl", 32), 0.09),
        (("int4_rotated", 32), 0.08),
        (("mxfp4", 32), 0.13),
        (("fp8", 128), 0.03),
    ],
)
def test_error_of_normal_weights(format, bound):
    """Of the weights alone, relative to their norm: a step is 2 max / 255, and max some 3.5 deviations of a row."""
    weight = rand(64, 512)
    assert (dequantize(quantize(weight, *format)) - weight).norm() / weight.norm() < bound


def test_the_largest_value_of_a_group_keeps_its_size():
    weight = rand(16, 64)
    for name, group in FORMATS:
        if name == "mxfp4":  # its scales are powers of two, which cut off up to a quarter
            continue
        rounded = dequantize(quantize(weight, name, group))
        largest = weight.abs().argmax()
        assert abs(rounded.flatten()[largest] / weight.flatten()[largest] - 1) < 0.18, name


def test_zeros_and_constants_stay(format):
    weight = torch.zeros(3, 40)
    weight[1] = 0.5
    rounded = dequantize(quantize(weight, *format))
    # Rotated, and with zeros that fill it up, a row of one value has several.
    rtol = {"int8_rotated": 0.02, "int4_rotated": 0.1}.get(format[0], 2e-3)
    assert not rounded[::2].any() and torch.allclose(rounded[1], weight[1], rtol=rtol)


def test_nan_and_infinity_are_not_rounded_away(isa, format):
    packed = pack_weight(rand(8, 100), dtype=weight_format(*format))
    for broken in (torch.nan, torch.inf):
        x = rand(2, 100, seed=1)
        x[0, 70] = broken
        y = linear(x, packed)
        assert not y[0].isfinite().any() and y[1].isfinite().all()


def test_errors():
    with pytest.raises(
        ValueError, match="the weight's format is 'int3', expected one of fp8, int8_exact, int8, int8_min"
    ):
        weight_format("int3")
    with pytest.raises(ValueError, match="int4 has no groups of 0 values"):
        weight_format("int4")
    with pytest.raises(ValueError, match="int8 has no groups of 33 values"):
        weight_format("int8", 33)
    with pytest.raises(ValueError, match="the weight is int8 in groups of 0, expected int4 in groups of 32"):
        pack_weight(quantize(torch.zeros(4, 8), "int8"), dtype=weight_format("int4", 32))
    with pytest.raises(ValueError, match=r"cannot be kept as torch\.float16"):
        quantize(torch.full((1, 32), 8e5), "int4", 32)
    packed = pack_weight(torch.zeros(4, 8), dtype=weight_format("int8"))
    with pytest.raises(ValueError, match="linear: weight has no scales, which int8 needs"):
        linear(torch.zeros(2, 8), PackedWeight(packed.data, packed.form))
    with pytest.raises(ValueError, match="linear: weight has 3 scales, expected 32"):
        linear(torch.zeros(2, 8), PackedWeight(packed.data, packed.form, torch.zeros(3)))
    with pytest.raises(ValueError, match="a row of the weight has 131073 values, int8 takes up to 131072"):
        pack_weight(torch.zeros(1, 131073), dtype=weight_format("int8"))


def test_a_weight_quantised_elsewhere_is_packed_as_it_is(isa):
    values = torch.randint(0, 16, (33, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    scales, mins = rand(33, 2).abs().half(), rand(33, 2, seed=1).half()
    weight = Quantized("uint4", values, scales, mins, 32)
    packed = pack_weight(weight)
    assert torch.equal(packed.unpack(), dequantize(weight))
    x = rand(3, 64, seed=2)
    assert_close(linear(x, packed), reference.plain_linear(x, weight))


@pytest.mark.parametrize("name", ["fp8", "int8_exact"])
def test_weights_alone_are_rounded(isa, dtype, name):
    """x is multiplied as it is: the product is that with the weight unpacked."""
    x, packed = rand(9, 200, dtype=dtype), pack_weight(rand(40, 200, seed=1), dtype=weight_format(name, 64))
    assert_close(linear(x, packed), reference.plain_linear(x, packed.unpack()))


def test_every_number_of_fp8(isa):
    bits = torch.arange(256, dtype=torch.uint8)
    bits = bits[(bits & 127) != 127].view(1, -1)  # but for NaN
    packed = pack_weight(Quantized("fp8", bits, torch.ones(1, 1)))
    assert torch.equal(packed.unpack(), bits.view(torch.float8_e4m3fn).float())
    assert torch.equal(linear(torch.eye(bits.shape[1]), packed)[:, 0], packed.unpack()[0])


@pytest.mark.parametrize("k", [1, 64, 100, 576, 896, 1024])
def test_a_rotation_keeps_products(k):
    """It is one of Hadamard's, of columns that lie a part of the row apart."""
    size = min(rotated_length(k) & -rotated_length(k), 256)
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while len(hadamard) < size:
        hadamard = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), hadamard)
    x, y = rand(3, k), rand(4, k, seed=1)
    rows = torch.nn.functional.pad(x.double(), (0, rotated_length(k) - k)).view(3, size, -1)
    assert_close(rotate(x), torch.einsum("ij,njw->niw", hadamard, rows).flatten(1).float())
    assert_close(rotate(x) @ rotate(y).T / size, x @ y.T)
    assert_close(rotate(rotate(x))[:, :k] / size, x)


def test_values_that_stand_out_do_not_spoil_a_rotated_row():
    x, weight = rand(8, 512), rand(64, 512, seed=1)
    x[:, 77] *= 100
    exact = x @ weight.T
    # Of what the other values are worth.
    errors = {
        name: (linear(x, pack_weight(weight, dtype=weight_format(name))) - exact).norm() / rand(8, 512).norm()
        for name in ("int8", "int8_rotated")
    }
    assert errors["int8_rotated"] < 0.25 * errors["int8"]
    with pytest.raises(ValueError, match="its rows are rotated, which ranks cannot split"):
        columns_of(quantize(weight, "int8_rotated"), [(0, 256)])


@pytest.mark.parametrize("name", ["mxfp4", "iq4_nl"])
def test_every_code_of_a_table(isa, name):
    codes = torch.arange(32, dtype=torch.uint8).view(1, -1) % 16
    weight = Quantized(name, codes, torch.full((1, 1), 0.5, dtype=torch.float16), None, 32)
    packed = pack_weight(weight)
    assert torch.equal(packed.unpack(), torch.tensor([TABLES[name] * 2]) * 0.5)
    assert_close(linear(torch.eye(32), packed)[:, 0], packed.unpack()[0])


def test_columns_in_another_order(isa, dtype):
    x, weight = rand(5, 96, dtype=dtype), rand(40, 96, seed=1)
    order = torch.randperm(96, generator=torch.Generator().manual_seed(2)).int()
    moved = replace(quantize(weight[:, order.long()], "int4", 32), columns=order)
    packed = pack_weight(moved)
    assert torch.equal(packed.unpack(), dequantize(moved))
    expected = linear(x[:, order.long()], pack_weight(replace(moved, columns=None)))
    assert torch.equal(linear(x, packed), expected)
    with backend.use("torch"):
        assert_close(linear(x, pack_weight(moved)), expected)
    with pytest.raises(ValueError, match="columns in different orders"):
        concatenate([moved, replace(moved, columns=None)])
    with pytest.raises(ValueError, match="columns are in another order, which fp8 does not take"):
        linear(x, replace(pack_weight(weight, dtype=weight_format("fp8")), columns=order))
