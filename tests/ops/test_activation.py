import pytest
import torch
from helpers import assert_close, poisoned, rand

from tilewright.ops import activation
from tilewright.ops.torch_backend import activation as reference

NAMES = ["silu", "gelu_tanh", "gelu_erf", "gelu_quick"]
WIDTHS = [1, 33]


def spread(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Normal numbers, some far out in both tails."""
    return rand(*shape, dtype=dtype, seed=seed, scale=6.0)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", NAMES)
def test_activation(isa, dtype, name, width):
    x = spread(3, width, dtype=dtype)
    expected = reference.activate(x, name)
    out = poisoned(3, width, dtype=dtype)
    assert activation.activate(x, name, out=out) is out
    assert_close(out, expected)
    strided = spread(3, width + 5, dtype=dtype)
    strided[:, :width] = x
    beyond = strided[:, width:].clone()
    activation.activate(strided[:, :width], name, out=strided[:, :width])
    assert torch.equal(strided[:, :width], out)
    assert torch.equal(strided[:, width:], beyond)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["silu", "gelu_tanh", "gelu_erf"])
def test_gated_activation(isa, dtype, name, width):
    x = spread(2, 3, 2 * width, dtype=dtype)
    out = poisoned(2, 3, width, dtype=dtype)
    assert activation.activate_and_mul(x, name, out=out) is out
    assert_close(out, reference.activate_and_mul(x, name))


@pytest.mark.parametrize("width", WIDTHS)
def test_add(isa, dtype, width):
    x, y = rand(3, width, dtype=dtype), rand(3, width, dtype=dtype, seed=1)
    out = activation.add(x, y, out=poisoned(3, width, dtype=dtype))
    assert torch.equal(out, x + y)
    assert activation.add(x, y, out=x) is x
    assert torch.equal(out, x)


@pytest.mark.parametrize("gate_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 17])
def test_sigmoid_gate(isa, dtype, gate_dtype, width):
    """Heads beside their gates in packed rows, as a query has them, and one gate per row."""
    x = spread(5, 3, width, dtype=dtype)
    packed = spread(5, 7, width, dtype=gate_dtype, seed=1)
    gate = packed[:, 1:7:2]
    out = poisoned(5, 3, width, dtype=dtype)
    assert activation.sigmoid_gate(x, gate, out=out) is out
    assert_close(out, reference.sigmoid_gate(x, gate))
    rows, per_row = x.view(15, width), spread(15, 9, dtype=gate_dtype, seed=2)[:, 8:]
    expected = reference.sigmoid_gate(rows, per_row)
    assert activation.sigmoid_gate(rows, per_row, out=rows) is rows
    assert_close(rows, expected)


@pytest.mark.parametrize("width", [1, 17])
def test_snake(isa, dtype, width):
    """Rows of two streams, written into longer ones, and in place."""
    x = spread(2, 5, width, dtype=dtype)
    scale, share = rand(width, dtype=torch.float32, seed=1), rand(width, dtype=torch.float32, seed=2)
    expected = reference.snake(x, scale, share)
    longer = poisoned(2, 9, width, dtype=dtype)
    assert activation.snake(x, scale, share, out=longer[:, 3:8]).data_ptr() == longer[:, 3:8].data_ptr()
    assert_close(longer[:, 3:8], expected)
    assert longer[:, :3].isnan().all() and longer[:, 8:].isnan().all()
    assert activation.snake(x, scale, share, out=x) is x
    assert torch.equal(x, longer[:, 3:8])


def test_snake_far_out(isa):
    """Angles of thousands of turns."""
    x = torch.linspace(-3e4, 3e4, 1001)[:, None].expand(-1, 16).contiguous()
    got = activation.snake(x, torch.ones(16), torch.full((16,), 1e4)) - x
    assert (got.double() / 1e4 - x.double().sin().square()).abs().max() < 1e-6


def test_snake_refuses_what_does_not_fit():
    x, ones = torch.ones(2, 5, 8), torch.ones(8)
    assert activation.snake(x[:, :0], ones, ones).shape == (2, 0, 8)
    with pytest.raises(ValueError, match=r"snake: share has shape \[7\]"):
        activation.snake(x, ones, ones[:7])
    with pytest.raises(ValueError, match="snake: out is float32"):
        activation.snake(x, ones, ones, out=torch.empty(2, 4, 8))
    with pytest.raises(ValueError, match="snake: scale"):
        activation.snake(x, ones.bfloat16(), ones)


def test_sigmoid_gate_at_the_ends(isa, dtype):
    gate = torch.tensor([[-200.0], [200.0], [0.0]], dtype=dtype)
    out = activation.sigmoid_gate(torch.full((3, 5), 2.0, dtype=dtype), gate).float()
    assert out[0].abs().max() < 1e-30 and torch.equal(out[1:], torch.tensor([[2.0], [1.0]]).expand(2, 5))


def test_extremes(isa, dtype):
    x = torch.tensor([0.0, -0.0, 1e-20, 40.0, -40.0, 3e4, -3e4, float("inf"), float("nan")], dtype=dtype)
    for name in NAMES:
        y = activation.activate(x, name).float()
        assert torch.equal(y[:2], torch.zeros(2)) and torch.isnan(y[-1])
        assert torch.equal(y[[3, 5, 7]], x[[3, 5, 7]].float()), name
        assert y[[4, 6]].abs().max() < 1e-6, name


def test_errors_name_the_tensor():
    with pytest.raises(
        ValueError, match=r"out is float32 \[2, 3\], expected half of the last axis of x, float32 \[2, 8\]"
    ):
        activation.activate_and_mul(torch.zeros(2, 8), "silu", out=torch.zeros(2, 3))
    with pytest.raises(ValueError, match="expected half of the last axis"):
        activation.activate_and_mul(torch.zeros(2, 7), "silu")
    with pytest.raises(ValueError, match=r"add: y is float32 \[3\], expected the shape of x"):
        activation.add(torch.zeros(2, 3), torch.zeros(3))
    with pytest.raises(ValueError, match=r"sigmoid_gate: gate is float32 \[2, 2\], expected the shape of x"):
        activation.sigmoid_gate(torch.zeros(2, 3), torch.zeros(2, 2))
    with pytest.raises(ValueError, match="expected one of none, silu, gelu_tanh, gelu_erf, gelu_quick"):
        activation.activate(torch.zeros(2), "relu")


def test_nothing(isa):
    assert activation.activate_and_mul(torch.zeros(0, 8), "silu").shape == (0, 4)
    assert activation.silu(torch.zeros(0)).shape == (0,)
    assert activation.sigmoid_gate(torch.zeros(0, 2, 4), torch.zeros(0, 2, 4)).shape == (0, 2, 4)
