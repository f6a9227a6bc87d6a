"""Gated delta nets: splitting projections, gates, the delta rule; kernels in csrc/kernels/{delta_inputs,gated_delta}.

T packed tokens, B sequences, G key heads of width K, H value heads of width V, H a multiple of G.
"""

import torch
from torch import Tensor

from tilewright.ops.backend import op
from tilewright.ops.native import kernels, view, view_or_none
from tilewright.ops.plan import empty


@op
def split_projections(
    qkvz: Tensor,
    ba: Tensor,
    key_heads: int,
    value_heads: int,
    key_width: int,
    value_width: int,
    *,
    interleaved: bool,
    out: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split qkvz [T, 2GK + 2HV] and ba [T, 2H] into q|k|v [T, 2GK + HV], z [T, H, V], b and a [T, H].

    `interleaved` (Qwen3-Next): for each key head its q, its k, the v and then the z of its value heads; their b, their
    a. Otherwise (Qwen3.5) all q, all k, all v, all z; all b, all a: then slices of qkvz and ba need no copy.
    """
    num_tokens, dtype = qkvz.shape[0], qkvz.dtype
    qkv, z, b, a = out or (
        empty((num_tokens, 2 * key_heads * key_width + value_heads * value_width), dtype),
        empty((num_tokens, value_heads, value_width), dtype),
        empty((num_tokens, value_heads), dtype),
        empty((num_tokens, value_heads), dtype),
    )
    kernels.split_projections(
        view(qkvz),
        view(ba),
        view(qkv),
        view(z),
        view(b),
        view(a),
        key_heads,
        value_heads,
        key_width,
        value_width,
        interleaved,
    )
    return qkv, z, b, a


@op
def delta_gates(
    a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Return g = -exp(a_log) softplus(a + dt_bias), the log of the decay, and beta = sigmoid(b), fp32 [T, H].

    a and b [T, H], a_log and dt_bias [H] are fp32 or bf16.
    """
    g, beta = out or (empty(a.shape, torch.float32), empty(a.shape, torch.float32))
    kernels.delta_gates(view(a), view(b), view(a_log), view(dt_bias), view(g), view(beta))
    return g, beta


@op
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    starts: Tensor,
    read_slots: Tensor,
    write_slots: Tensor | None = None,
    *,
    scale: float | None = None,
    normalize: bool = True,
    eps: float = 1e-6,
    out: Tensor | None = None,
) -> Tensor:
    """Return scale S^T q [T, H, V], with S = exp(g) S, then S += k (beta (v - S^T k))^T for each token; S is [K, V].

    q and k [T, G, K], v [T, H, V] may be slices of packed rows; g and beta [T, H] are fp32. With `normalize` q and k
    are used as x / sqrt(sum(x^2) + eps). `scale` defaults to 1 / sqrt(K). Prefill, decode steps and drafts may be in
    one call: sequence b has tokens starts[b] to starts[b + 1] and starts from states[read_slots[b]] (states [slots, H,
    K, V] fp32; a negative slot: zeros). The state after token t is written to states[write_slots[t]], unless that is
    negative. A draft that may be rejected keeps one per token; a prompt keeps one at the end of a prefix to be cached.
    Without `write_slots` the state after the last token goes back to read_slots[b]. A slot that is written must not be
    read or written by another sequence. The integer tensors are int32.
    """
    if out is None:
        out = empty(v.shape, v.dtype)
    kernels.gated_delta_rule(
        view(q),
        view(k),
        view(v),
        view(g),
        view(beta),
        view(states),
        view(starts),
        view(read_slots),
        view_or_none(write_slots),
        view(out),
        q.shape[-1] ** -0.5 if scale is None else scale,
        normalize,
        eps,
    )
    return out
