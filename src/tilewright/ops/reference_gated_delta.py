"""Gated delta nets in plain torch, as ops.reference has the other ops.

T packed tokens, B sequences, G key heads of width K, H value heads of width V; value head h reads key head h // (H/G).
A sequence's state is read from its slot of a pool (a negative slot: zeros), and the state after a token is written to
the slot that `write_slots` [T] gives it (negative: not kept). Without write_slots the state after the last token
goes back to where it was read.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

CHUNK_TOKENS = 64


def split_projections(
    qkvz: Tensor, ba: Tensor, key_heads: int, value_heads: int, key_width: int, value_width: int, *, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q|k|v [T, 2GK + HV], z [T, H, V], b and a [T, H]."""
    num_tokens, group = qkvz.shape[0], value_heads // key_heads
    if interleaved:
        widths = [key_width, key_width, group * value_width, group * value_width]
        q, k, v, z = qkvz.reshape(num_tokens, key_heads, sum(widths)).split(widths, dim=-1)
        b, a = ba.reshape(num_tokens, key_heads, 2 * group).split(group, dim=-1)
    else:
        keys, values = key_heads * key_width, value_heads * value_width
        q, k, v, z = qkvz.split([keys, keys, values, values], dim=-1)
        b, a = ba.split(value_heads, dim=-1)
    qkv = torch.cat([part.flatten(1) for part in (q, k, v)], dim=-1)
    heads = (num_tokens, value_heads)
    return qkv, z.reshape(*heads, value_width), b.reshape(heads), a.reshape(heads)


def gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """g = -exp(A_log) softplus(a + dt_bias), the logarithm of the decay, and beta = sigmoid(b), in fp32."""
    g = -a_log.float().exp() * functional.softplus(a.float() + dt_bias.float())
    return g, torch.sigmoid(b.float())


def causal_conv(
    x: Tensor,
    weight: Tensor,
    states: Tensor,
    starts: Tensor,
    read_slots: Tensor,
    write_slots: Tensor | None = None,
    *,
    bias: Tensor | None = None,
) -> Tensor:
    """silu(bias + sum_i weight[i] x[t - W + 1 + i]) of x [T, C]; weight [W, C], states [slots, W - 1, C]."""
    y = torch.empty_like(x)
    kept = []
    for begin, end, slot in _sequences(starts, read_slots):
        past = states[slot].float() if slot >= 0 else torch.zeros(states.shape[1:])
        rows = torch.cat([past, x[begin:end].float()])
        windows = rows.unfold(0, weight.shape[0], 1)  # [tokens, C, W]
        total = (windows * weight.float().t()).sum(-1) + (0 if bias is None else bias.float())
        y[begin:end] = functional.silu(total).to(x.dtype)
        kept += [
            (slot, rows[token + 1 - begin : token + weight.shape[0] - begin])
            for token, slot in _kept(begin, end, slot, write_slots)
        ]
    for slot, rows in kept:
        states[slot] = rows.to(states.dtype)
    return y


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
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The recurrence, token by token: S = exp(g) S; S += k (beta (v - S^T k))^T; out = scale S^T q."""
    out = torch.empty(v.shape, dtype=compute_dtype)
    kept = []
    for begin, end, slot in _sequences(starts, read_slots):
        state = states[slot].to(compute_dtype) if slot >= 0 else torch.zeros(states.shape[1:], dtype=compute_dtype)
        inputs = _heads(q[begin:end], k[begin:end], v[begin:end], scale, normalize, compute_dtype)
        slots = dict(_kept(begin, end, slot, write_slots))
        for token, (q_t, k_t, v_t) in enumerate(zip(*inputs, strict=True), begin):
            state = state * g[token].to(compute_dtype).exp()[:, None, None]
            delta = (v_t - torch.einsum("hkv,hk->hv", state, k_t)) * beta[token].to(compute_dtype)[:, None]
            state = state + k_t[:, :, None] * delta[:, None, :]
            out[token] = torch.einsum("hkv,hk->hv", state, q_t)
            if token in slots:
                kept.append((slots[token], state))
    for slot, state in kept:
        states[slot] = state.to(states.dtype)
    return out.to(q.dtype if compute_dtype == torch.float32 else compute_dtype)


def gated_delta_rule_chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, *, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """The same for one sequence, out and the state after it, CHUNK_TOKENS tokens at a time.

    With the decay since the chunk began e_i = exp(g_1 + .. + g_i) and L_ij = beta_i (k_i . k_j) e_i / e_j below the
    diagonal, the values that a chunk adds are the solution of (I + L) U = beta (V - e K S).
    """
    q_t, k_t, v_t = (x.transpose(0, 1) for x in _heads(q, k, v, scale, True, torch.float32))
    g_t, beta_t = g.float().t(), beta.float().t()[:, :, None]
    outputs = []
    for chunk in torch.arange(q.shape[0]).split(CHUNK_TOKENS):
        q_c, k_c, v_c = (x[:, chunk] for x in (q_t, k_t, v_t))
        since = g_t[:, chunk].cumsum(-1)
        decay = since.exp()[:, :, None]
        between = (since[:, :, None] - since[:, None, :]).tril().exp().tril()
        lower = ((beta_t[:, chunk] * k_c) @ k_c.transpose(1, 2) * between).tril(-1)
        right = beta_t[:, chunk] * (v_c - decay * (k_c @ state))
        added = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
        outputs.append(decay * (q_c @ state) + (q_c @ k_c.transpose(1, 2) * between) @ added)
        left = (since[:, -1:] - since).exp()[:, :, None] * k_c
        state = state * decay[:, -1:] + left.transpose(1, 2) @ added
    return torch.cat(outputs, dim=1).transpose(0, 1).to(q.dtype), state


def _heads(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, normalize: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """q and k of each value head, of length 1 and q scaled, and v."""
    q, k, v = (x.to(dtype) for x in (q, k, v))
    if normalize:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    group = v.shape[1] // k.shape[1]
    return q.repeat_interleave(group, dim=1), k.repeat_interleave(group, dim=1), v


def _sequences(starts: Tensor, read_slots: Tensor) -> Iterator[tuple[int, int, int]]:
    """First token, token after the last one, and slot of each sequence that has tokens."""
    bounds = starts.tolist()
    for begin, end, slot in zip(bounds[:-1], bounds[1:], read_slots.tolist(), strict=True):
        if begin < end:
            yield begin, end, slot


def _kept(begin: int, end: int, slot: int, write_slots: Tensor | None) -> list[tuple[int, int]]:
    """The tokens of a sequence whose states are kept, and the slots they go to."""
    slots = [(end - 1, slot)] if write_slots is None else list(enumerate(write_slots[begin:end].tolist(), begin))
    return [(token, slot) for token, slot in slots if slot >= 0]
