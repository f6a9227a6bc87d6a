"""Causal convolution over time with a carried state; kernels in csrc/kernels/conv."""

from torch import Tensor

from tilewright.ops.backend import op
from tilewright.ops.native import kernels, view, view_or_none
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
    """silu(bias + sum_i weight[i] x[t - W + 1 + i]) of packed sequences x [T, C]: prefill and decode steps alike.

    `weight` is [W, C], W 1 or more: the checkpoint's [C, 1, W] transposed once. Sequence b has tokens starts[b] to
    starts[b + 1]; before them come the W - 1 inputs in states[read_slots[b]] (states [slots, W - 1, C], oldest first;
    a negative slot: zeros). The state after token t is written to states[write_slots[t]], a negative slot: not kept,
    so that drafts can keep one per token; without `write_slots` the state after the last token goes back to
    read_slots[b]. A slot that is written must not be read or written by another sequence. The integer tensors are
    int32; `out` must not be x.
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
