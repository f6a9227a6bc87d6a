"""One answer that is being spoken: what the talker reads of it, and what it has said so far."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tilewright.engine.sample.sampler import uniform_at
from tilewright.models.speaking import TalkerPrompt

# What transformers generates with by default, and the checkpoint's authors recommend.
TEMPERATURE, TOP_K, REPETITION_PENALTY = 0.9, 50, 1.05
CODE_TOP_K, CODE_TOP_P = 50, 0.8  # of the codes after a frame's first
MAX_FRAMES = 4095  # 5.5 minutes

_next_id = itertools.count()
# Numbers of speech are drawn from another series than those of text, whose index is that of the answer.
_SERIES = 1 << 32


@dataclass(frozen=True)
class SpeechParams:
    """How the talker's codes are chosen. Temperature 0 takes the likeliest, also of the codes after a frame's first."""

    temperature: float = TEMPERATURE
    top_k: int = TOP_K
    top_p: float = 1.0
    repetition_penalty: float = REPETITION_PENALTY
    max_frames: int = MAX_FRAMES


@dataclass(eq=False)
class Voice:
    """The rows of the talker for one answer. Row r is the sum of a text row and a codec row.

    Text comes as the thinker writes it. Its last token is the end of its answer, or where it was cut off, and is not
    spoken: a token is, as soon as another follows it.
    """

    prompt: TalkerPrompt
    eos_id: int  # of the thinker's vocabulary: stands after the text's last token,
    pad_id: int  # and this in all rows from then on
    params: SpeechParams = field(default_factory=SpeechParams)
    seed: int = 0
    index: int = 0  # which of a request's answers it speaks
    text_ids: list[int] = field(default_factory=list)  # the answer's tokens that are spoken
    is_text_complete: bool = False
    media_states: dict[int, Tensor] = field(default_factory=dict)  # the thinker's, by the place in its prompt
    num_computed: int = 0  # rows whose keys and values are in the pages
    pages: list[int] = field(default_factory=list)
    frames: list[list[int]] = field(default_factory=list)
    codec_row: Tensor | None = None  # of the last frame
    is_finished: bool = False  # no frame follows
    is_released: bool = False  # nor a sample: it holds nothing any more
    id: int = field(default_factory=lambda: next(_next_id))  # counts up with arrival

    def hear(self, output_token_ids: list[int], *, is_complete: bool) -> None:
        """Takes what the thinker has written so far; all of it, or all that there will be."""
        self.text_ids = [*self.prompt.written_ids, *output_token_ids][:-1]
        self.is_text_complete = is_complete
        if is_complete and not self.text_ids:
            self.is_finished = True  # there is nothing to say

    def say(self, codes: list[int], codec_row: Tensor) -> None:
        """One frame more."""
        self.frames.append(codes)
        self.codec_row = codec_row
        self.is_finished = len(self.frames) >= self.params.max_frames

    @property
    def num_max_rows(self) -> int:
        return self.prompt.num_rows + self.params.max_frames

    def text_id(self, row: int) -> int | None:
        """The id of the row's text; None where it is not written yet."""
        prompt_ids = self.prompt.text_ids
        if row < len(prompt_ids):
            return prompt_ids[row]
        place = row - len(prompt_ids)
        if place < len(self.text_ids):
            return self.text_ids[place]
        if not self.is_text_complete:
            return None
        return self.eos_id if place == len(self.text_ids) else self.pad_id

    def num_ready(self, most: int) -> int:
        """Rows that can be computed now: one while it speaks, up to `most` of its prompt."""
        if self.is_finished:
            return 0
        if self.num_computed >= self.prompt.num_rows:
            return int(self.text_id(self.num_computed) is not None)
        if any(row not in self.media_states for row in self.prompt.thinker_rows):
            return 0
        known = self.prompt.num_rows - (self.text_id(self.prompt.num_rows - 1) is None)
        return min(known - self.num_computed, most)

    def position(self, row: int) -> int:
        """Of a row after the prompt, on every axis."""
        return self.prompt.next_position + row - self.prompt.num_rows

    def uniform(self, place: int) -> float:
        """The random number for the code at this place of the frame that is next."""
        return uniform_at(self.seed, _SERIES + self.index, (len(self.frames) << 8) + place)

    def media_state_rows(self, begin: int, end: int) -> tuple[list[int], Tensor | None]:
        """Which rows in [begin, end) are media, and the thinker's states for them [M, W]."""
        pairs = zip(self.prompt.media_rows, self.prompt.thinker_rows, strict=True)
        found = [(row, of) for row, of in pairs if begin <= row < end]
        if not found:
            return [], None
        return [row for row, _ in found], torch.stack([self.media_states[of] for _, of in found])
