"""Spoken sentences as tensors: sounds of one length, and what is asked about each behind one another in its row.

Workers give samples; echoes, noise and mel frames are made where the network is, for a whole batch at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.models.qwen3_omni.config import AudioConfig
from tilewright.ops.media import HOP, MIN_SAMPLES, SAMPLE_RATE, WINDOW, mel_filters
from training.tiny_omni.checkpoint import AUDIO, NUM_MEL_BINS
from training.tiny_omni.room import worn
from training.tiny_omni.speech import random_voice, speak
from training.tiny_omni.utterances import Utterance, spoken_words, utterances
from training.tiny_vl.batches import Encoder, Row
from training.tiny_vl.lesson import Ask, casual

MAX_SECONDS = 7.6  # one window of attention is 8 s
SILENCE_S = (0.04, 0.6)  # around the longest sound of a batch; the others have more
SYSTEM_PROMPTS = ("You are a helpful assistant.", "Answer briefly.", "Be concise.")
PREFIX = 0  # the segment of the sound; what is asked counts from 1
# A sentence is used about so many times, from a store of the latest ones: with other echoes, noise and prompts.
REUSED, STORED = 4, 3000
# The first groups of each worker have short sentences alone, by which the tower finds out what it is to listen to.
NUM_EASY_GROUPS, EASY_WORDS = 6, 3
_SOUND = AudioConfig.from_dict(AUDIO)


@dataclass(frozen=True)
class Take:
    """A sentence as somebody said it: int16 samples without silence around them."""

    utterance: Utterance
    samples: np.ndarray


@dataclass
class Batch:
    samples: Tensor  # int16 (batch, samples)
    ids: Tensor  # (batch, length)
    targets: Tensor  # (batch, length): the token that comes next, NO_TARGET where nobody asks
    positions: Tensor  # (batch, length)
    segments: Tensor  # (batch, length)
    words: Tensor  # (batch, most words): ranks among the spoken words from 1 on, 0 behind the last
    num_words: Tensor  # (batch)
    start: int  # of the features in each row
    kinds: list[list[str]]  # of what is asked, by row

    def to(self, device: str) -> Batch:
        return self._with(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        return self._with(Tensor.pin_memory)

    def _with(self, change: Callable[[Tensor], Tensor]) -> Batch:
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        values |= {name: change(value) for name, value in values.items() if isinstance(value, Tensor)}
        return Batch(**values)


def takes(rng: Random, set_name: str, most_words: int | None = None) -> Iterator[Take]:
    """Sentences and speakers of one set, without end."""
    for utterance in utterances(rng, set_name):
        if most_words is not None and utterance.text.count(" ") >= most_words:
            continue
        samples = speak(utterance.text, random_voice(rng, set_name))
        if len(samples) < MAX_SECONDS * SAMPLE_RATE:
            loudest = max(float(np.abs(samples).max()), 1e-4)
            yield Take(utterance, (samples * (30_000 / loudest)).astype(np.int16))


def prefix(encoder: Encoder, num_features: int, system: str | None) -> tuple[list[int], int]:
    """A conversation up to the end of a sound, and where its features begin."""
    told = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
    before = encoder.ids_of(f"{told}<|im_start|>user\n<|audio_start|>")
    pads = encoder.ids_of("<|audio_pad|>") * num_features
    return [*before, *pads, *encoder.ids_of("<|audio_end|>")], len(before)


def collate(rng: Random, encoder: Encoder, group: list[Take], spare_s: float, *, is_casual: bool = True) -> Batch:
    """The takes with silence around them, `spare_s` of it around the longest one, shared out at random."""
    longest = max(len(take.samples) for take in group)
    num_frames = -(-max(longest + int(spare_s * SAMPLE_RATE), MIN_SAMPLES) // HOP)
    samples = np.zeros((len(group), num_frames * HOP), np.int16)
    system = rng.choice(SYSTEM_PROMPTS) if is_casual and rng.random() < 0.1 else None
    opening, start = prefix(encoder, _SOUND.num_features(num_frames), system)
    rows, kinds = [], []
    for index, take in enumerate(group):
        begin = rng.randint(0, samples.shape[1] - len(take.samples))
        samples[index, begin : begin + len(take.samples)] = take.samples
        asks = take.utterance.asks(rng)
        rows.append(_row(rng, encoder, opening, asks, is_casual))
        kinds.append([ask.kind for ask in asks])
    length = max(len(row.ids) for row in rows)
    for row in rows:
        row.length = -(-length // 8) * 8  # attention with a mask is faster for such lengths
    ids, targets, positions, segments = (
        torch.from_numpy(np.stack(column)) for column in zip(*(row.arrays() for row in rows), strict=True)
    )
    words, num_words = _words_of(group)
    return Batch(
        torch.from_numpy(samples), ids, targets, positions[:, 0].contiguous(), segments, words, num_words, start, kinds
    )


def _row(rng: Random, encoder: Encoder, opening: list[int], asks: list[Ask], is_casual: bool) -> Row:
    row = Row(0)
    row.add(opening, _count_up(0, len(opening)), PREFIX, None)
    for segment, ask in enumerate(asks, 1):
        question = casual(rng, ask.question) if is_casual and ask.question else ask.question
        ids, answer_from = encoder.turn(Ask(ask.kind, question, ask.answer))
        row.add(ids, _count_up(len(opening), len(ids)), segment, answer_from)
    return row


def _count_up(first: int, count: int) -> np.ndarray:
    return np.tile(np.arange(first, first + count), (3, 1))


@cache
def _ranks() -> dict[str, int]:
    return {word: rank for rank, word in enumerate(spoken_words(), 1)}


def _words_of(group: list[Take]) -> tuple[Tensor, Tensor]:
    ranks = _ranks()
    spoken = [[ranks[word] for word in take.utterance.text.split()] for take in group]
    most = max(map(len, spoken))
    padded = torch.tensor([words + [0] * (most - len(words)) for words in spoken])
    return padded, torch.tensor([len(words) for words in spoken])


class Sentences(torch.utils.data.IterableDataset):
    """Batches without end; each worker speaks from seeds of its own."""

    def __init__(self, tokenizer_file: Path, batch_size: int, seed: int) -> None:
        self._tokenizer_file, self._batch_size, self._seed = tokenizer_file, batch_size, seed

    def __iter__(self) -> Iterator[Batch]:
        worker = torch.utils.data.get_worker_info()
        rng = Random(self._seed * 1000 + (worker.id if worker else 0))
        encoder = Encoder(self._tokenizer_file)
        easy, all_of_them = takes(rng, "training", EASY_WORDS), takes(rng, "training")
        store: deque[Take] = deque(maxlen=STORED)
        group = 0
        while True:
            source = easy if group < NUM_EASY_GROUPS else all_of_them
            store.extend(next(source) for _ in range(self._batch_size))
            group += 1
            yield from self._batches(rng, encoder, store)

    def _batches(self, rng: Random, encoder: Encoder, store: deque[Take]) -> Iterator[Batch]:
        """REUSED ones, each of sounds that last about equally long."""
        drawn = sorted(rng.choices(store, k=REUSED * self._batch_size), key=lambda take: len(take.samples))
        starts = list(range(0, len(drawn), self._batch_size))
        rng.shuffle(starts)
        for start in starts:
            # Not always the same share of a second is left over, and the shortest sounds are shorter than a chunk.
            part = drawn[start : start + self._batch_size]
            most = min(SILENCE_S[1], 7.9 - len(part[-1].samples) / SAMPLE_RATE)
            yield collate(rng, encoder, part, rng.uniform(SILENCE_S[0], most))


def features_of(samples_BN: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Mel frames (batch, frames, bins) of int16 samples, which are first worn where there is a generator."""
    x = samples_BN.float() / 32768
    return log_mels(x if generator is None else worn(x, generator), NUM_MEL_BINS)


def log_mels(samples_BN: Tensor, num_bins: int) -> Tensor:
    """What `tilewright.ops.media.log_mel` gives for each row."""
    half = WINDOW // 2
    mirrored = F.pad(samples_BN[:, None], (half, half), mode="reflect")[:, 0]
    frames = mirrored.unfold(1, WINDOW, HOP)[:, : samples_BN.shape[1] // HOP]
    spectrum = torch.fft.rfft(frames * torch.hann_window(WINDOW, device=frames.device))
    power = spectrum.real.square() + spectrum.imag.square()
    logs = (power @ mel_filters(num_bins).to(frames.device).T).clamp(min=1e-10).log10()
    return (torch.maximum(logs, logs.amax((1, 2), keepdim=True) - 8.0) + 4.0) / 4.0
