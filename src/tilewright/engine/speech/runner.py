"""Computes speech: rows of the talker for several sequences at once, frames of codes, and pieces of samples.

A frame is a step of the talker and as many passes of the code predictor as it has further codes, each of a few rows:
some thousand kernel calls of microseconds. It is recorded once for each number of sequences, the sampling of codes
included, then replayed, so that Python runs twice a frame.

Legend of shape suffixes: T packed rows, D the talker's width, B sequences whose next code is sampled, Q codes of a
frame, V the codec's vocabulary, A rope axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.engine.run.replay import MAX_RECORDED_TOKENS, RecordedSteps
from tilewright.engine.speech.sequence import CODE_TOP_K, CODE_TOP_P, SpeechSequence
from tilewright.layers.batch import Batch
from tilewright.models.qwen3_omni.model import SpeechModel
from tilewright.models.qwen3_omni.talker import Embed, SampleCodes, Talker
from tilewright.ops import backend
from tilewright.ops import sample as ops
from tilewright.ops.attention import KvCache
from tilewright.ops.plan import Arena


class CodeSampler:
    """Samples the codes after the first of so many sequences' frames, with parameters in memory that stays in place."""

    def __init__(self, num_sequences: int, num_codes: int) -> None:
        self._temperature = torch.zeros(num_sequences)
        self._uniform = torch.zeros(num_codes - 1, num_sequences, dtype=torch.float64)
        self._top_k = torch.full((num_sequences,), CODE_TOP_K)
        self._top_p = torch.full((num_sequences,), CODE_TOP_P)
        self._min_p = torch.zeros(num_sequences)
        self._codes = torch.empty(num_codes - 1, num_sequences, dtype=torch.int64)

    def fill(self, sequences: Sequence[SpeechSequence]) -> None:
        """Set temperatures and random numbers for the next frames of these sequences."""
        temperature, uniform = self._temperature.numpy(), self._uniform.numpy()
        temperature[:] = [0.0 if sequence.params.temperature == 0 else 1.0 for sequence in sequences]
        uniform[:] = [[sequence.uniform(place + 1) for sequence in sequences] for place in range(len(uniform))]

    def sample(self, logits: Tensor, place: int) -> Tensor:
        """Return the codes at this place of the frames, int64 [B]: one kernel call where logits are on the CPU."""
        uniform, out = self._uniform[place - 1], self._codes[place - 1]
        return ops.sample(logits.cpu(), self._temperature, self._top_k, self._top_p, self._min_p, uniform, out=out)


class _StepInputs:
    """One row of each of so many sequences, as the talker reads it, in memory that stays in place."""

    def __init__(self, num_sequences: int, num_pages: int, num_axes: int, width: int, dtype: torch.dtype) -> None:
        self.text_ids = torch.zeros(num_sequences, dtype=torch.int64)
        self.codec_BD = torch.empty(num_sequences, width, dtype=dtype)
        self.positions = torch.zeros(num_axes, num_sequences, dtype=torch.int64)
        self.slots = torch.zeros(num_sequences, dtype=torch.int64)
        self.query_starts = torch.arange(num_sequences + 1, dtype=torch.int32)
        self.kv_lengths = torch.zeros(num_sequences, dtype=torch.int32)
        self.block_table = torch.zeros(num_sequences, num_pages, dtype=torch.int32)
        self.frame_TD = torch.empty(2 * num_sequences, width, dtype=dtype)

    def fill(self, sequences: Sequence[SpeechSequence], page_size: int) -> None:
        self.text_ids.numpy()[:] = [sequence.text_id(sequence.num_computed) for sequence in sequences]
        self.positions.numpy()[:] = [sequence.position(sequence.num_computed) for sequence in sequences]
        self.kv_lengths.numpy()[:] = [sequence.num_computed + 1 for sequence in sequences]
        table, slots = self.block_table.numpy(), self.slots.numpy()
        for i, sequence in enumerate(sequences):
            assert sequence.codec_row is not None
            self.codec_BD[i] = sequence.codec_row
            table[i, : len(sequence.pages)] = sequence.pages
            page, offset = divmod(sequence.num_computed, page_size)
            slots[i] = sequence.pages[page] * page_size + offset

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
    """The talker's steps and the code predictor's frames, recorded by the number of sequences."""

    def __init__(
        self,
        talker: Talker,
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
        self._inputs: dict[int, _StepInputs] = {}
        self._steps: RecordedSteps[tuple[Tensor, Tensor]] = RecordedSteps(arena)
        self._frames: RecordedSteps[tuple[list[Tensor], list[Tensor]]] = RecordedSteps(arena)

    def step(self, sequences: Sequence[SpeechSequence]) -> tuple[Tensor, Tensor]:
        """Return hidden states [B, D] and fp32 logits [B, V] of the next row of each sequence.

        They are overwritten by the next call of either method.
        """
        count = len(sequences)
        inputs = self._inputs_for(count)
        inputs.fill(sequences, self._page_size)

        def compute() -> tuple[Tensor, Tensor]:
            return self._talker.step(self._embed, inputs.text_ids, inputs.codec_BD, inputs.batch(self._kv_caches))

        return self._steps.run((count,), compute)

    def predict(self, x_TD: Tensor, sample: SampleCodes) -> tuple[list[Tensor], list[Tensor]]:
        """Do what `CodePredictor.predict` does, recorded: `sample` is the one of this number of sequences."""
        frame_TD = self._inputs_for(len(x_TD) // 2).frame_TD
        frame_TD.copy_(x_TD)
        return self._frames.run((len(x_TD),), lambda: self._talker.code_predictor.predict(frame_TD, sample))

    def _inputs_for(self, count: int) -> _StepInputs:
        if count not in self._inputs:
            num_axes, width = self._talker.num_position_axes, self._talker.width
            self._inputs[count] = _StepInputs(count, self._num_pages, num_axes, width, self._dtype)
        return self._inputs[count]


Frame = tuple[list[int], Tensor]  # its codes, and its codec row for the next step


@dataclass(frozen=True)
class TalkerChunk:
    """Rows [begin, end) of a sequence, to be computed in one step."""

    sequence: SpeechSequence
    begin: int
    end: int

    @property
    def needs_frame(self) -> bool:
        """Whether a frame follows the last of the rows."""
        return self.end >= self.sequence.prompt.num_rows


class SpeechRunner:
    """Runs the talker, the code predictor and code2wav, with the talker's keys and values. `SpeechScheduler` holds it.

    `embed` gives rows of the thinker's token embeddings.
    """

    def __init__(
        self,
        model: SpeechModel,
        embed: Embed,
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        replay: bool = True,
    ) -> None:
        self.model, self.talker = model, model.talker
        self._embed = embed
        self.page_size, self.num_pages = page_size, num_pages
        self._caches = self.talker.kv_spec.empty_caches(num_pages, page_size, dtype)
        self._arena = Arena()
        self._code_samplers: dict[int, CodeSampler] = {}  # by the number of sequences
        self._recorded: RecordedFrames | None = None
        if replay:
            self._recorded = RecordedFrames(
                self.talker,
                embed,
                self._caches,
                num_pages=num_pages,
                page_size=page_size,
                dtype=dtype,
                arena=self._arena,
            )
        self._is_suppressed = torch.zeros(self.talker.vocab_size, dtype=torch.bool)
        self._is_suppressed[list(self.talker.suppressed_ids)] = True

    @torch.inference_mode()
    def compute_frames(self, chunks: Sequence[TalkerChunk]) -> None:
        """Compute rows of sequences. A sequence whose chunk needs a frame gains one, or is finished.

        Where it raises, every sequence is as it was: the same rows write the same keys and values, and the same codes
        are sampled, when they are computed again.
        """
        hidden_BD, logits_BV = self._step(chunks)
        sequences = [chunk.sequence for chunk in chunks if chunk.needs_frame]
        frames = self._frames(hidden_BD, logits_BV, sequences) if sequences else []
        for chunk in chunks:
            chunk.sequence.num_computed = chunk.end
        for sequence, frame in zip(sequences, frames, strict=True):
            if frame is None:
                sequence.is_finished = True
            else:
                sequence.append_frame(*frame)

    @torch.inference_mode()
    def decode(self, pieces: Sequence[tuple[SpeechSequence, Sequence[Sequence[int]]]]) -> list[Tensor]:
        """Return the samples of each sequence's next frames, fp32 [n]. Where it raises, the sequences are as before."""
        codes = [torch.tensor(frames, device=backend.device()) for _, frames in pieces]
        states = [sequence.code2wav_state for sequence, _ in pieces]
        with self._arena.use():
            return [samples.cpu() for samples in self.model.code2wav.decode(codes, states)]

    def _step(self, chunks: Sequence[TalkerChunk]) -> tuple[Tensor, Tensor]:
        """Return hidden states and logits of the rows that a frame follows; the next step overwrites them."""
        is_one_each = all(chunk.begin >= chunk.sequence.prompt.num_rows for chunk in chunks)
        if self._recorded is not None and is_one_each and len(chunks) <= MAX_RECORDED_TOKENS:
            return self._recorded.step([chunk.sequence for chunk in chunks])
        with self._arena.use():
            hidden_BD = self.talker.hidden(self._inputs(chunks), self._batch(chunks))
            return hidden_BD, self.talker.logits(hidden_BD)

    def _frames(self, hidden_BD: Tensor, logits_BV: Tensor, sequences: Sequence[SpeechSequence]) -> list[Frame | None]:
        """Return the next frame of each sequence; None where the sampled code is the end."""
        codes = self._first_codes(logits_BV, sequences)
        goes_on = codes != self.talker.eos_id
        is_going = goes_on.tolist()
        going = [sequence for sequence, goes in zip(sequences, is_going, strict=True) if goes]
        if not going:
            return [None] * len(sequences)
        frames = iter(self._complete(hidden_BD[goes_on.to(hidden_BD.device)], codes[goes_on], going))
        return [next(frames) if goes else None for goes in is_going]

    def _complete(self, hidden_BD: Tensor, codes_B: Tensor, sequences: Sequence[SpeechSequence]) -> list[Frame]:
        """Return the frames that begin with these codes."""
        count = len(sequences)
        if count not in self._code_samplers:
            self._code_samplers[count] = CodeSampler(count, self.talker.code_predictor.num_codes)
        sampler = self._code_samplers[count]
        sampler.fill(sequences)
        predict = None if self._recorded is None or count > MAX_RECORDED_TOKENS else self._recorded.predict
        frames, rows = self.talker.complete_frames(hidden_BD, codes_B.to(hidden_BD.device), sampler.sample, predict)
        return list(zip(frames.tolist(), rows, strict=True))

    def _first_codes(self, logits_BV: Tensor, sequences: Sequence[SpeechSequence]) -> Tensor:
        """Return the first code of each sequence's next frame, int64 [B]."""
        logits = logits_BV.cpu()
        logits[:, self._is_suppressed] = -torch.inf
        firsts = ({frame[0] for frame in sequence.frames} for sequence in sequences)
        earlier = [torch.tensor(sorted(codes), dtype=torch.int64) for codes in firsts]
        count = len(sequences)
        ops.penalize(
            logits,
            torch.tensor([0, *(len(codes) for codes in earlier)]).cumsum(0),
            torch.cat(earlier),
            torch.ones(sum(len(codes) for codes in earlier), dtype=torch.int32),
            torch.tensor([sequence.params.repetition_penalty for sequence in sequences]),
            torch.zeros(count),
            torch.zeros(count),
        )
        return ops.sample(
            logits,
            torch.tensor([sequence.params.temperature for sequence in sequences]),
            torch.tensor([sequence.params.top_k for sequence in sequences]),
            torch.tensor([sequence.params.top_p for sequence in sequences]),
            torch.zeros(count),
            torch.tensor([sequence.uniform(0) for sequence in sequences], dtype=torch.float64),
        )

    def _inputs(self, chunks: Sequence[TalkerChunk]) -> Tensor:
        """Return the talker's inputs [T, D]: text rows or projected states of media, plus codec rows."""
        device = backend.device()
        text_ids: list[int] = []
        media: list[tuple[int, Tensor]] = []  # the first row, states
        media_rows: list[int] = []
        codec_rows: list[int] = []
        codec_ids: list[int] = []
        frame_rows: list[int] = []
        frames: list[Tensor] = []
        for chunk in chunks:
            sequence, first = chunk.sequence, len(text_ids) - chunk.begin
            for row in range(chunk.begin, chunk.end):
                text_id = sequence.text_id(row)
                assert text_id is not None, "a row is computed before its text is written"
                text_ids.append(text_id)
                if row >= sequence.prompt.num_rows:
                    assert sequence.codec_row is not None
                    frame_rows.append(first + row)
                    frames.append(sequence.codec_row)
                elif (codec_id := sequence.prompt.codec_id(row)) is not None:
                    codec_rows.append(first + row)
                    codec_ids.append(codec_id)
            places, states = sequence.media_state_rows(chunk.begin, chunk.end)
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

    def _batch(self, chunks: Sequence[TalkerChunk]) -> Batch:
        device, page_size = backend.device(), self.page_size
        positions, slots = [], []
        for chunk in chunks:
            sequence, prompt = chunk.sequence, chunk.sequence.prompt
            positions.append(
                torch.from_numpy(prompt.positions[:, chunk.begin : chunk.end])
                if chunk.end <= prompt.num_rows
                else torch.full((self.talker.num_position_axes, 1), sequence.position(chunk.begin))
            )
            places = torch.arange(chunk.begin, chunk.end)
            slots.append(torch.tensor(sequence.pages)[places // page_size] * page_size + places % page_size)
        counts = [chunk.end - chunk.begin for chunk in chunks]
        ends = torch.tensor(counts).cumsum(0)
        table = torch.zeros(len(chunks), max(len(chunk.sequence.pages) for chunk in chunks), dtype=torch.int32)
        for pages, chunk in zip(table, chunks, strict=True):
            pages[: len(chunk.sequence.pages)] = torch.tensor(chunk.sequence.pages)
        ends_with_frame = [end - 1 for end, chunk in zip(ends.tolist(), chunks, strict=True) if chunk.needs_frame]
        return Batch(
            token_ids_T=torch.zeros(sum(counts), dtype=torch.int64, device=device),
            positions_AT=torch.cat(positions, dim=1).contiguous().to(device),
            slots_T=torch.cat(slots).to(device),
            query_starts=torch.tensor([0, *ends.tolist()], dtype=torch.int32, device=device),
            kv_lengths=torch.tensor([chunk.end for chunk in chunks], dtype=torch.int32, device=device),
            block_table=table.to(device),
            kv_caches=self._caches,
            logit_rows=torch.tensor(ends_with_frame, dtype=torch.int64, device=device),
        )
