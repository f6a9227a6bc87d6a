import pytest
import torch
from helpers import assert_close, poisoned, rand

from tilewright.ops.conv import conv2d, conv3d, pack_conv, pack_upsample_conv, upsample_conv2d
from tilewright.ops.native import kernels
from tilewright.ops.torch_backend.conv import plain_conv3d

# Channels in and out, kernel, stride, padding: of autoencoders, of an audio tower, and odd ones. Below 32 channels all
# taps share tiles of depth.
SHAPES = [
    (3, 33, (3, 3), (1, 1), (1, 1, 1, 1)),
    (16, 8, (2, 5), (1, 3), (0, 2, 4, 1)),
    (40, 32, (3, 3), (2, 2), (0, 1, 0, 1)),
    (64, 65, (1, 1), (1, 1), (0, 0, 0, 0)),
    (48, 34, (4, 2), (3, 1), (2, 0, 1, 3)),
    (33, 20, (2, 2), (5, 4), (0, 0, 0, 0)),
]


def weights(out_channels, in_channels, *kernel, dtype, seed=1):
    scale = (in_channels * torch.Size(kernel).numel()) ** -0.5
    return rand(out_channels, in_channels, *kernel, dtype=dtype, seed=seed, scale=scale), rand(
        out_channels, seed=seed + 1
    )


def after_rounding(dtype):
    """The tolerance where bf16 is rounded once more than the twin does: sums of taps, and x after a norm."""
    return {"atol": 0.03} if dtype == torch.bfloat16 else {}


def expected_2d(x, weight, bias, **options):
    stride, residual = (1, *options.pop("stride", (1, 1))), options.pop("residual", None)
    residual = None if residual is None else residual[:, None]
    return plain_conv3d(x[:, None], weight[:, :, None], bias, stride=stride, residual=residual, **options)[:, 0]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=["w32", "w16"])
def test_conv2d(isa, dtype, weight_dtype, shape):
    in_channels, out_channels, kernel, stride, padding = shape
    weight, bias = weights(out_channels, in_channels, *kernel, dtype=weight_dtype)
    packed = pack_conv(weight, bias)
    for size in [(2, 9, 7), (1, 5, 40)]:
        x = rand(*size, in_channels, dtype=dtype, seed=3)
        expected = expected_2d(x, weight, bias, stride=stride, padding=padding)
        out = poisoned(*expected.shape, dtype=dtype)
        assert_close(conv2d(x, packed, stride=stride, padding=padding, out=out), expected)
        assert torch.equal(conv2d(x, packed, stride=stride, padding=padding), out)


@pytest.mark.parametrize("activation", ["none", "silu", "gelu_tanh", "gelu_erf"])
@pytest.mark.parametrize("in_channels", [4, 36])
def test_epilogues(isa, dtype, activation, in_channels):
    weight, bias = weights(35, in_channels, 3, 3, dtype=dtype)
    x, residual = rand(2, 6, 5, in_channels, dtype=dtype), rand(2, 6, 5, 35, dtype=dtype, seed=5)
    packed, padding = pack_conv(weight, bias), (1, 1, 1, 1)
    expected = expected_2d(x, weight, bias, padding=padding, activation=activation, residual=residual)
    out = poisoned(2, 6, 5, 35, dtype=dtype)
    assert_close(conv2d(x, packed, padding=padding, activation=activation, residual=residual, out=out), expected)
    # In place on the residual, as a block of an autoencoder may do.
    conv2d(x, packed, padding=padding, activation=activation, residual=residual, out=residual)
    assert torch.equal(residual, out)


@pytest.mark.parametrize("in_channels", [3, 40])
@pytest.mark.parametrize("stride", [(1, 1), (2, 3)])
def test_upsampled(isa, dtype, in_channels, stride):
    weight, bias = weights(20, in_channels, 3, 3, dtype=dtype)
    x = rand(2, 5, 6, in_channels, dtype=dtype)
    options = {"padding": (1, 1, 1, 1), "stride": stride, "upsample": True}
    expected = expected_2d(x, weight, bias, **options)
    assert_close(conv2d(x, pack_conv(weight, bias), **options, out=poisoned(*expected.shape, dtype=dtype)), expected)


@pytest.mark.parametrize("in_channels", [3, 40])
def test_upsampled_in_four_parts(isa, dtype, in_channels):
    weight, bias = weights(20, in_channels, 3, 3, dtype=dtype)
    x, residual = rand(2, 5, 6, in_channels, dtype=dtype), rand(2, 10, 12, 20, dtype=dtype, seed=5)
    expected = expected_2d(x, weight, bias, padding=(1, 1, 1, 1), upsample=True, residual=residual)
    packed = pack_upsample_conv(weight, bias)
    out = upsample_conv2d(x, packed, residual=residual, out=poisoned(2, 10, 12, 20, dtype=dtype))
    assert_close(out, expected, **after_rounding(dtype))
    for begin, end in [(0, 2), (2, 5), (1, 4), (0, 5)]:
        here = slice(2 * begin, 2 * end)
        rows = upsample_conv2d(x, packed, rows=(begin, end), residual=residual[:, here])
        assert torch.equal(rows, out[:, here])
    upsample_conv2d(x, packed, residual=residual, out=residual)
    assert torch.equal(residual, out)
    with pytest.raises(ValueError, match=r"pack_upsample_conv: weight has shape \[20, 3, 1, 1\], expected"):
        pack_upsample_conv(weight[:, :3, :1, :1])


@pytest.mark.parametrize("in_channels", [3, 40])
@pytest.mark.parametrize("kernel", [(3, 3), (1, 1)])
@pytest.mark.parametrize("activation", ["none", "silu"])
def test_norm_before(isa, dtype, in_channels, kernel, activation):
    """Zeros around a picture are zeros after the norm."""
    weight, bias = weights(20, in_channels, *kernel, dtype=dtype)
    x, norm = rand(2, 5, 6, in_channels, dtype=dtype), rand(2, 3, in_channels, seed=7)
    options = {"padding": (kernel[0] // 2,) * 4, "norm": norm, "norm_activation": activation}
    expected = expected_2d(x, weight, bias, **options)
    out = poisoned(*expected.shape, dtype=dtype)
    assert_close(conv2d(x, pack_conv(weight, bias), **options, out=out), expected, **after_rounding(dtype))


def test_norm_of_clips(isa, dtype):
    weight, bias = weights(20, 33, 3, 3, 3, dtype=dtype)
    x, previous = rand(2, 2, 4, 3, 33, dtype=dtype), rand(2, 1, 4, 3, 33, dtype=dtype, seed=4)
    options = {"norm": rand(2, 3, 33, seed=7), "norm_activation": "silu", "previous": previous, "padding": (1,) * 4}
    expected = plain_conv3d(x, weight, bias, **options)
    assert_close(conv3d(x, pack_conv(weight, bias), **options), expected, **after_rounding(dtype))


@pytest.mark.parametrize("kernel", [(3, 3), (1, 1)])
def test_results_that_lie_apart(isa, dtype, kernel):
    """Every other row and pixel of a larger picture, and of the residual; nothing beside them is written."""
    weight, bias = weights(20, 40, *kernel, dtype=dtype)
    x, large = rand(2, 5, 6, 40, dtype=dtype), poisoned(2, 10, 12, 20, dtype=dtype)
    residual = rand(2, 10, 12, 20, dtype=dtype, seed=5)[:, ::2, 1::2]
    options = {"padding": (kernel[0] // 2,) * 4, "residual": residual}
    out = large[:, 1::2, ::2]
    assert conv2d(x, pack_conv(weight, bias), **options, out=out) is out
    assert_close(out.contiguous(), expected_2d(x, weight, bias, **options))
    assert large[:, ::2].isnan().all() and large[:, :, 1::2].isnan().all()


@pytest.mark.parametrize("in_channels", [5, 33])
@pytest.mark.parametrize("kernel,stride", [((3, 3, 3), (1, 1, 1)), ((3, 1, 1), (2, 1, 1)), ((2, 3, 2), (3, 2, 1))])
def test_conv3d(isa, dtype, in_channels, kernel, stride):
    weight, bias = weights(18, in_channels, *kernel, dtype=dtype)
    packed = pack_conv(weight, bias)
    x, before = rand(2, 5, 6, 4, in_channels, dtype=dtype), rand(2, 2, 6, 4, in_channels, dtype=dtype, seed=4)
    for time_padding, num_previous in [(None, 0), (None, kernel[0] - 1), (2, 1), (0, 0), (4, 2)]:
        options = {
            "stride": stride,
            "padding": (1, 0, 1, 2),
            "time_padding": time_padding,
            "previous": before[:, 2 - num_previous :] if num_previous else None,
        }
        expected = plain_conv3d(x, weight, bias, **options)
        assert_close(conv3d(x, packed, **options, out=poisoned(*expected.shape, dtype=dtype)), expected)


def test_a_clip_in_parts(isa, dtype):
    """With the last frames of the part before as `previous`, parts have the bits of the whole."""
    weight, bias = weights(33, 34, 3, 3, 3, dtype=dtype)
    packed, x = pack_conv(weight, bias), rand(1, 7, 5, 6, 34, dtype=dtype)
    whole = conv3d(x, packed, padding=(1, 1, 1, 1))
    first = conv3d(x[:, :1], packed, padding=(1, 1, 1, 1))
    second = conv3d(x[:, 1:4], packed, padding=(1, 1, 1, 1), previous=x[:, :1])
    third = conv3d(x[:, 4:], packed, padding=(1, 1, 1, 1), previous=x[:, 2:4])
    assert torch.equal(torch.cat((first, second, third), dim=1), whole)


def test_strided_views(isa, dtype):
    weight, bias = weights(20, 40, 3, 3, dtype=dtype)
    packed = pack_conv(weight, bias)
    wide = rand(3, 9, 8, 100, dtype=dtype)
    for x in [wide[..., 10:50], wide[:, 1:8:2, ::3, :40], wide[:2, :, 2:5, 5:45], wide[..., :40].transpose(1, 2)]:
        expected = expected_2d(x, weight, bias, padding=(1, 1, 1, 1))
        wide_out = poisoned(*expected.shape[:3], 30, dtype=dtype)
        conv2d(x, packed, padding=(1, 1, 1, 1), out=wide_out[..., 4:24])
        assert_close(wide_out[..., 4:24], expected)
        assert wide_out[..., :4].isnan().all() and wide_out[..., 24:].isnan().all()
    ones, one_bias = weights(20, 40, 1, 1, dtype=dtype)
    for x in [wide[..., 10:50], wide[:, :, 2:5, 5:45]]:
        assert_close(conv2d(x, pack_conv(ones, one_bias)), expected_2d(x, ones, one_bias))


def test_nothing_of_a_neighbour_enters(isa, dtype):
    """Infinities outside a pixel's window leave it as it was: no product with a zero stands for padding."""
    for in_channels in (3, 33):
        weight, bias = weights(8, in_channels, 3, 3, dtype=dtype)
        packed, x = pack_conv(weight, bias), rand(1, 9, 9, in_channels, dtype=dtype)
        before = conv2d(x, packed, padding=(1, 1, 1, 1))
        x[0, 4, 4] = float("inf")
        after = conv2d(x, packed, padding=(1, 1, 1, 1))
        touched = torch.zeros(9, 9, dtype=torch.bool)
        touched[3:6, 3:6] = True
        assert torch.equal(after[0][~touched], before[0][~touched])
        assert not after[0][touched].isfinite().any()


@pytest.mark.parametrize("in_channels", [3, 64])
def test_neither_threads_nor_the_batch_change_the_bits(isa, dtype, in_channels):
    weight, bias = weights(70, in_channels, 3, 3, dtype=dtype)
    packed, x = pack_conv(weight, bias), rand(3, 13, 21, in_channels, dtype=dtype)
    try:
        outs = []
        for count in (1, 2, 7):
            kernels.set_num_threads(count)
            outs.append(conv2d(x, packed, padding=(1, 1, 1, 1)))
            assert torch.equal(conv2d(x[1:2], packed, padding=(1, 1, 1, 1)), outs[0][1:2])
    finally:
        kernels.set_num_threads(0)
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_pictures_larger_than_a_tile(isa, dtype):
    """Rows of 1,100 pixels of 160 channels do not fit a tile, nor do all rows."""
    weight, bias = weights(33, 160, 3, 3, dtype=dtype)
    x = rand(1, 3, 1100, 160, dtype=dtype)
    expected = expected_2d(x, weight, bias, padding=(1, 1, 1, 1))
    out = poisoned(*expected.shape, dtype=dtype)
    assert_close(conv2d(x, pack_conv(weight, bias), padding=(1, 1, 1, 1), out=out), expected)


def test_no_pictures(isa):
    assert conv2d(torch.zeros(0, 4, 4, 8), pack_conv(torch.zeros(5, 8, 3, 3))).shape == (0, 2, 2, 5)


def test_errors():
    packed = pack_conv(torch.zeros(4, 8, 3, 3), torch.zeros(4))
    x = torch.zeros(1, 5, 5, 8)
    with pytest.raises(ValueError, match=r"conv2d: x has shape \[5, 5, 8\], expected \[B, H, W, C\]"):
        conv2d(x[0], packed)
    with pytest.raises(ValueError, match=r"x with its padding is \[1, 2, 5\], smaller than the kernel, \[1, 3, 3\]"):
        conv2d(x[:, :2], packed)
    with pytest.raises(
        ValueError, match=r"weight is \[4, 72\], expected \[O, 63\] for 7 channels and a kernel of \[1, 3"
    ):
        conv2d(x[..., :7], packed)
    with pytest.raises(ValueError, match=r"out has shape \[1, 1, 3, 3, 5\], expected \[B=1, T', H', W', O=4\]"):
        conv2d(x, packed, out=torch.zeros(1, 3, 3, 5))
    with pytest.raises(
        ValueError, match=r"residual has shape \[1, 1, 5, 5, 4\], expected \[B=1, T'=1, H'=3, W'=3, O=4\]"
    ):
        conv2d(x, packed, residual=torch.zeros(1, 5, 5, 4))
    with pytest.raises(ValueError, match=r"stride is \[1, 0, 1\], expected 1 or more of each"):
        conv2d(x, packed, stride=(0, 1), out=torch.zeros(1, 3, 3, 4))
    with pytest.raises(ValueError, match="padding is negative"):
        conv2d(x, packed, padding=(-1, 0, 0, 0), out=torch.zeros(1, 3, 3, 4))
    with pytest.raises(ValueError, match="activation is 'relu', expected one of none, silu"):
        conv2d(x, packed, activation="relu")
    with pytest.raises(ValueError, match=r"shape \[4, 8, 3\], expected \[O, C, kt, kh, kw\]"):
        pack_conv(torch.zeros(4, 8, 3))
    causal = pack_conv(torch.zeros(4, 8, 3, 1, 1))
    with pytest.raises(ValueError, match=r"conv2d: the kernel is \[3, 1, 1\], expected one frame"):
        conv2d(x, causal)
    with pytest.raises(ValueError, match="previous has 3 frames, expected 2 or fewer, the padding in time"):
        conv3d(x[:, None], causal, previous=torch.zeros(1, 3, 5, 5, 8))
    with pytest.raises(ValueError, match="out has 2 frames, which need 4 of x and before it, there are 3"):
        conv3d(x[:, None], causal, out=torch.zeros(1, 2, 5, 5, 4))
    with pytest.raises(ValueError, match=r"previous has shape \[1, 1, 4, 5, 8\], expected \[B=1, _, H=5, W=5, C=8\]"):
        conv3d(x[:, None], causal, previous=torch.zeros(1, 1, 4, 5, 8))
