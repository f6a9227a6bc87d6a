"""Samples the tokens of a step from its logits: penalties, grammar masks, temperature, log-probabilities."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Sequence as Items
from collections.abc import Sequence as SequenceOf
from hashlib import blake2b
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from tilewright.engine.constraint.matcher import Matcher
from tilewright.engine.draft.drafter import num_accepted_drafts
from tilewright.engine.media.transfer import Uploads
from tilewright.engine.schedule.sequence import Sequence
from tilewright.engine.schedule.step import NO_TOKEN, Chunk, Sampled, Step, last_rows
from tilewright.ops import backend
from tilewright.ops import sample as ops
from tilewright.types import SamplingParams, TokenLogprob


class TokenCounts:
    """Distinct tokens of a sequence and their counts in its output, updated as it grows.

    Arrays beside a dict, so that a step passes a slice instead of walking all tokens. Tokens without logits
    (placeholders of media, in some models) are left out.
    """

    def __init__(self, sequence: Sequence, vocabulary_size: int) -> None:
        self._vocabulary_size = vocabulary_size
        self._slot_by_id: dict[int, int] = {}
        self._ids = np.empty(256, np.int64)
        self._counts = np.empty(256, np.int32)
        # Only the repetition penalty counts the prompt.
        if sequence.params.repetition_penalty != 1.0:
            for token_id in dict.fromkeys(sequence.token_ids[: sequence.num_prompt_tokens]):
                self._count(token_id, 0)
        self._num_read = sequence.num_prompt_tokens

    def rows(self, sequence: Sequence, draft_token_ids: Items[int]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the token ids and counts for the sequence's next token, then for the one after each draft."""
        for token_id in sequence.token_ids[self._num_read :]:
            self._count(token_id, 1)
        self._num_read = sequence.num_tokens
        size = len(self._slot_by_id)
        rows = [(self._ids[:size], self._counts[:size])]
        for token_id in draft_token_ids:
            ids, counts = rows[-1]
            if token_id < self._vocabulary_size:
                found = np.flatnonzero(ids == token_id)
                counts = counts.copy()
                if found.size:
                    counts[found] += 1
                else:
                    ids, counts = np.append(ids, np.int64(token_id)), np.append(counts, np.int32(1))
            rows.append((ids, counts))
        return rows

    def _count(self, token_id: int, count: int) -> None:
        if token_id >= self._vocabulary_size:
            return
        slot = self._slot_by_id.get(token_id)
        if slot is None:
            slot = self._slot_by_id[token_id] = len(self._slot_by_id)
            if slot == len(self._ids):
                self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.empty_like(self._counts)])
            self._ids[slot], self._counts[slot] = token_id, 0
        self._counts[slot] += count


class Masks:
    """Grammar masks of a step's rows.

    Their memory is reused: all weights have just gone through the caches, and allocating three small arrays takes
    longer than a mask. They are computed on the thread that steps, though they are known before the logits: a thread
    beside the model made steps 1 to 2 % longer still, since kernels keep every core busy and wait for the one that is
    shared.
    """

    def __init__(self, uploads: Uploads) -> None:
        self._uploads = uploads
        self._words = torch.empty(0, 0, dtype=torch.int32)
        self._rows = torch.empty(0, dtype=torch.int64)

    def apply(self, logits: Tensor, chunks: Items[Chunk]) -> None:
        """Set the logits of forbidden tokens to -inf in the sampled rows, chunk after chunk."""
        constrained: list[tuple[Matcher, Chunk]] = []
        rows: list[int] = []
        num_rows = 0
        for chunk in chunks:
            matcher = chunk.sequence.matcher
            if matcher is not None:
                constrained.append((matcher, chunk))
                rows.extend(range(num_rows, num_rows + chunk.num_sampled))
            num_rows += chunk.num_sampled
        if not rows:
            return
        self._reserve(len(rows), constrained[0][0].num_words)
        first = 0
        for matcher, chunk in constrained:
            suppressed = [chunk.sequence.suppressed_token_ids(draft) for draft in range(chunk.num_sampled)]
            matcher.fill(self._words, first, chunk.draft_token_ids, suppressed)
            first += chunk.num_sampled
        self._rows.numpy()[:first] = rows
        ops.mask(logits, *self._uploads.send(self._rows[:first], self._words[:first]))

    def _reserve(self, num_rows: int, num_words: int) -> None:
        if self._words.shape[0] < num_rows:
            self._words = torch.empty(2 * num_rows, num_words, dtype=torch.int32)
            self._rows = torch.empty(2 * num_rows, dtype=torch.int64)


class _Rows(NamedTuple):
    """Buffers to draw from a number of rows, allocated once: making small tensors costs more than an argmax."""

    greedy: tuple[Tensor, ...]
    tokens: Tensor  # int64
    token_array: np.ndarray  # the same memory
    numbers: np.ndarray  # 0, 1, ...

    @classmethod
    def make(cls, count: int) -> _Rows:
        tokens = torch.empty(count, dtype=torch.int64)
        return cls(greedy_parameters(count), tokens, tokens.numpy(), np.arange(count))


class Sampler:
    """Draws the next tokens. A sequence's draw depends only on its own logits, seed and position."""

    def __init__(self) -> None:
        self._occurrences: WeakKeyDictionary[Sequence, TokenCounts] = WeakKeyDictionary()
        self._device = backend.place()  # where logits are and tokens are drawn
        self._uploads = Uploads(self._device)
        self._masks = Masks(self._uploads)
        self._rows: dict[int, _Rows] = {}  # by number of rows
        # Of the last step: usually the same sequences draw in the next one.
        self._params_of_rows: list[SamplingParams] = []
        self._parameters_of_rows: tuple[Tensor, ...] = ()

    @torch.inference_mode()
    def sample(self, logits: Tensor, step: Step) -> list[Sampled]:
        """Return one result per chunk from its rows of logits, fp32 [step.num_logits, V]. May overwrite the logits."""
        chunks = step.chunks
        if not logits.shape[0]:
            return [Sampled() for _ in chunks]
        self._uploads.begin()
        keep_raw = any(chunk.num_prompt_rows or chunk.sequence.params.logprobs is not None for chunk in chunks)
        if keep_raw:
            self._show_prompts(logits, chunks)
        drawn = self._sample_tokens(logits, chunks, keep_raw)
        token_ids: list[list[int]] = []
        first = 0
        for chunk in chunks:
            rows = drawn[first : first + chunk.num_sampled]
            first += chunk.num_sampled
            if chunk.num_drafts:
                del rows[1 + num_accepted_drafts(chunk.draft_token_ids, rows) :]
            token_ids.append(rows)
        if not keep_raw:
            return [Sampled(ids) for ids in token_ids]
        return self._with_logprobs(logits, chunks, token_ids)

    def _show_prompts(self, logits: Tensor, chunks: list[Chunk]) -> None:
        first = 0
        for chunk in chunks:
            reader = chunk.sequence.prompt_reader
            if reader is not None and chunk.num_prompt_rows:
                rows = logits[first : first + chunk.num_prompt_rows]
                reader(_first_target(chunk), self._device.fetch(rows))
            first += chunk.num_logits

    def _sample_tokens(self, logits: Tensor, chunks: list[Chunk], keep_raw: bool) -> list[int]:
        """Return a token for every sampled row, chunk after chunk; NO_TOKEN for a row of NaN."""
        sampled = [chunk for chunk in chunks if chunk.num_sampled]
        num_rows = sum(chunk.num_sampled for chunk in sampled)
        if not num_rows:
            return []
        if num_rows < logits.shape[0]:
            picked = last_rows((chunk.num_logits for chunk in chunks), (chunk.num_sampled for chunk in chunks))
            (places,) = self._uploads.send(torch.tensor(picked))
            logits = logits[places]
            keep_raw = False  # a copy already
        is_adjusted = any(_is_adjusted(chunk.sequence) for chunk in sampled)
        is_constrained = any(chunk.sequence.matcher is not None for chunk in sampled)
        if keep_raw and (is_adjusted or is_constrained):
            logits = logits.clone()
        if is_adjusted:
            self._adjust(logits, sampled)
        if is_constrained:
            self._masks.apply(logits, sampled)  # last, so that a bias cannot re-enable a token
        if not self._device.is_host:
            return self._sample_on_device(logits, sampled)
        if num_rows not in self._rows:
            self._rows[num_rows] = _Rows.make(num_rows)
        rows = self._rows[num_rows]
        ops.sample(logits, *self._parameters(sampled, rows), out=rows.tokens)
        # One NaN weight turns whole rows into NaN: the kernel's token is then no choice of the model's.
        is_chosen = logits.numpy()[rows.numbers, rows.token_array] > -math.inf
        result: list[int] = (
            rows.token_array if is_chosen.all() else np.where(is_chosen, rows.token_array, NO_TOKEN)
        ).tolist()
        return result

    def _sample_on_device(self, logits: Tensor, sampled: list[Chunk]) -> list[int]:
        """Draw like `_sample_tokens` on a device, and fetch the tokens in one copy."""
        if all(chunk.sequence.params.temperature == 0 for chunk in sampled):
            tokens = ops.greedy(logits)
        else:
            tokens = ops.sample(logits, *self._uploads.send(*self._sampling_arguments(sampled)))
        is_chosen = logits.gather(1, tokens[:, None])[:, 0] > -math.inf
        result: list[int] = self._device.fetch(torch.where(is_chosen, tokens, NO_TOKEN)).tolist()
        return result

    def _parameters(self, chunks: list[Chunk], rows: _Rows) -> tuple[Tensor, ...]:
        """Return the arguments of `ops.sample` besides logits, cached for greedy rows."""
        if all(chunk.sequence.params.temperature == 0 for chunk in chunks):
            return rows.greedy
        return self._sampling_arguments(chunks)

    def _sampling_arguments(self, chunks: list[Chunk]) -> tuple[Tensor, ...]:
        params = [chunk.sequence.params for chunk in chunks for _ in range(chunk.num_sampled)]
        if params != self._params_of_rows:
            self._params_of_rows, self._parameters_of_rows = params, _parameters(params)
        return *self._parameters_of_rows, torch.tensor(_uniforms(chunks), dtype=torch.float64)

    def _adjust(self, logits: Tensor, chunks: list[Chunk]) -> None:
        """Apply penalties, biases and the bans of min_tokens to the logits."""
        vocabulary_size = logits.shape[1]
        nothing = (np.empty(0, np.int64), np.empty(0, np.int32))
        seen: list[tuple[np.ndarray, np.ndarray]] = []
        biases: list[dict[int, float]] = []
        for chunk in chunks:
            sequence, params = chunk.sequence, chunk.sequence.params
            if _is_penalized(params):
                if sequence not in self._occurrences:
                    self._occurrences[sequence] = TokenCounts(sequence, vocabulary_size)
                seen += self._occurrences[sequence].rows(sequence, chunk.draft_token_ids)
            else:
                seen += [nothing] * chunk.num_sampled
            for draft in range(chunk.num_sampled):
                bias = {token_id: bias for token_id, bias in params.logit_bias.items() if token_id < vocabulary_size}
                if sequence.matcher is None:  # a grammar's mask excludes them where it can
                    suppressed = sequence.suppressed_token_ids(draft)
                    bias.update((item, -math.inf) for item in suppressed if item < vocabulary_size)
                biases.append(bias)
        params_of_rows = [chunk.sequence.params for chunk in chunks for _ in range(chunk.num_sampled)]
        *penalties, bias_starts, bias_token_ids, bias_values = self._uploads.send(
            _starts([len(ids) for ids, _ in seen]),
            torch.from_numpy(np.concatenate([ids for ids, _ in seen])),
            torch.from_numpy(np.concatenate([counts for _, counts in seen])),
            torch.tensor([params.repetition_penalty for params in params_of_rows]),
            torch.tensor([params.presence_penalty for params in params_of_rows]),
            torch.tensor([params.frequency_penalty for params in params_of_rows]),
            _starts([len(bias) for bias in biases]),
            torch.tensor([item for bias in biases for item in bias], dtype=torch.int64),
            torch.tensor([item for bias in biases for item in bias.values()], dtype=torch.float32),
        )
        ops.penalize(logits, *penalties, bias_starts=bias_starts, bias_token_ids=bias_token_ids, bias=bias_values)

    def _with_logprobs(self, logits: Tensor, chunks: list[Chunk], token_ids: list[list[int]]) -> list[Sampled]:
        """Return the chunks' tokens with the log-probabilities they ask for, of the raw logits, by one kernel call."""
        rows: list[int] = []
        targets: list[int] = []
        num_top: list[int] = []
        first = 0
        for chunk, drawn in zip(chunks, token_ids, strict=True):
            sequence, params = chunk.sequence, chunk.sequence.params
            num_prompt_rows, num_logits = chunk.num_prompt_rows, chunk.num_logits
            if num_prompt_rows:
                rows.extend(range(first, first + num_prompt_rows))
                next_token = _first_target(chunk)
                targets.extend(sequence.token_ids[next_token : next_token + num_prompt_rows])
                num_top.extend([params.prompt_logprobs or 0] * num_prompt_rows)
            if params.logprobs is not None:
                rows.extend(range(first + num_prompt_rows, first + num_prompt_rows + len(drawn)))
                targets.extend(drawn)
                num_top.extend([params.logprobs] * len(drawn))
            first += num_logits
        found = iter(self._log_probs(logits, rows, targets, num_top))
        return [
            Sampled(
                drawn,
                prompt_logprobs=list(itertools.islice(found, chunk.num_prompt_rows)),
                logprobs=list(itertools.islice(found, len(drawn) if chunk.sequence.params.logprobs is not None else 0)),
            )
            for chunk, drawn in zip(chunks, token_ids, strict=True)
        ]

    def _log_probs(self, logits: Tensor, rows: list[int], targets: list[int], num_top: list[int]) -> list[TokenLogprob]:
        """Return the log-probability of targets[i] in row rows[i], with the num_top[i] best tokens."""
        if not rows:
            return []
        vocabulary_size = logits.shape[1]
        # A placeholder may lie past the head's last row: it is never drawn, and the kernel has no column for it.
        clamped = torch.tensor(targets).clamp_(0, vocabulary_size - 1)
        if len(rows) == logits.shape[0]:
            picked, (wanted,) = logits, self._uploads.send(clamped)
        else:
            places, wanted = self._uploads.send(torch.tensor(rows), clamped)
            picked = logits[places]
        found = ops.log_probs(picked, wanted, min(max(num_top), vocabulary_size))
        values = zip(targets, num_top, *(self._device.fetch(tensor).tolist() for tensor in found), strict=True)
        return [
            TokenLogprob(target, token, rank, tuple(zip(top_ids[:count], top[:count], strict=True)))
            if target < vocabulary_size
            else TokenLogprob(target, -math.inf, vocabulary_size, tuple(zip(top_ids[:count], top[:count], strict=True)))
            for target, count, token, top_ids, top, rank in values
        ]


def uniform(sequence: Sequence, position: int) -> float:
    """Return the random number in [0, 1) that draws the token at `position` of a sequence.

    A hash of seed, answer and position instead of a stateful generator, so that preemption, batching and drafts change
    nothing.
    """
    return uniform_at(sequence.seed, sequence.index, position)


def uniform_at(seed: int, index: int, position: int) -> float:
    """Return the random number of a seed at a position of one of its series."""
    counter = struct.pack("<QQQ", seed & 0xFFFF_FFFF_FFFF_FFFF, index, position)
    return (int.from_bytes(blake2b(counter, digest_size=8).digest(), "little") >> 11) * 2.0**-53


def greedy_parameters(num_rows: int) -> tuple[Tensor, ...]:
    """Return the arguments of `ops.sample` for rows of temperature 0."""
    return (*_parameters([SamplingParams(temperature=0.0)] * num_rows), torch.zeros(num_rows, dtype=torch.float64))


def _uniforms(chunks: list[Chunk]) -> list[float]:
    return [
        uniform(chunk.sequence, chunk.sequence.num_tokens + draft)
        for chunk in chunks
        for draft in range(chunk.num_sampled)
    ]


def _parameters(params: list[SamplingParams]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        torch.tensor([item.temperature for item in params]),
        torch.tensor([item.top_k for item in params]),
        torch.tensor([item.top_p for item in params]),
        torch.tensor([item.min_p for item in params]),
    )


def _starts(lengths: SequenceOf[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)])


def _is_penalized(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def _is_adjusted(sequence: Sequence) -> bool:
    params = sequence.params
    is_kept_from_stopping = sequence.matcher is None and bool(sequence.suppressed_token_ids())
    return bool(params.logit_bias) or is_kept_from_stopping or _is_penalized(params)


def _first_target(chunk: Chunk) -> int:
    """Return the index of the prompt token that the chunk's first prompt row predicts."""
    return chunk.stop - chunk.num_sampled - chunk.num_prompt_rows + 1
