"""Causal convolution over time with carried state, and convolutions over images and clips, channels last."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from tilewright.ops.conv import PackedConvWeight, Triple
from tilewright.ops.torch_backend import on_gpu
from tilewright.ops.torch_backend.activation import ACTIVATIONS
from tilewright.ops.torch_backend.common import into, kept_states, put_rows, sequence_of_each
from tilewright.ops.torch_backend.packed import rows_of


def causal_conv(
    x: Tensor,
    weight: Tensor,
    states: Tensor,
    starts: Tensor,
    read_slots: Tensor,
    write_slots: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    windows_TWC = _windows(x, len(weight), states, starts, read_slots)
    total = (windows_TWC * weight.float()).sum(1)
    if bias is not None:
        total = total + bias.float()
    tokens, slots = kept_states(len(x), starts, read_slots, write_slots)
    put_rows(states, slots, windows_TWC[tokens, 1:])
    return into(out, functional.silu(total).to(x.dtype))


def _windows(x: Tensor, num_taps: int, states: Tensor, starts: Tensor, read_slots: Tensor) -> Tensor:
    """Return each token's input and the W - 1 before it, from its sequence or its state: fp32 [T, W, C]."""
    tokens, taps = (torch.arange(size, device=x.device) for size in (len(x), num_taps))
    sequence = sequence_of_each(starts, len(x))
    source = tokens[:, None] + taps - (num_taps - 1)  # [T, W]
    windows = x.float()[source.clamp(min=0)]
    if num_taps == 1:
        return windows
    place = source - starts[sequence][:, None]  # negative: that far before the sequence's first token
    slots = read_slots[sequence].long()
    past = states[slots.clamp(min=0)[:, None], (num_taps - 1 + place).clamp(0, num_taps - 2)].float()
    past = torch.where(slots[:, None, None] >= 0, past, 0.0)
    return torch.where(place[:, :, None] >= 0, windows, past)


def conv_depth(in_channels: int, kernel: Triple) -> int:
    return in_channels * math.prod(kernel)


def conv3d(
    x: Tensor,
    weight: PackedConvWeight,
    *,
    stride: Triple = (1, 1, 1),
    padding: tuple[int, int, int, int] = (0, 0, 0, 0),
    time_padding: int | None = None,
    previous: Tensor | None = None,
    upsample: bool = False,
    activation: str = "none",
    residual: Tensor | None = None,
    norm: Tensor | None = None,
    norm_activation: str = "none",
    out: Tensor | None = None,
) -> Tensor:
    rows = rows_of(weight.packed).unflatten(1, (*weight.kernel, weight.in_channels))
    y = plain_conv3d(
        x,
        rows.movedim(-1, 1),
        weight.packed.bias,
        stride=stride,
        padding=padding,
        time_padding=time_padding,
        previous=previous,
        upsample=upsample,
        activation=activation,
        residual=residual,
        norm=norm,
        norm_activation=norm_activation,
    )
    return into(out, y)


def plain_conv3d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: Triple = (1, 1, 1),
    padding: tuple[int, int, int, int] = (0, 0, 0, 0),
    time_padding: int | None = None,
    previous: Tensor | None = None,
    upsample: bool = False,
    activation: str = "none",
    residual: Tensor | None = None,
    norm: Tensor | None = None,
    norm_activation: str = "none",
) -> Tensor:
    """Return `conv3d` for a weight [O, C, kt, kh, kw] that is a plain tensor."""
    front = weight.shape[2] - 1 if time_padding is None else time_padding
    computed_in = x.dtype if on_gpu.is_half(x, weight) else torch.float32
    frames = x.to(computed_in) if previous is None else torch.cat((previous.to(computed_in), x.to(computed_in)), dim=1)
    if norm is not None:
        mean, factor, offset = norm[:, :, None, None, None].unbind(1)
        frames = ACTIVATIONS[norm_activation]((frames - mean) * factor + offset).to(computed_in)
    frames = frames.movedim(-1, 1)
    if upsample:
        frames = frames.repeat_interleave(2, dim=-2).repeat_interleave(2, dim=-1)
    top, bottom, left, right = padding
    zeros_in_front = front - (0 if previous is None else previous.shape[1])
    frames = functional.pad(frames, (left, right, top, bottom, zeros_in_front, 0))
    y = _convolve(frames, weight.to(computed_in), None if bias is None else bias.to(computed_in), stride)
    y = ACTIVATIONS[activation](y.movedim(1, -1))
    if residual is not None:
        y = y + residual.to(computed_in)
    return y.to(x.dtype)


def _convolve(frames: Tensor, weight: Tensor, bias: Tensor | None, stride: Triple) -> Tensor:
    if not frames.is_cuda:
        return functional.conv3d(frames, weight, bias, stride)
    # cuDNN would by default multiply fp32 in TF32, with 10 bits of mantissa.
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        if weight.shape[2] > 1 or stride[0] > 1:
            return functional.conv3d(frames, weight, bias, stride)
        # cuDNN has more and faster kernels for images than for clips of one frame.
        images = frames.movedim(2, 1).flatten(0, 1).contiguous(memory_format=torch.channels_last)
        y = functional.conv2d(images, weight[:, :, 0], bias, stride[1:])
        return y.unflatten(0, (frames.shape[0], -1)).movedim(1, 2)
