"""The engine's interface to the networks that speak a model's answers, built by `Family.build_speech`.

A talker reads rows, each the sum of a text row and a codec row, and predicts the first code of a frame of sound; a code
predictor predicts the frame's other codes; a wave decoder turns frames into samples.

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

# Draws codes from fp32 logits [B, V] of the code at this place of the frame, 1 to Q - 1.
Choose = Callable[[Tensor, int], Tensor]
# Looks ids up in the text model's embedding table.
Embed = Callable[[Tensor], Tensor]
# Like `CodePredicting.predict`.
Predict = Callable[[Tensor, Choose], tuple[list[Tensor], list[Tensor]]]

# Applications written for OpenAI's models use these. Their order decides which voice a name means, so only append.
OPENAI_VOICES = (
    "alloy", "ash", "ballad", "coral", "echo", "fable", "nova", "onyx", "sage", "shimmer", "verse", "marin", "cedar",
)  # fmt: skip


def voice_aliases(voices: Sequence[str]) -> Mapping[str, str]:
    """Return OpenAI's voice names that the model has not, each with a voice of the model, in turn."""
    if not voices:
        return {}
    own = {voice.lower() for voice in voices}
    return {name: voices[i % len(voices)] for i, name in enumerate(OPENAI_VOICES) if name not in own}


def find_voice(name: str, voices: Sequence[str]) -> str:
    """Return the model's voice that a request names; RequestError with the list if there is none."""
    aliases = voice_aliases(voices)
    found = {**aliases, **{voice.lower(): voice for voice in voices}}.get(name.lower())
    if found is None:
        message = f"voice is {name!r:.100}, expected one of {', '.join(voices)}, or a name of OpenAI's for one of them"
        raise RequestError(f"{message}: {', '.join(aliases)}", param="voice")
    return found


@dataclass(frozen=True)
class TalkerPrompt:
    """Rows before the answer's first token, with their positions; the row of that token is the prompt's last."""

    text_ids: tuple[int, ...]  # of the text model's vocabulary; a medium's rows have its placeholder
    codec_ids: tuple[int, ...]  # of the talker's vocabulary, for the last rows, up to that of the answer's first token
    positions: np.ndarray  # int64 [A, rows], up to the row of the answer's first token
    media_rows: tuple[int, ...]  # rows that are hidden states of the text model
    thinker_rows: tuple[int, ...]  # tokens of its prompt that these are of
    written_ids: tuple[int, ...] = ()  # the part of the answer that the prompt has

    @property
    def num_rows(self) -> int:
        """Number of rows, including that of the answer's first token."""
        return len(self.text_ids) + 1

    @property
    def num_plain_rows(self) -> int:
        """Number of rows without a codec token."""
        return self.num_rows - len(self.codec_ids)

    def codec_id(self, row: int) -> int | None:
        return self.codec_ids[row - self.num_plain_rows] if row >= self.num_plain_rows else None

    @property
    def next_position(self) -> int:
        """Position of the row after the prompt, on every axis."""
        return int(self.positions[:, -1].max()) + 1


class CodePredicting(Protocol):
    """Predicts the codes of a frame after the first."""

    @property
    def num_codes(self) -> int:
        """Codes of a frame, including the first."""

    def predict(self, x_TD: Tensor, choose: Choose) -> tuple[list[Tensor], list[Tensor]]:
        """Return codes 1 to Q - 1 of one frame of each voice, each int64 [B], and their embeddings, each [B, D].

        Each voice has two rows of x: the talker's hidden state and its embedding of the first code. Everything is a
        kernel call, if `choose` is one.
        """


class Talking(Protocol):
    """Predicts the first code of each frame."""

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
        """The code that ends the speech."""

    @property
    def never_said(self) -> Collection[int]:
        """Codes that are neither sound nor the end."""

    @property
    def code_predictor(self) -> CodePredicting: ...

    @property
    def text_projection(self) -> Callable[[Tensor], Tensor]:
        """Projects rows of the text model's table to text rows."""

    @property
    def hidden_projection(self) -> Callable[[Tensor], Tensor]:
        """Projects the text model's hidden states of media to text rows."""

    @property
    def codec_embedding(self) -> Callable[[Tensor], Tensor]: ...

    def hidden(self, x_TD: Tensor, batch: Batch) -> Tensor:
        """Return the head's inputs for the rows that the batch asks for [R, D]; x is overwritten."""

    def logits(self, h_TD: Tensor) -> Tensor:
        """Return fp32 logits [T, V] of the output of `hidden`."""

    def step(self, embed: Embed, text_ids_T: Tensor, codec_TD: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return hidden states and logits from the ids of text rows and from codec rows, by kernel calls only."""

    def complete_frames(
        self, hidden_BD: Tensor, first_codes_B: Tensor, choose: Choose, predict: Predict | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return frames of codes int64 [B, Q], and their codec rows [B, D] for the next step."""


class WaveDecoder(Protocol):
    """Turns frames, which may come in pieces, into samples."""

    def begin(self) -> Any:
        """Return the state of a new voice."""

    def decode(self, codes: Sequence[Tensor], streams: Sequence[Any]) -> list[Tensor]:
        """Return the next samples of each stream, fp32 [n], from its next frames int64 [T, Q].

        If it raises, all streams are unchanged.
        """


class Speaker(Protocol):
    """The networks that speak, and what they need of a prompt."""

    @property
    def samples_per_second(self) -> int: ...

    @property
    def talker(self) -> Talking: ...

    @property
    def code2wav(self) -> WaveDecoder: ...

    @property
    def voices(self) -> tuple[str, ...]:
        """Names of the voices, the default first."""

    @property
    def accept_layer(self) -> int:
        """Number of the text model's layers after which the talker reads the hidden states of media."""

    @property
    def text_end_id(self) -> int:
        """Token of the text model that the talker reads once after the answer's last token."""

    @property
    def text_padding_id(self) -> int:
        """Token of the text model that the talker reads after that."""

    def embed_of(self, model: Any) -> Embed:
        """Return the embedding table: the model's own, or the networks' copy if that is split."""

    def checkpoint_name(self, name: str) -> str | None:
        """Return the name of a tensor of the networks; None for another."""

    def prompt(self, inputs: ModelInputs, voice: str) -> TalkerPrompt:
        """Return the talker's rows before an answer that is spoken by `voice`, one of `voices`."""
