import pytest
import torch
from helpers import assert_close, poisoned, rand

from tilewright.ops import norm
from tilewright.ops.torch_backend import norm as reference

WIDTHS = [1, 33]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("form", ["plain", "residual", "plus_one", "gated", "silu"])
def test_rms_norm(isa, dtype, width, form):
    x, weight = rand(5, width, dtype=dtype), rand(width, dtype=dtype, seed=1)
    kwargs = {"weight_plus_one": form == "plus_one", "activation": "silu" if form == "silu" else "none"}
    if form == "gated":
        kwargs["gate"] = rand(5, width, dtype=dtype, seed=2)
    residual = rand(5, width, dtype=dtype, seed=3) if form == "residual" else None
    expected_residual = residual.clone() if residual is not None else None
    expected = reference.rms_norm(x, weight, 1e-6, residual=expected_residual, **kwargs)
    out = poisoned(5, width, dtype=dtype)
    assert norm.rms_norm(x, weight, 1e-6, residual=residual, out=out, **kwargs) is out
    assert_close(out, expected)
    if residual is not None:
        assert torch.equal(residual, expected_residual)


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", WIDTHS)
def test_layer_norm(isa, dtype, width, weight_dtype):
    # A mean far from zero shows cancellation in the variance.
    x = (rand(3, 4, width) + 10).to(dtype)
    weight, bias = rand(width, dtype=weight_dtype, seed=1), rand(width, dtype=weight_dtype, seed=2)
    for b in (bias, None):
        out = norm.layer_norm(x, weight, b, 1e-6, out=poisoned(3, 4, width, dtype=dtype))
        assert_close(out, reference.layer_norm(x, weight, b, 1e-6), atol=2e-4 if dtype == torch.float32 else None)


@pytest.mark.parametrize("heads,width", [(1, 16), (3, 72), (8, 128)])
def test_rms_norm_per_head_in_a_packed_row(isa, dtype, heads, width):
    qkv = rand(6, 2 * heads * width + 5, dtype=dtype)
    untouched = qkv.clone()
    q = qkv[:, 5 : 5 + heads * width].view(6, heads, width)
    weight = rand(width, dtype=dtype, seed=1)
    expected = reference.rms_norm(q, weight, 1e-6)
    norm.rms_norm(q, weight, 1e-6, out=q)
    assert_close(q, expected)
    untouched[:, 5 : 5 + heads * width] = q.reshape(6, -1)
    assert torch.equal(qkv, untouched)


def test_errors_name_the_tensor():
    x, weight = torch.zeros(2, 8), torch.zeros(8)
    with pytest.raises(ValueError, match=r"rms_norm: weight has shape \[7\], expected \[D=8\]"):
        norm.rms_norm(x, torch.zeros(7), 1e-6)
    with pytest.raises(ValueError, match=r"x is float16|x is of an unsupported type, expected float32 or bfloat16"):
        norm.rms_norm(x.half(), weight, 1e-6)
    with pytest.raises(ValueError, match="residual is bfloat16, expected float32 as x"):
        norm.rms_norm(x, weight, 1e-6, residual=x.bfloat16())
    with pytest.raises(ValueError, match=r"out is float32 .3, 8., expected the shape of x"):
        norm.rms_norm(x, weight, 1e-6, out=torch.zeros(3, 8))
    with pytest.raises(ValueError, match="its last axis must be contiguous"):
        norm.rms_norm(torch.zeros(8, 2).t(), weight, 1e-6)
    with pytest.raises(ValueError, match="leading axes do not form evenly spaced rows"):
        norm.layer_norm(torch.zeros(4, 3, 8)[:, :2], weight, None, 1e-6)


def test_no_rows(isa):
    assert norm.rms_norm(torch.zeros(0, 8), torch.ones(8), 1e-6).shape == (0, 8)
