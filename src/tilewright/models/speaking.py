"""What the engine asks of the networks that speak a model's answers. A family has them by `Family.build_speech`.

A talker reads rows, each the sum of a text row and a codec row, and gives the first code of a frame of sound; a code
predictor gives the frame's other codes; a wave decoder makes samples of frames.

Legend of shape suffixes: T packed rows, D the talker's width, B voices, Q codes of a frame, V the codec's vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from tilewright.layers.batch import Batch
from tilewright.models.protocol import KvSpec
from tilewright.types import ModelInputs, RequestError

# Codes from fp32 logits [B, V] of the code at this place of the frame, 1 to Q - 1.
Choose = Callable[[Tensor, int], Tensor]
# Rows of the text model's table of ids.
Embed = Callable[[Tensor], Tensor]
# As `CodePredicting.predict`.
Predict = Callable[[Tensor, Choose], tuple[list[Tensor], list[Tensor]]]

# Applications written for OpenAI's models name these. Their order decides which voice a name means, so append only.
OPENAI_VOICES = (
    "alloy", "ash", "ballad", "coral", "echo", "fable", "nova", "onyx", "sage", "shimmer", "verse", "marin", "cedar",
)  # fmt: skip


def voice_aliases(voices: Sequence[str]) -> Mapping[str, str]:
    """OpenAI's names that no voice of the model has, each with the voice it means: the model's, in turn."""
    if not voices:
        return {}
    own = {voice.lower() for voice in voices}
    return {name: voices[i % len(voices)] for i, name in enumerate(OPENAI_VOICES) if name not in own}


def find_voice(name: str, voices: Sequence[str]) -> str:
    """The model's voice that a request names; RequestError with the list where there is no such voice."""
    aliases = voice_aliases(voices)
    found = {**aliases, **{voice.lower(): voice for voice in voices}}.get(name.lower())
    if found is None:
        message = f"voice is {name!r:.100}, expected one of {', '.join(voices)}, or a name of OpenAI's for one of them"
        raise RequestError(f"{message}: {', '.join(aliases)}", param="voice")
    return found


@dataclass(frozen=True)
class TalkerPrompt:
    """The rows before the answer's first token, and where they stand; the row of that token is the prompt's last."""

    text_ids: tuple[int, ...]  # of the text model's vocabulary; a medium's rows have its placeholder
    codec_ids: tuple[int, ...]  # of the talker's: of the last rows, the one of the answer's first token included
    positions: np.ndarray  # int64 [A, rows], that of the answer's first token included; later ones follow
    media_rows: tuple[int, ...]  # which rows are hidden states of the text model,
    thinker_rows: tuple[int, ...]  # and of which tokens of its prompt
    written_ids: tuple[int, ...] = ()  # what the prompt has of the answer itself

    @property
    def num_rows(self) -> int:
        """With the row of the answer's first token."""
        return len(self.text_ids) + 1

    @property
    def num_plain_rows(self) -> int:
        """Those without a codec token."""
        return self.num_rows - len(self.codec_ids)

    def codec_id(self, row: int) -> int | None:
        return self.codec_ids[row - self.num_plain_rows] if row >= self.num_plain_rows else None

    @property
    def next_position(self) -> int:
        """Of the row after the prompt, on every axis."""
        return int(self.positions[:, -1].max()) + 1


class CodePredicting(Protocol):
    """Gives the codes of a frame after the first."""

    @property
    def num_codes(self) -> int:
        """Of a frame, the first included."""

    def predict(self, x_TD: Tensor, choose: Choose) -> tuple[list[Tensor], list[Tensor]]:
        """The codes 1 to Q - 1 of one frame of each voice, each int64 [B], and their embeddings, each [B, D].

        Two rows of x are a voice's: the talker's hidden state and its embedding of the first code. Kernel calls alone,
        if `choose` is one.
        """


class Talking(Protocol):
    """Gives the first code of each frame."""

    @property
    def kv_spec(self) -> KvSpec: ...

    @property
    def num_position_axes(self) -> int: ...

    @property
    def width(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def end_id(self) -> int:
        """The code after which nothing is said."""

    @property
    def never_said(self) -> Collection[int]:
        """Codes that are no sound, nor the end."""

    @property
    def code_predictor(self) -> CodePredicting: ...

    @property
    def text_projection(self) -> Callable[[Tensor], Tensor]:
        """Rows of the text model's table as text rows."""

    @property
    def hidden_projection(self) -> Callable[[Tensor], Tensor]:
        """The text model's hidden states of media as text rows."""

    @property
    def codec_embedding(self) -> Callable[[Tensor], Tensor]: ...

    def hidden(self, x_TD: Tensor, batch: Batch) -> Tensor:
        """What the head reads of the rows that the batch asks for [R, D]; x is overwritten."""

    def logits(self, h_TD: Tensor) -> Tensor:
        """fp32 [T, V] of what `hidden` gives."""

    def step(self, embed: Embed, text_ids_T: Tensor, codec_TD: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Hidden states and logits from the ids of text rows and from codec rows; kernel calls alone."""

    def complete_frames(
        self, hidden_BD: Tensor, first_codes_B: Tensor, choose: Choose, predict: Predict | None = None
    ) -> tuple[Tensor, Tensor]:
        """Frames of codes int64 [B, Q], and the codec rows [B, D] that they are for the step after."""


class WaveDecoder(Protocol):
    """Makes samples of frames, which may come in pieces."""

    def begin(self) -> Any:
        """What one voice carries from piece to piece."""

    def decode(self, codes: Sequence[Tensor], streams: Sequence[Any]) -> list[Tensor]:
        """The next samples of each stream, fp32 [n], from its next frames int64 [T, Q].

        Where it raises, all streams are as they were.
        """


class Speaker(Protocol):
    """The networks, and what they need of a prompt."""

    @property
    def samples_per_second(self) -> int: ...

    @property
    def talker(self) -> Talking: ...

    @property
    def code2wav(self) -> WaveDecoder: ...

    @property
    def voices(self) -> tuple[str, ...]:
        """Their names, the default first."""

    @property
    def accept_layer(self) -> int:
        """After so many layers of the text model are the hidden states of media that the talker reads."""

    @property
    def text_end_id(self) -> int:
        """Of the text model's vocabulary: the talker reads it after the answer's last token,"""

    @property
    def text_padding_id(self) -> int:
        """and this from then on."""

    def embed_of(self, model: Any) -> Embed:
        """Rows of the table of ids: the model's own, unless the networks have one because it is split."""

    def checkpoint_name(self, name: str) -> str | None:
        """The name of a tensor that speaks; None for another."""

    def prompt(self, inputs: ModelInputs, voice: str) -> TalkerPrompt:
        """What the talker reads before an answer that is spoken by `voice`, one of `voices`."""
