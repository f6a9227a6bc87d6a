"""Causal convolution over time with a carried state."""

import torch
from torch import Tensor
from torch.nn import functional

from tilewright.ops.torch_backend.common import into, kept_states, put_rows, sequence_of_each


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
    """fp32 [T, W, C]: each token's input and the W - 1 before it, from its sequence or the state that went before."""
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
