"""Weights rounded natively beside the plain torch of ops.quantized."""

import pytest
import torch
from helpers import rand

from tilewright.ops import backend
from tilewright.ops.packed import ROUNDED_NATIVELY, rounded, weight_format
from tilewright.ops.quantized import ROTATED, Quantized, dequantize, group_sizes, quantize

FORMATS = [(name, size) for name in ROUNDED_NATIVELY for size in group_sizes(name)]
SHAPES = [(1, 1), (3, 17), (9, 256), (33, 300), (20, 1024)]


def weights(n, k, dtype):
    """Normal values, some far out, a group of zeros and one of a single value."""
    weight = rand(n, k, dtype=torch.float32, scale=0.02)
    weight[:, ::37] *= 9
    weight[0, :256] = 0
    weight[-1, :256] = -0.03
    return weight.to(dtype)


def error(weight: torch.Tensor, of: Quantized) -> float:
    return float((dequantize(of) - weight.float()).square().sum())


@pytest.mark.parametrize("name, group_size", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_torch_does_it(name, group_size, dtype):
    """int8 bit for bit. Of the others the order of sums may choose another of two ways that are as good."""
    for n, k in SHAPES:
        weight = weights(n, k, dtype)
        own, plain = rounded(weight, weight_format(name, group_size)), quantize(weight, name, group_size)
        assert (own.name, own.group_size, own.values.dtype) == (name, group_size, plain.values.dtype)
        assert own.scales.shape == plain.scales.shape and own.scales.dtype == plain.scales.dtype
        assert (own.mins is None) == (plain.mins is None)
        if name in ("int8", "int8_rotated"):
            assert torch.equal(own.values, plain.values) and torch.equal(own.scales, plain.scales)
            continue
        assert error(weight, own) <= 1.002 * error(weight, plain) + 1e-12
        assert (own.values != plain.values).float().mean() < 0.01 or n * k < 1000


def test_ties_go_to_even_numbers():
    weight = torch.tensor([[127.0, 0.5, 1.5, -0.5, -2.5, 126.5]])
    assert rounded(weight, weight_format("int8")).values.tolist() == [[127, 0, 2, 0, -2, 126]]


@pytest.mark.parametrize("name", [name for name in ROUNDED_NATIVELY if 16 in group_sizes(name) and name not in ROTATED])
def test_scales_are_the_nearest_halves(name):
    """Over all exponents, those below the normal ones too; what is too large for them is an error."""
    weight = torch.exp2(torch.linspace(-24, 15, 400)).repeat_interleave(16).view(1, -1) * torch.linspace(0.9, 1, 6400)
    own, plain = rounded(weight, weight_format(name, 16)), quantize(weight, name, 16)
    if name == "int8":
        assert torch.equal(own.scales, plain.scales)
    else:  # parts of the range, fitted, of values that are nearly the same: the error alone is nearly that of torch
        assert error(weight, own) <= 1.002 * error(weight, plain)
    with pytest.raises(ValueError, match="cannot be kept"):
        rounded(torch.full((2, 32), 1e9), weight_format(name, 16))


def test_both_backends_have_the_same_quants():
    weight = weights(8, 64, torch.float32)
    own = rounded(weight, weight_format("uint4", 32))
    with backend.use("torch"):
        other = rounded(weight, weight_format("uint4", 32))
    assert torch.equal(own.values, other.values) and torch.equal(own.scales, other.scales)
