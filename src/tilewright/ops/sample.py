"""Turns logits into tokens: penalties, masks, sampling, log-probabilities; kernels in csrc/kernels/sample.

Logits are fp32 or bf16 [B, V]. NaN is read as -inf, +inf as the largest float. No result depends on the number of
threads or on the other rows.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.ops.backend import op
from tilewright.ops.native import kernels, view, view_or_none


class LogProbs(NamedTuple):
    """Log-probabilities of given tokens and of the likeliest ones."""

    token: Tensor  # [B] fp32
    top_ids: Tensor  # [B, n] int64, best first, the lower index first among equals
    top: Tensor  # [B, n] fp32
    rank: Tensor  # [B] int64, 1 for the best


@op
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
    """Apply penalties and biases to the logits in place, and return them.

    Row b has seen token_ids[starts[b]:starts[b + 1]], each listed once, `counts` times in its output (0: only in the
    prompt). Every one of them is divided by repetition[b] if positive, else multiplied; those of the output lose
    frequency[b] * count + presence[b]. Then the row's biases are added. starts and ids int64, counts int32, the rest
    fp32 [B]; 1, 0, 0 change nothing.
    """
    kernels.penalize(
        view(logits),
        view(starts),
        view(token_ids),
        view(counts),
        view(repetition),
        view(presence),
        view(frequency),
        view_or_none(bias_starts),
        view_or_none(bias_token_ids),
        view_or_none(bias),
    )
    return logits


@op
def mask(logits: Tensor, rows: Tensor, words: Tensor) -> Tensor:
    """Set fp32 logits in place to -inf for the tokens that words forbid in the given rows (int64 [R], each once).

    words are int32 [R, W] with a bit for each token, W * 32 of them at least V: token i is allowed in row rows[r] if
    bit i % 32 of words[r, i // 32] is 1.
    """
    kernels.mask(view(logits), view(rows), view(words))
    return logits


@op
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
    """Return one token id per row, int64 [B], drawn with the number uniform[b] in [0, 1) (fp64).

    Of logits / temperature, top_k keeps the k largest (int64; 0: all), top_p the fewest largest with a share of p of
    those (fp32; 1: all), min_p those with min_p of the largest probability (fp32; 0: all); ties at a limit are kept.
    The token is the first in the vocabulary where the kept mass so far exceeds uniform * all of it. Temperature 0 is
    greedy, with the lowest index among equals. A row of only -inf or NaN gives 0.
    """
    if out is None:
        out = torch.empty(logits.shape[:1], dtype=torch.int64)
    kernels.sample(view(logits), view(temperature), view(top_k), view(top_p), view(min_p), view(uniform), view(out))
    return out


@op
def greedy(logits: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return the largest of each row, int64 [B], the lowest index among equals: `sample` at temperature 0."""
    zeros, ones = torch.zeros(len(logits)), torch.ones(len(logits))
    return sample(logits, zeros, zeros.long(), ones, zeros, zeros.double(), out=out)


@op
def softmax_probs(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, *, out: Tensor | None = None
) -> Tensor:
    """Return the distribution that `sample` draws from, fp32 [B, V]."""
    if out is None:
        out = torch.empty(logits.shape, dtype=torch.float32)
    kernels.softmax_probs(view(logits), view(temperature), view(top_k), view(top_p), view(min_p), view(out))
    return out


@op
def log_probs(logits: Tensor, token_ids: Tensor, top_n: int) -> LogProbs:
    """Return the log softmax of raw logits at token_ids [B] and at each row's top_n best, and the tokens' ranks."""
    rows = logits.shape[0]
    result = LogProbs(
        torch.empty(rows),
        torch.empty(rows, top_n, dtype=torch.int64),
        torch.empty(rows, top_n),
        torch.empty(rows, dtype=torch.int64),
    )
    kernels.log_probs(
        view(logits), view(token_ids), view(result.token), view(result.rank), view(result.top_ids), view(result.top)
    )
    return result
