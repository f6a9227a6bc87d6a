"""Chooses which voices go on: between two steps of text each speaks one frame at most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewright.engine.kv.pages import PagePool
from tilewright.engine.speech.runner import Rows, SpeechRunner
from tilewright.engine.speech.voice import Voice
from tilewright.types import ContextLengthExceeded

# Rows of prompts that one step computes, and frames that it makes samples of: what text waits for.
MAX_PROMPT_ROWS = 256
FRAMES_PER_PIECE = 4

Piece = tuple[Any, list[list[int]]]  # a stream, and its next frames


@dataclass(frozen=True)
class Spoken:
    """What a step added to a voice. It is done when all its samples are there, or when it failed."""

    voice: Voice
    samples: Tensor  # fp32 [n]
    is_done: bool
    error: Exception | None = None  # why it failed


@dataclass(eq=False)
class _Speaking:
    """A voice that has pages, and how far its samples are."""

    voice: Voice
    stream: Any  # what its samples are made with, piece by piece
    num_decoded: int = 0

    @property
    def num_pending(self) -> int:
        return len(self.voice.frames) - self.num_decoded


class SpeechScheduler:
    """The voices that wait and those that speak, both in order of arrival.

    A voice is admitted when there are pages for all the rows it may ever have, so that none has to stop half-way; until
    then it waits, while its text goes on.
    """

    def __init__(self, runner: SpeechRunner) -> None:
        self.runner = runner
        self.pool = PagePool(runner.num_pages, runner.page_size)
        self.waiting: list[Voice] = []
        self._speaking: list[_Speaking] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self._speaking)

    @property
    def num_speaking(self) -> int:
        return len(self._speaking)

    def check(self, voice: Voice) -> None:
        """ContextLengthExceeded for one that could never be admitted."""
        if voice.num_max_rows > self.pool.num_tokens:
            raise ContextLengthExceeded(
                max(self.pool.num_tokens - voice.params.max_frames, 0),
                f"the answer is to be spoken, and your prompt resulted in {voice.prompt.num_rows} rows for the talker",
            )

    def add(self, voice: Voice) -> None:
        self.check(voice)
        self.waiting.append(voice)

    def drop(self, voice: Voice) -> None:
        """Forgets a voice and frees what it holds."""
        voice.is_finished = voice.is_released = True
        if voice in self.waiting:
            self.waiting.remove(voice)
        for item in self._speaking:
            if item.voice is voice:
                self._release(item)
                return

    def step(self) -> list[Spoken]:
        """Each voice speaks its next frame, if its text is known, and gives samples if there are enough frames.

        Voices are computed together. Where that raises, each is computed by itself, with the same result: those that
        raise alone have failed, and hold nothing any more; the others go on.
        """
        done = [voice for voice in self.waiting if voice.is_finished]  # with nothing to say
        for voice in done:
            self.drop(voice)
        self._admit()
        failed = self._speak(self._choose_rows())
        return [Spoken(voice, torch.empty(0), True) for voice in done] + failed + self._decode()

    def _admit(self) -> None:
        while self.waiting and self.pool.pages_for(self.waiting[0].num_max_rows) <= self.pool.num_free:
            voice = self.waiting.pop(0)
            voice.pages = [self.pool.allocate() for _ in range(self.pool.pages_for(voice.num_max_rows))]
            self._speaking.append(_Speaking(voice, self.runner.code2wav.begin()))

    def _release(self, item: _Speaking) -> None:
        self._speaking.remove(item)
        self.pool.release(item.voice.pages)
        item.voice.pages = []
        item.voice.is_released = True

    def _choose_rows(self) -> list[Rows]:
        rows, budget = [], MAX_PROMPT_ROWS
        for item in self._speaking:
            voice = item.voice
            count = voice.num_ready(max(budget, 0))
            if count:
                rows.append(Rows(voice, voice.num_computed, voice.num_computed + count))
                budget -= count if voice.num_computed < voice.prompt.num_rows else 0
        return rows

    def _speak(self, rows: list[Rows]) -> list[Spoken]:
        """Computes the rows of voices; those that fail."""
        if not rows:
            return []
        try:
            self.runner.speak(rows)
            return []
        except Exception as error:
            if len(rows) == 1:
                return [self._fail(rows[0].voice, error)]
        return [failed for row in rows for failed in self._speak([row])]

    def _fail(self, voice: Voice, error: Exception) -> Spoken:
        self.drop(voice)
        return Spoken(voice, torch.empty(0), True, error)

    def _decode(self) -> list[Spoken]:
        """Samples of those that have enough frames for a piece, or no further ones."""
        ready = [item for item in self._speaking if item.num_pending >= FRAMES_PER_PIECE or item.voice.is_finished]
        pieces = [(item.stream, item.voice.frames[item.num_decoded :][:FRAMES_PER_PIECE]) for item in ready]
        with_frames = [piece for piece in pieces if piece[1]]
        results = iter(self._samples(with_frames))
        spoken = []
        for item, (_, frames) in zip(ready, pieces, strict=True):
            samples = next(results) if frames else torch.empty(0)
            if isinstance(samples, Exception):
                spoken.append(self._fail(item.voice, samples))
                continue
            item.num_decoded += len(frames)
            is_done = item.voice.is_finished and not item.num_pending
            spoken.append(Spoken(item.voice, samples, is_done))
            if is_done:
                self._release(item)
        return spoken

    def _samples(self, pieces: list[Piece]) -> list[Tensor | Exception]:
        """The samples of each piece, or why it has none."""
        if not pieces:
            return []
        try:
            return [*self.runner.decode(pieces)]
        except Exception as error:
            if len(pieces) == 1:
                return [error]
        return [result for piece in pieces for result in self._samples([piece])]
