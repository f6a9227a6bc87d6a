"""The talker's side of one spoken answer: its voice, the rows it reads, the frames made of them, and their samples."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tilewright.engine.sample.sampler import uniform_at
from tilewright.engine.schedule.sequence import Sequence
from tilewright.models.qwen3_omni.code2wav import Code2WavState
from tilewright.models.qwen3_omni.talker import TalkerPrompt
from tilewright.types import RequestError

# The checkpoint authors' recommendation, which transformers uses by default.
TEMPERATURE, TOP_K, REPETITION_PENALTY = 0.9, 50, 1.05
CODE_TOP_K, CODE_TOP_P = 50, 0.8  # of the codes after a frame's first
MAX_FRAMES = 4095  # 5.5 minutes

# Applications written for OpenAI's models name these. Their order decides which voice a name means, so append only.
OPENAI_VOICES = (
    "alloy", "ash", "ballad", "coral", "echo", "fable", "nova", "onyx", "sage", "shimmer", "verse", "marin", "cedar",
)  # fmt: skip

_next_id = itertools.count()
# Random numbers of speech are from another series than those of text, whose index is that of the answer.
_SERIES = 1 << 32


@dataclass(frozen=True)
class SpeechParams:
    """How codes are sampled. Temperature 0 takes the likeliest, also of the codes after a frame's first."""

    temperature: float = TEMPERATURE
    top_k: int = TOP_K
    top_p: float = 1.0
    repetition_penalty: float = REPETITION_PENALTY
    max_frames: int = MAX_FRAMES


@dataclass(eq=False)
class SpeechSequence:
    """The rows, frames and samples of one spoken answer, from the first step of its text to its last sample.

    The `SpeechScheduler` holds it. Row r of the talker is the sum of a text row and a codec row. Text arrives as the
    thinker writes it. A token is spoken as soon as another follows it, so the last one, which is the end of the answer
    or where it was cut off, is not.
    """

    prompt: TalkerPrompt
    text_eos_id: int  # thinker token written once after the last text token
    text_pad_id: int  # thinker token of every row after that
    params: SpeechParams = field(default_factory=SpeechParams)
    seed: int = 0
    index: int = 0  # which of a request's answers it speaks
    answer: Sequence | None = None  # the sequence whose text it speaks, once that is queued
    text_ids: list[int] = field(default_factory=list)  # the answer's tokens that are spoken
    is_text_complete: bool = False
    media_states: dict[int, Tensor] = field(default_factory=dict)  # the thinker's hidden states, by token of its prompt
    num_computed: int = 0  # rows whose keys and values are in the pages
    pages: list[int] = field(default_factory=list)
    frames: list[list[int]] = field(default_factory=list)
    codec_row: Tensor | None = None  # of the last frame
    code2wav_state: Code2WavState = field(default_factory=Code2WavState)
    num_decoded: int = 0  # frames whose samples are made
    samples: list[Tensor] = field(default_factory=list)  # fp32, in pieces
    is_finished: bool = False  # no frame follows
    is_released: bool = False  # no sample follows either, and it holds no memory
    id: int = field(default_factory=lambda: next(_next_id))  # counts up with arrival

    def set_text(self, output_token_ids: list[int], *, is_complete: bool) -> None:
        """Set the text to speak to these tokens of the answer. `is_complete`: no more will follow."""
        self.text_ids = [*self.prompt.answer_ids, *output_token_ids][:-1]
        self.is_text_complete = is_complete
        if is_complete and not self.text_ids:
            self.is_finished = True

    def append_frame(self, codes: list[int], codec_row: Tensor) -> None:
        """Append one frame of codes, with the codec row that the talker reads next."""
        self.frames.append(codes)
        self.codec_row = codec_row
        self.is_finished = len(self.frames) >= self.params.max_frames

    @property
    def max_rows(self) -> int:
        return self.prompt.num_rows + self.params.max_frames

    @property
    def num_undecoded(self) -> int:
        return len(self.frames) - self.num_decoded

    def text_id(self, row: int) -> int | None:
        """Return the token id of a row's text; None where it is not written yet."""
        prompt_ids = self.prompt.text_ids
        if row < len(prompt_ids):
            return prompt_ids[row]
        place = row - len(prompt_ids)
        if place < len(self.text_ids):
            return self.text_ids[place]
        if not self.is_text_complete:
            return None
        return self.text_eos_id if place == len(self.text_ids) else self.text_pad_id

    def num_ready_rows(self, limit: int) -> int:
        """Return how many rows can be computed now: one after the prompt, up to `limit` of the prompt."""
        if self.is_finished:
            return 0
        if self.num_computed >= self.prompt.num_rows:
            return int(self.text_id(self.num_computed) is not None)
        if any(row not in self.media_states for row in self.prompt.thinker_rows):
            return 0
        known = self.prompt.num_rows - (self.text_id(self.prompt.num_rows - 1) is None)
        return min(known - self.num_computed, limit)

    def position(self, row: int) -> int:
        """Return the position, on every axis, of a row after the prompt."""
        return self.prompt.next_position + row - self.prompt.num_rows

    def uniform(self, place: int) -> float:
        """Return the random number for the code at this place of the next frame."""
        return uniform_at(self.seed, _SERIES + self.index, (len(self.frames) << 8) + place)

    def media_state_rows(self, begin: int, end: int) -> tuple[list[int], Tensor | None]:
        """Return which rows in [begin, end) are media, and the thinker's states for them [M, W]."""
        pairs = zip(self.prompt.media_rows, self.prompt.thinker_rows, strict=True)
        found = [(row, of) for row, of in pairs if begin <= row < end]
        if not found:
            return [], None
        return [row for row, _ in found], torch.stack([self.media_states[of] for _, of in found])


def voice_aliases(voices: tuple[str, ...]) -> Mapping[str, str]:
    """Return OpenAI's names that no voice of the model has, each with the voice it means: the model's, in turn."""
    if not voices:
        return {}
    own = {voice.lower() for voice in voices}
    return {name: voices[i % len(voices)] for i, name in enumerate(OPENAI_VOICES) if name not in own}


def find_voice(name: str, voices: tuple[str, ...]) -> str:
    """Return the model's voice that a request names; RequestError with the list where there is no such voice."""
    aliases = voice_aliases(voices)
    found = {**aliases, **{voice.lower(): voice for voice in voices}}.get(name.lower())
    if found is None:
        message = f"voice is {name!r:.100}, expected one of {', '.join(voices)}, or a name of OpenAI's for one of them"
        raise RequestError(f"{message}: {', '.join(aliases)}", param="voice")
    return found
