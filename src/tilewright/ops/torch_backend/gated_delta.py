"""Gated delta nets: splitting projections, gates, the delta rule.

T packed tokens, B sequences, G key heads of width K, H value heads of width V; value head h reads key head h // (H/G).
C tokens are a chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tilewright.ops.torch_backend.common import into, kept_states, put_rows, sequence_of_each

# A chunk has a state for each of its tokens: 32 take 64 MiB in the largest Qwen3.5 (32 heads of 128 x 128).
CHUNK_TOKENS = 32


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
    parts = qkv, z.reshape(*heads, value_width), b.reshape(heads), a.reshape(heads)
    if out is None:
        return parts
    for place, part in zip(out, parts, strict=True):
        place.copy_(part)
    return out


def delta_gates(
    a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    g = -a_log.float().exp() * functional.softplus(a.float() + dt_bias.float())
    beta = torch.sigmoid(b.float())
    return (g, beta) if out is None else (out[0].copy_(g), out[1].copy_(beta))


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
    """Compute one chunk of tokens at a time, of any number of sequences, each from its own state (`_chunk`)."""
    num_tokens = len(q)
    if not num_tokens:
        return torch.empty_like(v) if out is None else out
    if normalize:
        q, k = (x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + eps) for x in (q, k))
    q = q.float() * (q.shape[-1] ** -0.5 if scale is None else scale)
    group = v.shape[1] // k.shape[1]
    q, k = (x.float().repeat_interleave(group, dim=1) for x in (q, k))
    sequence = sequence_of_each(starts, num_tokens)
    tokens, slots = kept_states(num_tokens, starts, read_slots, write_slots)
    slot_of_token = torch.full((num_tokens,), -1, dtype=slots.dtype, device=slots.device)
    put_rows(slot_of_token, torch.where(slots >= 0, tokens, -1), slots)
    outputs = []
    last_state = torch.zeros_like(states[0])  # after the chunk before
    for begin in range(0, num_tokens, CHUNK_TOKENS):
        chunk = slice(begin, begin + CHUNK_TOKENS)
        own = sequence[chunk]
        slot = read_slots[own].long()[:, None, None, None]
        initial = torch.where(slot >= 0, states[slot.flatten().clamp(min=0)], 0.0)
        goes_on = (starts[own] < begin)[:, None, None, None]
        initial = torch.where(goes_on, last_state, initial)
        result, after = _chunk(q[chunk], k[chunk], v[chunk].float(), g[chunk], beta[chunk], initial, own)
        put_rows(states, slot_of_token[chunk], after)
        outputs.append(result)
        last_state = after[-1]
    return into(out, torch.cat(outputs).to(v.dtype))


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial: Tensor, sequence: Tensor
) -> tuple[Tensor, Tensor]:
    """Return out [C, H, V] and the state after each token [C, H, K, V], from the state each sequence began with.

    With the decay since then e_i = exp(g_1 + .. + g_i) and L_ij = beta_i (k_i . k_j) e_i / e_j below the diagonal, for
    tokens of one sequence, the values that tokens add are the solution of (I + L) U = beta (V - e K S).
    """
    is_earlier = (sequence[:, None] == sequence).tril()
    # NaN must stay in its sequence: a product with 0 would spread it to the others.
    is_bad = torch.stack([~x.flatten(1).isfinite().all(1) for x in (q, k, v, g, beta, initial)]).any(0)
    q, k, v, g, beta, initial = (
        x.masked_fill(is_bad.view(-1, *[1] * (x.dim() - 1)), 0.0) for x in (q, k, v, g, beta, initial)
    )
    # In fp64: after a strong decay an fp32 sum has no digits left for weak ones.
    since = (is_earlier.double() @ g.double()).t()  # [H, C]
    decay = since.exp().float()[:, :, None]
    between = (since[:, :, None] - since[:, None, :]).masked_fill(~is_earlier, -torch.inf).exp().float()
    q_HCK, k_HCK, v_HCV = (x.transpose(0, 1) for x in (q, k, v))
    beta_HC1 = beta.t()[:, :, None]
    lower = (beta_HC1 * (k_HCK @ k_HCK.transpose(1, 2)) * between).tril(-1)
    right = beta_HC1 * (v_HCV - decay * torch.einsum("chkv,chk->hcv", initial, k))
    added = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
    read = decay * torch.einsum("chkv,chk->hcv", initial, q) + (q_HCK @ k_HCK.transpose(1, 2) * between) @ added
    pairs = k_HCK[:, :, :, None] * added[:, :, None, :]  # [H, C, K, V]
    after = decay.transpose(0, 1)[..., None] * initial + torch.einsum("hij,hjkv->ihkv", between, pairs)
    spoiled = (is_earlier & is_bad).any(1)[:, None, None]
    return read.transpose(0, 1).masked_fill(spoiled, torch.nan), after.masked_fill(spoiled[..., None], torch.nan)
