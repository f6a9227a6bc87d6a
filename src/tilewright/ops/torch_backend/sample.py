"""Turns logits into tokens: penalties, masks, sampling, log-probabilities; sampling is done in fp64, by sorting."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewright.ops.sample import LogProbs
from tilewright.ops.torch_backend.common import into, sequence_of_each


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
    row = sequence_of_each(starts, len(token_ids))
    value = logits[row, token_ids].float()
    value = torch.where(value > 0, value / repetition[row], value * repetition[row])
    value = torch.where(counts > 0, value - (frequency[row] * counts + presence[row]), value)
    logits[row, token_ids] = value.to(logits.dtype)
    if bias is not None and bias_starts is not None and bias_token_ids is not None:
        added = torch.zeros(logits.shape, device=logits.device)
        added.index_put_((sequence_of_each(bias_starts, len(bias)), bias_token_ids), bias, accumulate=True)
        logits.copy_(logits.float() + added)
    return logits


def mask(logits: Tensor, rows: Tensor, words: Tensor) -> Tensor:
    bits = words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=words.device) & 1
    is_allowed = bits.flatten(1)[:, : logits.shape[1]] == 1
    logits[rows] = logits[rows].masked_fill(~is_allowed, -torch.inf)
    return logits


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    cumulative = _distribution(logits, temperature, top_k, top_p, min_p).cumsum(1)
    return into(out, (cumulative > uniform[:, None] * cumulative[:, -1:]).int().argmax(1))


def greedy(logits: Tensor, *, out: Tensor | None = None) -> Tensor:
    return into(out, logits.float().nan_to_num(nan=-torch.inf, neginf=-torch.inf).argmax(1))


def softmax_probs(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, *, out: Tensor | None = None
) -> Tensor:
    return into(out, _distribution(logits, temperature, top_k, top_p, min_p).float())


def _distribution(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Return the distribution that tokens are drawn from, fp64 [B, V]."""
    x = _clean(logits)
    ordered, order = x.sort(dim=1, descending=True)
    best = ordered[:, :1]
    weight = ((x - best) / temperature.double()[:, None]).exp()
    vocabulary_size = x.shape[1]
    last_of_k = torch.where((top_k > 0) & (top_k < vocabulary_size), top_k, vocabulary_size) - 1
    weight = weight.masked_fill(x < ordered.gather(1, last_of_k[:, None]), 0.0)
    share = weight.gather(1, order).cumsum(1)
    last_of_p = (share >= top_p.double()[:, None] * share[:, -1:]).int().argmax(1, keepdim=True)
    weight = weight.masked_fill((top_p < 1)[:, None] & (x < ordered.gather(1, last_of_p)), 0.0)
    weight = weight.masked_fill(weight < min_p.double()[:, None], 0.0)
    # Only the largest if the temperature is 0, token 0 without any number; both have NaN as weights.
    largest = torch.where(best[:, 0] > -torch.inf, x.argmax(1), 0)
    is_one = (temperature == 0) | (best[:, 0] == -torch.inf)
    alone = torch.zeros_like(x).scatter(1, largest[:, None], 1.0)
    return torch.where(is_one[:, None], alone, weight / weight.sum(1, keepdim=True))


def log_probs(logits: Tensor, token_ids: Tensor, top_n: int) -> LogProbs:
    x = _clean(logits)
    all_log_probs = (x - x.amax(1, keepdim=True).clamp(min=-1e300)).log_softmax(1)
    all_log_probs = all_log_probs.nan_to_num(nan=-torch.inf, neginf=-torch.inf).float()
    order = x.sort(dim=1, descending=True, stable=True).indices
    rank = (order == token_ids[:, None]).int().argmax(1) + 1
    top_ids = order[:, :top_n]
    return LogProbs(all_log_probs.gather(1, token_ids[:, None])[:, 0], top_ids, all_log_probs.gather(1, top_ids), rank)


def _clean(logits: Tensor) -> Tensor:
    """Return fp64 logits with NaN as -inf and +inf as the largest float."""
    largest = torch.finfo(torch.float32).max
    return logits.double().nan_to_num(nan=-torch.inf, posinf=largest, neginf=-torch.inf)
