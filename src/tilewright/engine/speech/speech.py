"""Speech beside text: each spoken answer has a voice, which hears its text after every step and then speaks."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tilewright.engine.sequence import Sequence
from tilewright.engine.speech.scheduler import SpeechScheduler
from tilewright.engine.speech.voice import SpeechParams, Voice
from tilewright.engine.step import Step
from tilewright.layers.batch import KeptStates
from tilewright.models.speaking import Speaker, find_voice
from tilewright.ops import backend
from tilewright.types import ModelInputs, SamplingParams


@dataclass(eq=False)
class _Spoken:
    """A sequence whose answer is spoken, and its samples so far."""

    sequence: Sequence
    voice: Voice
    samples: list[np.ndarray] = field(default_factory=list)


@dataclass(frozen=True)
class SpokenPart:
    """What was added to the sound of an answer, and whether that was all of it, or all that there will be."""

    sequence: Sequence
    samples: np.ndarray
    is_done: bool
    error: Exception | None = None  # why the rest cannot be said


class Speech:
    """The voices of the engine's sequences. For the engine's thread."""

    def __init__(self, networks: Speaker, scheduler: SpeechScheduler) -> None:
        self.networks = networks
        self.scheduler = scheduler
        self._spoken: dict[Sequence, _Spoken] = {}

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def sequences(self) -> list[Sequence]:
        """Those that are still being spoken."""
        return [sequence for sequence, item in self._spoken.items() if not item.voice.is_released]

    def make_voice(self, inputs: ModelInputs, params: SamplingParams) -> Voice:
        """A voice for an answer to this prompt; RequestError if it cannot be spoken."""
        assert params.voice is not None
        prompt = self.networks.prompt(inputs, find_voice(params.voice, self.networks.voices))
        voice = Voice(prompt, self.networks.text_end_id, self.networks.text_padding_id, speech_params(params))
        self.scheduler.check(voice)
        return voice

    def start(self, sequence: Sequence, voice: Voice) -> None:
        """From now on the sequence is spoken as it is written."""
        voice.seed, voice.index = sequence.seed, sequence.index
        if voice.prompt.thinker_rows:
            sequence.first_kept_token = min(voice.prompt.thinker_rows)
        self._spoken[sequence] = _Spoken(sequence, voice)
        self.scheduler.add(voice)

    def is_speaking(self, sequence: Sequence) -> bool:
        item = self._spoken.get(sequence)
        return item is not None and not item.voice.is_released

    def wanted(self, step: Step) -> KeptStates | None:
        """The tokens of a step whose hidden states voices wait for."""
        rows = [row for row, _, _ in self._wanted(step)]
        return KeptStates(torch.tensor(rows, device=backend.device()), self.networks.accept_layer) if rows else None

    def take(self, step: Step, states_MD: Tensor) -> None:
        """The states of the tokens that were wanted."""
        for (_, voice, token), state in zip(self._wanted(step), states_MD, strict=True):
            voice.media_states[token] = state

    def _wanted(self, step: Step) -> list[tuple[int, Voice, int]]:
        """Rows of the step, whose voices they are for, and which tokens of the prompt."""
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
        """The sequence has more text, perhaps all."""
        self._spoken[sequence].voice.hear(sequence.output_token_ids, is_complete=is_complete)

    def step(self) -> list[SpokenPart]:
        """What one step adds to the sound of which answers."""
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
        """All samples of a sequence so far, fp32 [n]; None if it is not spoken. It is forgotten then."""
        item = self._spoken.pop(sequence, None)
        if item is None:
            return None
        self.scheduler.drop(item.voice)
        return np.concatenate([np.empty(0, np.float32), *item.samples])

    def drop(self, request_id: str) -> list[Sequence]:
        """The sequences of a request that were still spoken: their voices are silent from now on."""
        dropped = [sequence for sequence in self.sequences if sequence.request_id == request_id]
        for sequence in dropped:
            self.scheduler.drop(self._spoken[sequence].voice)
        return dropped

    def forget(self, request_id: str) -> None:
        """Frees all that a failed request holds."""
        for sequence in [one for one in self._spoken if one.request_id == request_id]:
            self.sound(sequence)


def speech_params(params: SamplingParams) -> SpeechParams:
    """How the talker's codes are chosen: as recommended, or the likeliest where the text's tokens are."""
    return SpeechParams(temperature=0.0) if params.temperature == 0 else SpeechParams()
