"""Speech beside text: each spoken answer has a voice, whose frames are scheduled between the steps of text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilewright.engine.kv.pages import PagePool
from tilewright.engine.schedule.sequence import Sequence
from tilewright.engine.schedule.step import Step
from tilewright.engine.speech.runner import SpeechRunner, TalkerRows
from tilewright.engine.speech.voice import SpeechParams, Voice
from tilewright.layers.batch import KeptStates
from tilewright.models.speaking import Speaker, find_voice
from tilewright.ops import backend
from tilewright.types import ContextLengthExceeded, ModelInputs, SamplingParams

# Limits on one step: rows of prompts that it computes, and frames of a voice that it decodes. Text waits for them.
MAX_PROMPT_ROWS = 256
FRAMES_PER_PIECE = 4

Piece = tuple[Any, list[list[int]]]  # a stream, and its next frames


@dataclass(frozen=True)
class Spoken:
    """Samples that a step added to a voice. It is done when all its samples are there, or when it failed."""

    voice: Voice
    samples: Tensor  # fp32 [n]
    is_done: bool
    error: Exception | None = None  # why it failed


@dataclass(eq=False)
class _Speaking:
    """A voice with pages, and how far its samples are decoded."""

    voice: Voice
    stream: Any  # the decoder's state
    num_decoded: int = 0

    @property
    def num_pending(self) -> int:
        return len(self.voice.frames) - self.num_decoded


class SpeechScheduler:
    """The waiting and the speaking voices, both in order of arrival.

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
        """Raise ContextLengthExceeded for a voice that could never be admitted."""
        if voice.num_max_rows > self.pool.num_tokens:
            raise ContextLengthExceeded(
                max(self.pool.num_tokens - voice.params.max_frames, 0),
                f"the answer is to be spoken, and your prompt resulted in {voice.prompt.num_rows} rows for the talker",
            )

    def add(self, voice: Voice) -> None:
        self.check(voice)
        self.waiting.append(voice)

    def drop(self, voice: Voice) -> None:
        """Forget a voice and free what it holds."""
        voice.is_finished = voice.is_released = True
        if voice in self.waiting:
            self.waiting.remove(voice)
        for item in self._speaking:
            if item.voice is voice:
                self._release(item)
                return

    def step(self) -> list[Spoken]:
        """Compute the next frame of each voice whose text is known, and decode samples of those with enough frames.

        Voices are computed together. If that raises, each is computed alone, with the same result: those that raise
        alone fail and hold nothing any more; the others go on.
        """
        done = [voice for voice in self.waiting if voice.is_finished]  # without text to speak
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

    def _choose_rows(self) -> list[TalkerRows]:
        rows, budget = [], MAX_PROMPT_ROWS
        for item in self._speaking:
            voice = item.voice
            count = voice.num_ready(max(budget, 0))
            if count:
                rows.append(TalkerRows(voice, voice.num_computed, voice.num_computed + count))
                budget -= count if voice.num_computed < voice.prompt.num_rows else 0
        return rows

    def _speak(self, rows: list[TalkerRows]) -> list[Spoken]:
        """Compute the rows of voices and return those that fail."""
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
        """Return samples of the voices that have enough frames for a piece, or no further ones."""
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
        """Return the samples of each piece, or its error."""
        if not pieces:
            return []
        try:
            return [*self.runner.decode(pieces)]
        except Exception as error:
            if len(pieces) == 1:
                return [error]
        return [result for piece in pieces for result in self._samples([piece])]


@dataclass(eq=False)
class _Spoken:
    """A sequence whose answer is spoken, and its samples so far."""

    sequence: Sequence
    voice: Voice
    samples: list[np.ndarray] = field(default_factory=list)


@dataclass(frozen=True)
class SpokenPart:
    """Sound added to an answer; `is_done`: the last part, complete or ended by an error."""

    sequence: Sequence
    samples: np.ndarray
    is_done: bool
    error: Exception | None = None  # None, or why the rest cannot be spoken


class Speech:
    """Voices of the engine's sequences. Used on the engine's thread."""

    def __init__(self, networks: Speaker, scheduler: SpeechScheduler) -> None:
        self.networks = networks
        self.scheduler = scheduler
        self._spoken: dict[Sequence, _Spoken] = {}

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def sequences(self) -> list[Sequence]:
        """Sequences that are still being spoken."""
        return [sequence for sequence, item in self._spoken.items() if not item.voice.is_released]

    def make_voice(self, inputs: ModelInputs, params: SamplingParams) -> Voice:
        """Return a voice for an answer to this prompt; RequestError if it cannot be spoken."""
        assert params.voice is not None
        prompt = self.networks.prompt(inputs, find_voice(params.voice, self.networks.voices))
        voice = Voice(prompt, self.networks.text_end_id, self.networks.text_padding_id, speech_params(params))
        self.scheduler.check(voice)
        return voice

    def start(self, sequence: Sequence, voice: Voice) -> None:
        """Speak the sequence from now on, as it is generated."""
        voice.seed, voice.index = sequence.seed, sequence.index
        if voice.prompt.thinker_rows:
            sequence.first_kept_token = min(voice.prompt.thinker_rows)
        self._spoken[sequence] = _Spoken(sequence, voice)
        self.scheduler.add(voice)

    def is_speaking(self, sequence: Sequence) -> bool:
        item = self._spoken.get(sequence)
        return item is not None and not item.voice.is_released

    def wanted(self, step: Step) -> KeptStates | None:
        """Return the rows of a step whose hidden states voices wait for, or None."""
        rows = [row for row, _, _ in self._wanted(step)]
        return KeptStates(torch.tensor(rows, device=backend.device()), self.networks.accept_layer) if rows else None

    def take(self, step: Step, states_MD: Tensor) -> None:
        """Store the hidden states that `wanted` asked for."""
        for (_, voice, token), state in zip(self._wanted(step), states_MD, strict=True):
            voice.media_states[token] = state

    def _wanted(self, step: Step) -> list[tuple[int, Voice, int]]:
        """Return rows of the step, the voices they are for, and their tokens of the prompt."""
        found, first = [], 0
        for chunk in step.chunks:
            item = self._spoken.get(chunk.sequence)
            if item is not None:
                tokens = item.voice.prompt.thinker_rows
                inside = [token for token in tokens if chunk.start <= token < chunk.stop]
                found += [(first + token - chunk.start, item.voice, token) for token in inside]
            first += chunk.num_tokens
        return found

    def hear(self, sequence: Sequence, *, is_complete: bool) -> None:
        """Pass the sequence's new text to its voice. `is_complete`: no more will follow."""
        self._spoken[sequence].voice.hear(sequence.output_token_ids, is_complete=is_complete)

    def step(self) -> list[SpokenPart]:
        """Run one step and return what it adds to the sound of each answer."""
        by_voice = {item.voice: item for item in self._spoken.values()}
        parts = []
        for spoken in self.scheduler.step():
            item, samples = by_voice[spoken.voice], spoken.samples.numpy()
            if len(samples):
                item.samples.append(samples)
            if len(samples) or spoken.is_done:
                parts.append(SpokenPart(item.sequence, samples, spoken.is_done, spoken.error))
        return parts

    def sound(self, sequence: Sequence) -> np.ndarray | None:
        """Return all samples of a sequence, fp32 [n], and forget it; None if it is not spoken."""
        item = self._spoken.pop(sequence, None)
        if item is None:
            return None
        self.scheduler.drop(item.voice)
        return np.concatenate([np.empty(0, np.float32), *item.samples])

    def drop(self, request_id: str) -> list[Sequence]:
        """Stop the voices of a request, and return the sequences that were still spoken."""
        dropped = [sequence for sequence in self.sequences if sequence.request_id == request_id]
        for sequence in dropped:
            self.scheduler.drop(self._spoken[sequence].voice)
        return dropped

    def forget(self, request_id: str) -> None:
        """Free all that a failed request holds."""
        for sequence in [one for one in self._spoken if one.request_id == request_id]:
            self.sound(sequence)


def speech_params(params: SamplingParams) -> SpeechParams:
    """Return how the talker's codes are drawn: as recommended, or greedily if the text is."""
    return SpeechParams(temperature=0.0) if params.temperature == 0 else SpeechParams()
