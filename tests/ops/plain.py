"""Ops as their docstrings say them, a sequence, a row or a token at a time: what both backends must give."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional


def _visible(num_queries: int, num_keys: int, causal: bool, window: int) -> Tensor:
    """[Sq, Sk] bool: the last query stands at the last key."""
    distance = (torch.arange(num_queries)[:, None] + num_keys - num_queries) - torch.arange(num_keys)[None, :]
    visible = torch.ones(num_queries, num_keys, dtype=torch.bool)
    if causal:
        visible &= distance >= 0
    if window > 0:
        visible &= distance.abs() < window
    return visible


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: int = 0,
    soft_cap: float = 0.0,
    mask: Tensor | None = None,
) -> Tensor:
    """One sequence: q [Sq, H, K], k and v [Sk, G, K], mask [H or 1, Sq or 1, Sk]."""
    num_queries, num_heads, width = q.shape
    num_keys, group = k.shape[0], num_heads // k.shape[1]
    k, v = (t.float().repeat_interleave(group, dim=1).transpose(0, 1) for t in (k, v))
    scores = q.float().transpose(0, 1) @ k.transpose(1, 2) * (width**-0.5 if scale is None else scale)
    if soft_cap > 0:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    hidden = ~_visible(num_queries, num_keys, causal, window)
    if mask is not None and mask.dtype == torch.bool:
        hidden = hidden | ~mask
    elif mask is not None:
        scores = scores + mask.float()
    scores = scores.masked_fill(hidden, float("-inf"))
    weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)  # a query that sees nothing gives zeros
    return (weights @ v).transpose(0, 1).to(q.dtype)


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_starts: Tensor,
    key_starts: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    **options: object,
) -> Tensor:
    query_bounds = query_starts.tolist()
    key_bounds = query_bounds if key_starts is None else key_starts.tolist()
    out = torch.empty(q.shape, dtype=q.dtype)
    for b in range(len(query_bounds) - 1):
        queries, keys = slice(*query_bounds[b : b + 2]), slice(*key_bounds[b : b + 2])
        part = None
        if mask is not None:
            part = mask[b if mask.shape[0] > 1 else 0]
            part = part[:, : queries.stop - queries.start, : keys.stop - keys.start]
        out[queries] = attention(q[queries], k[keys], v[keys], mask=part, **options)  # type: ignore[arg-type]
    return out


def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    page_size: int,
    block_table: Tensor,
    query_starts: Tensor,
    kv_lengths: Tensor,
    **options: object,
) -> Tensor:
    """keys and values as KvCache.read gives them: [pages * page_size, G, K]."""
    out = torch.empty(q.shape, dtype=q.dtype)
    bounds = query_starts.tolist()
    for b, length in enumerate(kv_lengths.tolist()):
        token = torch.arange(length)
        slots = block_table[b].long()[token // page_size] * page_size + token % page_size
        queries = slice(*bounds[b : b + 2])
        out[queries] = attention(q[queries], keys[slots], values[slots], **options)  # type: ignore[arg-type]
    return out


def penalize(
    logits: Tensor,
    starts: Tensor,
    token_ids: Tensor,
    counts: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
    *,
    bias_starts: Tensor | None = None,
    bias_token_ids: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    for row in range(logits.shape[0]):
        seen = slice(int(starts[row]), int(starts[row + 1]))
        ids, count = token_ids[seen], counts[seen]
        value = logits[row, ids].float()
        value = torch.where(value > 0, value / repetition[row], value * repetition[row])
        value = torch.where(count > 0, value - (frequency[row] * count + presence[row]), value)
        logits[row, ids] = value.to(logits.dtype)
        if bias is not None and bias_starts is not None and bias_token_ids is not None:
            for i in range(int(bias_starts[row]), int(bias_starts[row + 1])):
                token = bias_token_ids[i]
                logits[row, token] = (logits[row, token].float() + bias[i]).to(logits.dtype)
    return logits


def _clean_logits(logits: Tensor) -> Tensor:
    """In fp64, NaN as -inf and +inf as the largest float."""
    largest = torch.finfo(torch.float32).max
    return logits.double().nan_to_num(nan=-torch.inf, posinf=largest, neginf=-torch.inf)


def softmax_probs(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The filtered distribution in fp64, by sorting."""
    probabilities = torch.zeros(logits.shape, dtype=torch.float64)
    for row, x in enumerate(_clean_logits(logits)):
        best = int(x.argmax())
        if temperature[row] == 0 or x[best] == -torch.inf:
            probabilities[row, best if x[best] > -torch.inf else 0] = 1
            continue
        weight = ((x - x[best]) / temperature[row].double()).exp()
        if 0 < top_k[row] < len(x):
            weight[x < x.topk(int(top_k[row])).values[-1]] = 0
        if top_p[row] < 1:
            order = x.argsort(descending=True)
            share = weight[order].cumsum(0)
            last = int((share >= top_p[row].double() * share[-1]).int().argmax())
            weight[x < x[order[last]]] = 0
        weight[weight < min_p[row].double()] = 0
        probabilities[row] = weight / weight.sum()
    return probabilities


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
