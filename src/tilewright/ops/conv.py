"""Convolutions: causal with carried state, and of images and clips; kernels in csrc/kernels/{conv,conv3d}.

Images and clips are channels last, with the weight packed once. B images or clips, T frames, H rows, W columns, C
channels in, O out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from tilewright.ops.backend import op
from tilewright.ops.linear import PackedWeight, pack_weight
from tilewright.ops.native import kernels, view, view_or_none
from tilewright.ops.packed import weight_format
from tilewright.ops.plan import empty


@op
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
    """Return silu(bias + sum_i weight[i] x[t - W + 1 + i]) of packed sequences x [T, C], for prefill and decode.

    `weight` is [W, C], W 1 or more: the checkpoint's [C, 1, W] transposed once. Sequence b has tokens starts[b] to
    starts[b + 1]; before them come the W - 1 inputs in states[read_slots[b]] (states [slots, W - 1, C], oldest first; a
    negative slot: zeros). The state after token t is written to states[write_slots[t]], unless that is negative, so
    that drafts can keep one per token; without `write_slots` the state after the last token goes back to read_slots[b].
    A slot that is written must not be read or written by another sequence. The integer tensors are int32; `out` must
    not be x.
    """
    if out is None:
        out = empty(x.shape, x.dtype)
    kernels.causal_conv(
        view(x),
        view(weight),
        view_or_none(bias),
        view(states),
        view(starts),
        view(read_slots),
        view_or_none(write_slots),
        view(out),
    )
    return out


Triple = tuple[int, int, int]  # frames, rows, columns


@dataclass(frozen=True)
class PackedConvWeight:
    """Weight and bias of a convolution, packed as [O, taps * channels], with the shape it was packed from."""

    packed: PackedWeight
    in_channels: int
    kernel: Triple

    @property
    def out_channels(self) -> int:
        return self.packed.n


@dataclass(frozen=True)
class PackedUpsampleWeight:
    """A 3 x 3 convolution of images upsampled by two by repeating pixels, as four 2 x 2 convolutions.

    Each gives every other row and column of the result: the taps on repetitions of one pixel are added up. That is 16
    taps for four pixels instead of 36.
    """

    phases: tuple[
        PackedConvWeight, PackedConvWeight, PackedConvWeight, PackedConvWeight
    ]  # rows 0, 2... and columns 0, 2...; columns 1, 3...

    @property
    def out_channels(self) -> int:
        return self.phases[0].out_channels


@op
def conv_depth(in_channels: int, kernel: Triple) -> int:
    """Return the elements of a packed weight's row: the channels of each tap, padded to whole tiles."""
    return kernels.conv3d_depth(in_channels, kernel)


def pack_conv(weight: Tensor, bias: Tensor | None = None, *, dtype: torch.dtype | None = None) -> PackedConvWeight:
    """Pack a checkpoint's weight [O, C, kh, kw] or [O, C, kt, kh, kw] for `conv2d` or `conv3d`."""
    if weight.dim() not in (4, 5):
        raise ValueError(
            f"pack_conv: weight has shape {list(weight.shape)}, expected [O, C, kt, kh, kw] or [O, C, kh, kw]"
        )
    out_channels, in_channels, *axes = weight.shape
    kernel = (axes[0], axes[1], axes[2]) if len(axes) == 3 else (1, axes[0], axes[1])
    taps = weight.reshape(out_channels, in_channels, -1).transpose(1, 2)
    depth = conv_depth(in_channels, kernel)
    taps = functional.pad(taps, (0, depth // taps.shape[1] - in_channels))
    # Convolutions read weights of either type in the layout that fp32 has at every ISA level.
    format = replace(weight_format(dtype or weight.dtype), layout=weight_format(torch.float32).layout)
    return PackedConvWeight(pack_weight(taps.reshape(out_channels, depth), bias, dtype=format), in_channels, kernel)


def pack_upsample_conv(
    weight: Tensor, bias: Tensor | None = None, *, dtype: torch.dtype | None = None
) -> PackedUpsampleWeight:
    """Pack a checkpoint's weight [O, C, 3, 3] for `upsample_conv2d`; sums of taps are fp32, rounded once."""
    if weight.dim() != 4 or weight.shape[2:] != (3, 3):
        raise ValueError(f"pack_upsample_conv: weight has shape {list(weight.shape)}, expected [O, C, 3, 3]")
    dtype = dtype or weight.dtype
    # An even row or column sees its neighbour before once and itself twice, an odd one the reverse.
    phases = []
    for rows in _merged(weight.float(), 2):
        for taps in _merged(rows, 3):
            phases.append(pack_conv(taps.contiguous(), bias, dtype=dtype))
    return PackedUpsampleWeight((phases[0], phases[1], phases[2], phases[3]))


def _merged(taps: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Merge the three taps of an axis into two, for even positions and for odd ones."""
    first, middle, last = taps.unbind(axis)
    return torch.stack((first, middle + last), dim=axis), torch.stack((first + middle, last), dim=axis)


def upsample_conv2d(
    x: Tensor,
    weight: PackedUpsampleWeight,
    *,
    rows: tuple[int, int] | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return conv + residual [B, 2 H, 2 W, O] of x [B, H, W, C] with every pixel repeated, zero-padded.

    `rows`: only the output of the rows [begin, end) of x.
    """
    batch, height, width, _ = x.shape
    begin, end = (0, height) if rows is None else rows
    if out is None:
        out = empty((batch, 2 * (end - begin), 2 * width, weight.out_channels), x.dtype)
    above, below = max(begin - 1, 0), min(end + 1, height)
    for phase, packed in enumerate(weight.phases):
        odd_row, odd_column = divmod(phase, 2)
        conv2d(
            x[:, begin:below] if odd_row else x[:, above:end],
            packed,
            padding=(
                int(not odd_row and begin == 0),
                int(odd_row and end == height),
                1 - odd_column,
                odd_column,
            ),
            residual=None if residual is None else residual[:, odd_row::2, odd_column::2],
            out=out[:, odd_row::2, odd_column::2],
        )
    return out


def conv2d(
    x: Tensor,
    weight: PackedConvWeight,
    *,
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int, int, int] = (0, 0, 0, 0),
    upsample: bool = False,
    activation: str = "none",
    residual: Tensor | None = None,
    norm: Tensor | None = None,
    norm_activation: str = "none",
    out: Tensor | None = None,
) -> Tensor:
    """Return activation(conv + bias) + residual [B, H', W', O] of x [B, H, W, C].

    `padding` is (top, bottom, left, right): zeros around x. With `upsample`, x is first upsampled by two (nearest)
    without a copy. `activation` as for `linear`; `residual` has the shape and type of the result and may be `out`,
    which may be strided by row and pixel. `norm` [B, 3, C] fp32 are means, factors and biases: x is read as
    norm_activation((x - mean) * factor + bias) before it is padded (`group_norm_table`). A Conv1d is an image of one
    row.
    """
    if x.dim() != 4:
        raise ValueError(f"conv2d: x has shape {list(x.shape)}, expected [B, H, W, C]")
    if weight.kernel[0] != 1:
        raise ValueError(f"conv2d: the kernel is {list(weight.kernel)}, expected one frame")
    frames = conv3d(
        x.unsqueeze(1),
        weight,
        stride=(1, *stride),
        padding=padding,
        upsample=upsample,
        activation=activation,
        residual=None if residual is None else residual.unsqueeze(1),
        norm=norm,
        norm_activation=norm_activation,
        out=None if out is None else out.unsqueeze(1),
    )
    return frames.squeeze(1) if out is None else out


@op
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
    """Return activation(conv + bias) + residual [B, T', H', W', O] of x [B, T, H, W, C], causal in time.

    x is preceded by `time_padding` frames, kt - 1 by default: the last ones are `previous` [B, P, H, W, C], with at
    most that many frames, the others zeros. All else is as in `conv2d`.
    """
    front = weight.kernel[0] - 1 if time_padding is None else time_padding
    num_previous = 0 if previous is None else previous.shape[1]
    if num_previous > front:
        raise ValueError(f"conv3d: previous has {num_previous} frames, expected {front} or fewer, the padding in time")
    if out is None:
        sizes = output_size(x, weight.kernel, stride, padding, front, upsample)
        out = empty((x.shape[0], *sizes, weight.out_channels), x.dtype)
    kernels.conv3d(
        view(x),
        view_or_none(previous),
        weight.packed.native(),
        view_or_none(weight.packed.bias),
        view_or_none(residual),
        view_or_none(norm),
        view(out),
        weight.kernel,
        stride,
        (front, padding[0], padding[2]),
        upsample,
        activation,
        norm_activation,
    )
    return out


def output_size(
    x: Tensor, kernel: Triple, stride: Triple, padding: tuple[int, int, int, int], front: int, upsample: bool
) -> Triple:
    """Return T', H', W'. ValueError if one of them is 0."""
    if x.dim() != 5:
        raise ValueError(f"conv3d: x has shape {list(x.shape)}, expected [B, T, H, W, C]")
    _, frames, height, width, _ = x.shape
    scale = 2 if upsample else 1
    padded = (
        frames + front,
        height * scale + padding[0] + padding[1],
        width * scale + padding[2] + padding[3],
    )
    if any(size < taps for size, taps in zip(padded, kernel, strict=True)):
        raise ValueError(f"conv3d: x with its padding is {list(padded)}, smaller than the kernel, {list(kernel)}")
    sizes = [(size - taps) // step + 1 for size, taps, step in zip(padded, kernel, stride, strict=True)]
    return sizes[0], sizes[1], sizes[2]
