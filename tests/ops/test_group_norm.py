import pytest
import torch
from helpers import assert_close, poisoned, rand

from tilewright.ops.native import kernels
from tilewright.ops.norm import group_norm, group_norm_table, group_statistics
from tilewright.ops.torch_backend import norm as reference


@pytest.mark.parametrize(
    ("shape", "groups"),
    [((1, 1, 4), 2), ((2, 3, 5, 6), 3), ((3, 7, 35), 5), ((2, 2, 3, 4, 96), 32), ((2, 9, 9, 64), 1), ((2, 8), 2)],
    ids=str,
)
@pytest.mark.parametrize("activation", ["none", "silu"])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=["w32", "w16"])
def test_group_norm(isa, dtype, weight_dtype, shape, groups, activation):
    x = rand(*shape, dtype=dtype)
    weight, bias = (rand(shape[-1], dtype=weight_dtype, seed=seed) for seed in (1, 2))
    for affine in [(weight, bias), (weight, None), (None, None)]:
        expected = reference.group_norm(x, groups, *affine, 1e-5, activation=activation)
        out = poisoned(*shape, dtype=dtype)
        assert_close(group_norm(x, groups, *affine, 1e-5, activation=activation, out=out), expected)
        in_place = x.clone()
        assert torch.equal(group_norm(in_place, groups, *affine, 1e-5, activation=activation, out=in_place), out)


def test_many_chunks(isa, dtype, two_threads):
    """Over 2 MB for each thread, so that stores are streamed; more pixels than a chunk has, and a smaller last one."""
    x = rand(1, 257, 129, 70, dtype=dtype) * 2 + 3
    weight, bias = rand(70, seed=1), rand(70, seed=2)
    expected = reference.group_norm(x, 7, weight, bias, 1e-6, activation="silu")
    out = poisoned(*x.shape, dtype=dtype)
    assert_close(group_norm(x, 7, weight, bias, 1e-6, activation="silu", out=out), expected)


def test_a_mean_far_from_zero(isa):
    """A mean 1,000 times the spread: sums of squares would keep nothing of the variance."""
    x = rand(1, 50, 40, 64) + 1000
    expected = torch.nn.functional.group_norm(x.double().movedim(-1, 1), 8, eps=1e-6).movedim(1, -1)
    assert (group_norm(x, 8, None, None, 1e-6).double() - expected).abs().max() < 1e-3


def test_neither_threads_nor_the_batch_change_the_bits(isa, dtype):
    x = rand(3, 40, 50, 96, dtype=dtype)
    try:
        outs = []
        for count in (1, 2, 7):
            kernels.set_num_threads(count)
            outs.append(group_norm(x, 32, None, None, 1e-6))
            assert torch.equal(group_norm(x[1:2], 32, None, None, 1e-6), outs[0][1:2])
    finally:
        kernels.set_num_threads(0)
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_strided_pixels(isa, dtype):
    wide = rand(2, 5, 100, dtype=dtype)
    x, out = wide[..., 8:72], poisoned(2, 5, 80, dtype=dtype)
    group_norm(x, 4, None, None, 1e-6, out=out[..., 10:74])
    assert_close(out[..., 10:74], reference.group_norm(x, 4, None, None, 1e-6))
    assert out[..., :10].isnan().all() and out[..., 74:].isnan().all()


def test_nan_stays_in_its_group(isa, dtype):
    x = rand(2, 6, 8, dtype=dtype)
    x[1, 3, 5] = float("nan")
    y = group_norm(x, 2, None, None, 1e-6)
    assert y[1, :, 4:].isnan().all()
    assert not y[0].isnan().any() and not y[1, :, :4].isnan().any()


@pytest.mark.parametrize(("shape", "groups"), [((2, 3, 5, 6), 3), ((1, 130, 70, 64), 8), ((2, 9, 96), 32)], ids=str)
def test_statistics(isa, dtype, shape, groups):
    x = rand(*shape, dtype=dtype) * 2 + 3
    statistics = group_statistics(x, groups)
    assert_close(statistics, reference.group_statistics(x, groups))
    weight, bias = rand(shape[-1], seed=1), rand(shape[-1], seed=2)
    mean, factor, offset = group_norm_table(statistics, weight, bias, 1e-6).view(shape[0], 3, -1, shape[-1]).unbind(1)
    flat = x.float().view(shape[0], -1, shape[-1])
    expected = reference.group_norm(x.float(), groups, weight, bias, 1e-6).view(flat.shape)
    assert_close((flat - mean) * factor + offset, expected, rtol=1e-4, atol=1e-4)


def test_nothing(isa):
    assert group_norm(torch.zeros(0, 4, 8), 2, None, None, 1e-6).shape == (0, 4, 8)
    assert group_norm(torch.zeros(2, 0, 8), 2, None, None, 1e-6).shape == (2, 0, 8)


def test_errors():
    x = torch.zeros(2, 3, 8)
    with pytest.raises(ValueError, match="group_norm: groups is 3, expected a divisor of the 8 channels"):
        group_norm(x, 3, None, None, 1e-6)
    with pytest.raises(ValueError, match=r"weight has shape \[7\], expected \[C=8\]"):
        group_norm(x, 2, torch.zeros(7), None, 1e-6)
    with pytest.raises(ValueError, match="bias is bfloat16, expected float32 as weight"):
        group_norm(x, 2, torch.zeros(8), torch.zeros(8).bfloat16(), 1e-6)
    with pytest.raises(ValueError, match=r"out is float32 \[3, 2, 8\], expected the shape of x, float32 \[2, 3, 8\]"):
        group_norm(x, 2, None, None, 1e-6, out=torch.zeros(3, 2, 8))
    with pytest.raises(ValueError, match="expected items, any number of axes, and channels"):
        group_norm(x[0, 0], 2, None, None, 1e-6)
    with pytest.raises(ValueError, match="group_statistics: groups is 3, expected a divisor of the 8 channels"):
        group_statistics(x, 3)
    with pytest.raises(ValueError, match=r"group_statistics: x is float32 \[2, 0, 8\], expected some pixels"):
        group_statistics(x[:, :0], 2)
