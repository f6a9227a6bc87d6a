"""Speech beside text: which spoken answers gain a frame or samples, between the steps of text."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tilewright.engine.kv.pages import PagePool
from tilewright.engine.schedule.sequence import Sequence
from tilewright.engine.schedule.step import Step
from tilewright.engine.speech.runner import SpeechRunner, TalkerChunk
from tilewright.engine.speech.sequence import SpeechParams, SpeechSequence, find_voice
from tilewright.layers.batch import WantedStates
from tilewright.models.qwen3_omni.code2wav import Code2WavState
from tilewright.ops import backend
from tilewright.types import ContextLengthExceeded, ModelInputs, SamplingParams

# Rows of prompts that one step computes, and frames that it makes samples of: what text waits for.
MAX_PROMPT_ROWS = 256
FRAMES_PER_PIECE = 4

_Piece = tuple[SpeechSequence, list[list[int]]]  # a sequence, and its next frames to decode


@dataclass(frozen=True)
class SpeechDelta:
    """What a step added to a speech sequence. It is done when all its samples are there, or when it failed."""

    speech: SpeechSequence
    samples: Tensor  # fp32 [n]
    is_done: bool
    error: Exception | None = None  # why it failed


class SpeechScheduler:
    """Speaks the engine's answers: admits speech sequences, has their frames computed and decoded to samples.

    `EngineCore` holds it, on the engine's thread, and calls `step` after each step of text. A speech sequence is
    admitted when there are pages for all the rows it may ever have, so that none has to stop half-way; until then it
    waits, while its text goes on. Waiting and running ones are in order of arrival.
    """

    def __init__(self, runner: SpeechRunner) -> None:
        self.runner, self.model = runner, runner.model
        self.pool = PagePool(runner.num_pages, runner.page_size)
        self.waiting: list[SpeechSequence] = []
        self.running: list[SpeechSequence] = []
        self._by_answer: dict[Sequence, SpeechSequence] = {}

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def answers(self) -> list[Sequence]:
        """The sequences of text that are still being spoken."""
        return [sequence for sequence, speech in self._by_answer.items() if not speech.is_released]

    def is_speaking(self, sequence: Sequence) -> bool:
        speech = self._by_answer.get(sequence)
        return speech is not None and not speech.is_released

    def make_sequence(self, inputs: ModelInputs, params: SamplingParams) -> SpeechSequence:
        """Return a speech sequence for an answer to this prompt; RequestError if it cannot be spoken."""
        assert params.voice is not None
        model = self.model
        prompt = model.prompt(inputs, find_voice(params.voice, model.voices))
        speech = SpeechSequence(prompt, model.text_eos_id, model.text_pad_id, make_speech_params(params))
        self.check(speech)
        return speech

    def check(self, speech: SpeechSequence) -> None:
        """Raise ContextLengthExceeded for one that could never be admitted."""
        if speech.max_rows > self.pool.num_tokens:
            raise ContextLengthExceeded(
                max(self.pool.num_tokens - speech.params.max_frames, 0),
                f"the answer is to be spoken, and your prompt resulted in {speech.prompt.num_rows} rows for the talker",
            )

    def add(self, speech: SpeechSequence, answer: Sequence | None = None) -> None:
        """Queue a speech sequence. It speaks `answer` as that is written, where it is given."""
        self.check(speech)
        if answer is not None:
            speech.answer, speech.seed, speech.index = answer, answer.seed, answer.index
            if speech.prompt.thinker_rows:
                answer.first_kept_token = min(speech.prompt.thinker_rows)
            self._by_answer[answer] = speech
        self.waiting.append(speech)

    def wanted_states(self, step: Step) -> WantedStates | None:
        """Return the tokens of a step of text whose hidden states the talker will read."""
        rows = [row for row, _, _ in self._media_rows(step)]
        return WantedStates(torch.tensor(rows, device=backend.device()), self.model.accept_layer) if rows else None

    def store_states(self, step: Step, states_MD: Tensor) -> None:
        """Store the hidden states of the tokens that `wanted_states` returned."""
        for (_, speech, token), state in zip(self._media_rows(step), states_MD, strict=True):
            speech.media_states[token] = state

    def _media_rows(self, step: Step) -> list[tuple[int, SpeechSequence, int]]:
        """Return rows of the step, the speech sequences that read their states, and their places in the prompt."""
        found, first = [], 0
        for chunk in step.chunks:
            speech = self._by_answer.get(chunk.sequence)
            if speech is not None:
                inside = [token for token in speech.prompt.thinker_rows if chunk.start <= token < chunk.stop]
                found += [(first + token - chunk.start, speech, token) for token in inside]
            first += chunk.num_tokens
        return found

    def set_text(self, answer: Sequence, *, is_complete: bool) -> None:
        """Set the text to speak to what the answer has now. `is_complete`: no more will follow."""
        self._by_answer[answer].set_text(answer.output_token_ids, is_complete=is_complete)

    def step(self) -> list[SpeechDelta]:
        """Compute the next frame of each speech sequence whose text is known, and samples of those with enough frames.

        Sequences are computed together. Where that raises, each is computed by itself, with the same result: those that
        raise alone have failed, and hold nothing any more; the others go on.
        """
        silent = [speech for speech in self.waiting if speech.is_finished]  # their text is empty
        for speech in silent:
            self.drop(speech)
        self._admit()
        failed = self._compute_frames(self._schedule())
        deltas = [SpeechDelta(speech, torch.empty(0), True) for speech in silent] + failed + self._decode()
        return [delta for delta in deltas if len(delta.samples) or delta.is_done]

    def drop(self, speech: SpeechSequence) -> None:
        """Stop a speech sequence and free what it holds."""
        speech.is_finished = True
        if speech in self.waiting:
            self.waiting.remove(speech)
        self._release(speech)

    def abort(self, request_id: str) -> list[Sequence]:
        """Stop speaking the answers of a request; return those that were still spoken."""
        aborted = [sequence for sequence in self.answers if sequence.request_id == request_id]
        for sequence in aborted:
            self.drop(self._by_answer[sequence])
        return aborted

    def pop_samples(self, answer: Sequence) -> np.ndarray | None:
        """Return all samples of an answer, fp32 [n], and forget it; None if it is not spoken."""
        speech = self._by_answer.pop(answer, None)
        if speech is None:
            return None
        self.drop(speech)
        return torch.cat([torch.empty(0), *speech.samples]).numpy()

    def forget(self, request_id: str) -> None:
        """Free all that a failed request holds."""
        for sequence in [one for one in self._by_answer if one.request_id == request_id]:
            self.pop_samples(sequence)

    def _admit(self) -> None:
        while self.waiting and self.pool.pages_for(self.waiting[0].max_rows) <= self.pool.num_free:
            speech = self.waiting.pop(0)
            speech.pages = [self.pool.allocate() for _ in range(self.pool.pages_for(speech.max_rows))]
            self.running.append(speech)

    def _release(self, speech: SpeechSequence) -> None:
        if speech in self.running:
            self.running.remove(speech)
        self.pool.release(speech.pages)
        speech.pages, speech.code2wav_state = [], Code2WavState()
        speech.is_released = True

    def _schedule(self) -> list[TalkerChunk]:
        """Return the rows that can be computed now, of prompts no more than a step may have."""
        chunks, budget = [], MAX_PROMPT_ROWS
        for speech in self.running:
            count = speech.num_ready_rows(max(budget, 0))
            if count:
                chunks.append(TalkerChunk(speech, speech.num_computed, speech.num_computed + count))
                budget -= count if speech.num_computed < speech.prompt.num_rows else 0
        return chunks

    def _compute_frames(self, chunks: list[TalkerChunk]) -> list[SpeechDelta]:
        """Compute rows of speech sequences; return those that failed."""
        if not chunks:
            return []
        try:
            self.runner.compute_frames(chunks)
            return []
        except Exception as error:
            if len(chunks) == 1:
                return [self._fail(chunks[0].sequence, error)]
        return [failed for chunk in chunks for failed in self._compute_frames([chunk])]

    def _fail(self, speech: SpeechSequence, error: Exception) -> SpeechDelta:
        self.drop(speech)
        return SpeechDelta(speech, torch.empty(0), True, error)

    def _decode(self) -> list[SpeechDelta]:
        """Make samples of the sequences that have enough frames for a piece, or no further ones."""
        ready = [item for item in self.running if item.num_undecoded >= FRAMES_PER_PIECE or item.is_finished]
        pieces = [(speech, speech.frames[speech.num_decoded :][:FRAMES_PER_PIECE]) for speech in ready]
        results = iter(self._samples([piece for piece in pieces if piece[1]]))
        deltas = []
        for speech, frames in pieces:
            samples = next(results) if frames else torch.empty(0)
            if isinstance(samples, Exception):
                deltas.append(self._fail(speech, samples))
                continue
            speech.num_decoded += len(frames)
            speech.samples.append(samples)
            is_done = speech.is_finished and not speech.num_undecoded
            deltas.append(SpeechDelta(speech, samples, is_done))
            if is_done:
                self._release(speech)
        return deltas

    def _samples(self, pieces: list[_Piece]) -> list[Tensor | Exception]:
        """Return the samples of each piece, or why it has none."""
        if not pieces:
            return []
        try:
            return [*self.runner.decode(pieces)]
        except Exception as error:
            if len(pieces) == 1:
                return [error]
        return [result for piece in pieces for result in self._samples([piece])]


def make_speech_params(params: SamplingParams) -> SpeechParams:
    """Return how codes are sampled: as recommended, or greedily where the text's tokens are."""
    return SpeechParams(temperature=0.0) if params.temperature == 0 else SpeechParams()
