"""Computes speech: rows of the talker for several voices at once, frames of codes, and pieces of samples.

A frame is a step of the talker and one pass of the code predictor per further code, each of a few rows: some thousand
kernel calls of microseconds. It is recorded once per number of voices, draws of the codes included, then replayed, so
that Python runs twice per frame.

Legend of shape suffixes: T packed rows, D the talker's width, B voices whose next code is drawn, Q codes of a frame, V
the codec's vocabulary, A rope axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewright.engine.run.replay import MAX_RECORDED_TOKENS, RecordedSteps
from tilewright.engine.speech.voice import CODE_TOP_K, CODE_TOP_P, Voice
from tilewright.layers.batch import Batch
from tilewright.models.speaking import Choose, Embed, Talking, WaveDecoder
from tilewright.ops import backend
from tilewright.ops import sample as ops
from tilewright.ops.attention import KvCache
from tilewright.ops.plan import Arena


class CodeDraws:
    """Sampling parameters of the codes after the first, for a number of voices, in memory with a fixed address."""

    def __init__(self, num_voices: int, num_codes: int) -> None:
        self.temperature = torch.zeros(num_voices)
        self.uniform = torch.zeros(num_codes - 1, num_voices, dtype=torch.float64)
        self._top_k = torch.full((num_voices,), CODE_TOP_K)
        self._top_p = torch.full((num_voices,), CODE_TOP_P)
        self._min_p = torch.zeros(num_voices)
        self._codes = torch.empty(num_codes - 1, num_voices, dtype=torch.int64)
        self._numbers = self.temperature.numpy(), self.uniform.numpy()

    def fill(self, voices: Sequence[Voice]) -> None:
        """Set the parameters and random numbers for these voices' next frames."""
        temperature, uniform = self._numbers
        temperature[:] = [0.0 if voice.params.temperature == 0 else 1.0 for voice in voices]
        uniform[:] = [[voice.uniform(place + 1) for voice in voices] for place in range(len(uniform))]

    def choose(self, logits: Tensor, place: int) -> Tensor:
        """Return the codes at this place of the frames, int64 [B]: one kernel call if logits are on the CPU."""
        uniform, out = self.uniform[place - 1], self._codes[place - 1]
        return ops.sample(logits.cpu(), self.temperature, self._top_k, self._top_p, self._min_p, uniform, out=out)


class _Rows:
    """One row of each voice, as the talker reads it."""

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
    """Recordings of the talker's steps and the code predictor's frames, by number of voices."""

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
        """Return hidden states [B, D] and fp32 logits [B, V] of the next row of each voice, until the next call."""
        count = len(voices)
        rows = self._rows_for(count)
        rows.fill(voices, self._page_size)

        def compute() -> tuple[Tensor, Tensor]:
            return self._talker.step(self._embed, rows.text_ids, rows.codec_BD, rows.batch(self._kv_caches))

        return self._steps.run((count,), compute)

    def predict(self, x_TD: Tensor, choose: Choose) -> tuple[list[Tensor], list[Tensor]]:
        """Run the code predictor's `predict`. `choose` must be equal for equal numbers of voices, and a kernel call."""
        frame_TD = self._rows_for(len(x_TD) // 2).frame_TD
        frame_TD.copy_(x_TD)
        return self._frames.run((len(x_TD),), lambda: self._talker.code_predictor.predict(frame_TD, choose))

    def _rows_for(self, count: int) -> _Rows:
        if count not in self._rows:
            talker = self._talker
            self._rows[count] = _Rows(count, self._num_pages, talker.num_position_axes, talker.width, self._dtype)
        return self._rows[count]


Frame = tuple[list[int], Tensor]  # its codes, and its codec row for the next step


@dataclass(frozen=True)
class TalkerRows:
    """Rows [begin, end) of a voice, computed in one step."""

    voice: Voice
    begin: int
    end: int

    @property
    def is_asked(self) -> bool:
        """Return whether a code is drawn after the last of them."""
        return self.end >= self.voice.prompt.num_rows


class SpeechRunner:
    """The networks that speak, with the talker's keys and values. `embed` looks ids up in the thinker's table."""

    def __init__(
        self,
        talker: Talking,
        code2wav: WaveDecoder,
        embed: Embed,
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        replay: bool = True,
    ) -> None:
        self.talker, self.code2wav = talker, code2wav
        self._embed = embed
        self.page_size, self.num_pages = page_size, num_pages
        self._caches = talker.kv_spec.empty_caches(num_pages, page_size, dtype)
        self._arena = Arena()
        self._draws: dict[int, CodeDraws] = {}  # by the number of voices
        self._recorded: RecordedFrames | None = None
        if replay:
            self._recorded = RecordedFrames(
                talker,
                embed,
                self._caches,
                num_pages=num_pages,
                page_size=page_size,
                dtype=dtype,
                arena=self._arena,
            )
        self._is_banned = torch.zeros(talker.vocab_size, dtype=torch.bool)
        self._is_banned[list(talker.never_said)] = True

    @torch.inference_mode()
    def speak(self, rows: Sequence[TalkerRows]) -> None:
        """Compute rows of voices. A voice whose code is drawn gains a frame, or is finished.

        If it raises, every voice is unchanged: computing the same rows again writes the same keys and values, and draws
        the same codes.
        """
        hidden_BD, logits_BV = self._step(rows)
        asked = [item.voice for item in rows if item.is_asked]
        frames = self._frames(hidden_BD, logits_BV, asked) if asked else []
        for item in rows:
            item.voice.num_computed = item.end
        for voice, frame in zip(asked, frames, strict=True):
            if frame is None:
                voice.is_finished = True
            else:
                voice.say(*frame)

    @torch.inference_mode()
    def decode(self, pieces: Sequence[tuple[Any, Sequence[Sequence[int]]]]) -> list[Tensor]:
        """Return the samples of each stream's next frames, fp32 [n]. If it raises, streams are unchanged."""
        codes = [torch.tensor(frames, device=backend.device()) for _, frames in pieces]
        with self._arena.use():
            return [samples.cpu() for samples in self.code2wav.decode(codes, [stream for stream, _ in pieces])]

    def _step(self, rows: Sequence[TalkerRows]) -> tuple[Tensor, Tensor]:
        """Return the hidden states that the talker's head reads, and the logits, until the next step."""
        is_one_each = all(item.begin >= item.voice.prompt.num_rows for item in rows)
        if self._recorded is not None and is_one_each and len(rows) <= MAX_RECORDED_TOKENS:
            return self._recorded.step([item.voice for item in rows])
        with self._arena.use():
            hidden_BD = self.talker.hidden(self._inputs(rows), self._batch(rows))
            return hidden_BD, self.talker.logits(hidden_BD)

    def _frames(self, hidden_BD: Tensor, logits_BV: Tensor, voices: Sequence[Voice]) -> list[Frame | None]:
        """Return the next frame of each voice; None if its code is the end."""
        codes = self._first_codes(logits_BV, voices)
        goes_on = codes != self.talker.end_id
        is_going = goes_on.tolist()
        going = [voice for voice, goes in zip(voices, is_going, strict=True) if goes]
        if not going:
            return [None] * len(voices)
        frames = iter(self._complete(hidden_BD[goes_on.to(hidden_BD.device)], codes[goes_on], going))
        return [next(frames) if goes else None for goes in is_going]

    def _complete(self, hidden_BD: Tensor, codes_B: Tensor, voices: Sequence[Voice]) -> list[Frame]:
        """Return the frames with these first codes."""
        count = len(voices)
        if count not in self._draws:
            self._draws[count] = CodeDraws(count, self.talker.code_predictor.num_codes)
        draws = self._draws[count]
        draws.fill(voices)
        predict = None if self._recorded is None or count > MAX_RECORDED_TOKENS else self._recorded.predict
        frames, rows = self.talker.complete_frames(hidden_BD, codes_B.to(hidden_BD.device), draws.choose, predict)
        return list(zip(frames.tolist(), rows, strict=True))

    def _first_codes(self, logits_BV: Tensor, voices: Sequence[Voice]) -> Tensor:
        """Return the next first code of each voice, int64 [B]."""
        logits = logits_BV.cpu()
        logits[:, self._is_banned] = -torch.inf
        said = [torch.tensor(sorted({frame[0] for frame in voice.frames}), dtype=torch.int64) for voice in voices]
        count = len(voices)
        ops.penalize(
            logits,
            torch.tensor([0, *(len(codes) for codes in said)]).cumsum(0),
            torch.cat(said),
            torch.ones(sum(len(codes) for codes in said), dtype=torch.int32),
            torch.tensor([voice.params.repetition_penalty for voice in voices]),
            torch.zeros(count),
            torch.zeros(count),
        )
        return ops.sample(
            logits,
            torch.tensor([voice.params.temperature for voice in voices]),
            torch.tensor([voice.params.top_k for voice in voices]),
            torch.tensor([voice.params.top_p for voice in voices]),
            torch.zeros(count),
            torch.tensor([voice.uniform(0) for voice in voices], dtype=torch.float64),
        )

    def _inputs(self, rows: Sequence[TalkerRows]) -> Tensor:
        """Return the talker's inputs [T, D]: embedded text or states of media, plus codec rows."""
        device = backend.device()
        text_ids: list[int] = []
        media: list[tuple[int, Tensor]] = []  # the first row, states
        media_rows: list[int] = []
        codec_rows: list[int] = []
        codec_ids: list[int] = []
        frame_rows: list[int] = []
        frames: list[Tensor] = []
        for item in rows:
            voice, first = item.voice, len(text_ids) - item.begin
            for row in range(item.begin, item.end):
                text_id = voice.text_id(row)
                assert text_id is not None, "a row is computed before its text is written"
                text_ids.append(text_id)
                if row >= voice.prompt.num_rows:
                    assert voice.codec_row is not None
                    frame_rows.append(first + row)
                    frames.append(voice.codec_row)
                elif (codec_id := voice.prompt.codec_id(row)) is not None:
                    codec_rows.append(first + row)
                    codec_ids.append(codec_id)
            places, states = voice.media_state_rows(item.begin, item.end)
            if states is not None:
                media_rows += [first + place for place in places]
                media.append((first, states))
        x_TD = self.talker.text_projection(self._embed(torch.tensor(text_ids, device=device)))
        if media:
            x_TD[media_rows] = self.talker.hidden_projection(torch.cat([states for _, states in media]).to(x_TD.dtype))
        if codec_ids:
            x_TD[codec_rows] += self.talker.codec_embedding(torch.tensor(codec_ids, device=device))
        if frames:
            x_TD[frame_rows] += torch.stack(frames)
        return x_TD

    def _batch(self, rows: Sequence[TalkerRows]) -> Batch:
        device, page_size = backend.device(), self.page_size
        positions, slots = [], []
        for item in rows:
            voice, prompt = item.voice, item.voice.prompt
            positions.append(
                torch.from_numpy(prompt.positions[:, item.begin : item.end])
                if item.end <= prompt.num_rows
                else torch.full((self.talker.num_position_axes, 1), voice.position(item.begin))
            )
            places = torch.arange(item.begin, item.end)
            slots.append(torch.tensor(voice.pages)[places // page_size] * page_size + places % page_size)
        counts = [item.end - item.begin for item in rows]
        ends = torch.tensor(counts).cumsum(0)
        table = torch.zeros(len(rows), max(len(item.voice.pages) for item in rows), dtype=torch.int32)
        for pages, item in zip(table, rows, strict=True):
            pages[: len(item.voice.pages)] = torch.tensor(item.voice.pages)
        asked = [end - 1 for end, item in zip(ends.tolist(), rows, strict=True) if item.is_asked]
        return Batch(
            token_ids_T=torch.zeros(sum(counts), dtype=torch.int64, device=device),
            positions_AT=torch.cat(positions, dim=1).contiguous().to(device),
            slots_T=torch.cat(slots).to(device),
            query_starts=torch.tensor([0, *ends.tolist()], dtype=torch.int32, device=device),
            kv_lengths=torch.tensor([item.end for item in rows], dtype=torch.int32, device=device),
            block_table=table.to(device),
            kv_caches=self._caches,
            logit_rows=torch.tensor(asked, dtype=torch.int64, device=device),
        )
