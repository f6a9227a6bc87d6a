"""A frame of each of several voices over fixed buffers: recorded once for each number of voices, then replayed.

A frame is a step of the talker and as many passes of the code predictor as it has further codes, each of a few rows:
some thousand kernel calls of microseconds. What is recorded draws the codes too, so that Python runs twice a frame.

Legend of shape suffixes: B voices, D the talker's width, Q codes of a frame, A rope axes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilewright.engine.recorded_steps import RecordedSteps
from tilewright.engine.speech.voice import CODE_TOP_K, CODE_TOP_P, Voice
from tilewright.layers.batch import Batch
from tilewright.models.speaking import Choose, Embed, Talking
from tilewright.ops import sample as ops
from tilewright.ops.kv_cache import KvCache
from tilewright.ops.plan import Arena


class CodeDraws:
    """How the codes after the first are drawn for so many voices, in memory that stays where it is."""

    def __init__(self, num_voices: int, num_codes: int) -> None:
        self.temperature = torch.zeros(num_voices)
        self.uniform = torch.zeros(num_codes - 1, num_voices, dtype=torch.float64)
        self._top_k = torch.full((num_voices,), CODE_TOP_K)
        self._top_p = torch.full((num_voices,), CODE_TOP_P)
        self._min_p = torch.zeros(num_voices)
        self._codes = torch.empty(num_codes - 1, num_voices, dtype=torch.int64)
        self._numbers = self.temperature.numpy(), self.uniform.numpy()

    def fill(self, voices: Sequence[Voice]) -> None:
        """For the next frames of these voices."""
        temperature, uniform = self._numbers
        temperature[:] = [0.0 if voice.params.temperature == 0 else 1.0 for voice in voices]
        uniform[:] = [[voice.uniform(place + 1) for voice in voices] for place in range(len(uniform))]

    def choose(self, logits: Tensor, place: int) -> Tensor:
        """The codes at this place of the frames, int64 [B]: one kernel call where logits are on the CPU."""
        uniform, out = self.uniform[place - 1], self._codes[place - 1]
        return ops.sample(logits.cpu(), self.temperature, self._top_k, self._top_p, self._min_p, uniform, out=out)


class _Rows:
    """One row of each of so many voices, as the talker reads it."""

    def __init__(self, num_voices: int, num_pages: int, num_axes: int, width: int, dtype: torch.dtype) -> None:
        self.text_ids = torch.zeros(num_voices, dtype=torch.int64)
        self.codec_BD = torch.empty(num_voices, width, dtype=dtype)
        self.positions = torch.zeros(num_axes, num_voices, dtype=torch.int64)
        self.slots = torch.zeros(num_voices, dtype=torch.int64)
        self.query_starts = torch.arange(num_voices + 1, dtype=torch.int32)
        self.kv_lengths = torch.zeros(num_voices, dtype=torch.int32)
        self.block_table = torch.zeros(num_voices, num_pages, dtype=torch.int32)
        self.frame_TD = torch.empty(2 * num_voices, width, dtype=dtype)

    def fill(self, voices: Sequence[Voice], page_size: int) -> None:
        places = [voice.num_computed for voice in voices]
        self.text_ids.numpy()[:] = [voice.text_id(place) for voice, place in zip(voices, places, strict=True)]
        self.positions.numpy()[:] = [voice.position(place) for voice, place in zip(voices, places, strict=True)]
        self.kv_lengths.numpy()[:] = [place + 1 for place in places]
        table, slots = self.block_table.numpy(), self.slots.numpy()
        for i, (voice, place) in enumerate(zip(voices, places, strict=True)):
            assert voice.codec_row is not None
            self.codec_BD[i] = voice.codec_row
            table[i, : len(voice.pages)] = voice.pages
            slots[i] = voice.pages[place // page_size] * page_size + place % page_size

    def batch(self, kv_caches: Sequence[KvCache]) -> Batch:
        return Batch(
            token_ids_T=self.text_ids,
            positions_AT=self.positions,
            slots_T=self.slots,
            query_starts=self.query_starts,
            kv_lengths=self.kv_lengths,
            block_table=self.block_table,
            kv_caches=kv_caches,
        )


class RecordedFrames:
    """The talker's steps and the code predictor's frames, by the number of voices."""

    def __init__(
        self,
        talker: Talking,
        embed: Embed,
        kv_caches: Sequence[KvCache],
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        arena: Arena,
    ) -> None:
        self._talker, self._embed, self._kv_caches = talker, embed, kv_caches
        self._num_pages, self._page_size, self._dtype = num_pages, page_size, dtype
        self._rows: dict[int, _Rows] = {}
        self._steps: RecordedSteps[tuple[Tensor, Tensor]] = RecordedSteps(arena)
        self._frames: RecordedSteps[tuple[list[Tensor], list[Tensor]]] = RecordedSteps(arena)

    def step(self, voices: Sequence[Voice]) -> tuple[Tensor, Tensor]:
        """Hidden states [B, D] and fp32 logits [B, V] of the next row of each voice, until the next call of either."""
        count = len(voices)
        rows = self._rows_for(count)
        rows.fill(voices, self._page_size)

        def compute() -> tuple[Tensor, Tensor]:
            return self._talker.step(self._embed, rows.text_ids, rows.codec_BD, rows.batch(self._kv_caches))

        return self._steps.run((count,), compute)

    def predict(self, x_TD: Tensor, choose: Choose) -> tuple[list[Tensor], list[Tensor]]:
        """As the code predictor's. `choose` is the same for equal numbers of voices, and a kernel call."""
        frame_TD = self._rows_for(len(x_TD) // 2).frame_TD
        frame_TD.copy_(x_TD)
        return self._frames.run((len(x_TD),), lambda: self._talker.code_predictor.predict(frame_TD, choose))

    def _rows_for(self, count: int) -> _Rows:
        if count not in self._rows:
            talker = self._talker
            self._rows[count] = _Rows(count, self._num_pages, talker.num_position_axes, talker.width, self._dtype)
        return self._rows[count]
