"""The talker: a decoder over the thinker's input and output that predicts the codes of each frame of speech.

It has no text of its own. A row of its input is the sum of a text row (a row of the thinker's embedding table, or the
thinker's hidden state of a medium's token, projected to the talker's width) and of a codec row (embeddings of the last
frame's codes, or of a codec token):

    rows of user turns | <|im_start|> assistant \\n | pad pad pad pad | bos | the answer's first token
                                                      codec tokens: nothink, think_bos, think_eos, speaker, pad, bos

Text rows are ids of the thinker's vocabulary; the codec tokens are added to the last six rows. After that every row has
the next token of the answer, the end of text after the last, and padding from then on. System prompts and earlier
answers are left out.

The code predictor is a small decoder that predicts the codes of a frame after the first, one by one. It reads the
talker's hidden state and the embedding of the first code, then its own codes. It keeps nothing between frames. Frames
of several sequences are predicted together, each in its own page.

Legend of shape suffixes: T packed rows, D model width, W the thinker's width, B sequences, Q codes of a frame, V codes
of a codebook, A rope axes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tilewright.layers import partition
from tilewright.layers.batch import Batch
from tilewright.layers.decoder import DecoderLayer, hidden_norm, kv_layers_of, ropes_of
from tilewright.layers.embedding import TokenEmbedding
from tilewright.layers.linear import GatheredLinear, Linear
from tilewright.models.protocol import KvSpec
from tilewright.models.qwen3_omni.config import TALKER, CodecTokens, CodePredictorConfig, TalkerConfig, TurnTokens
from tilewright.ops import backend
from tilewright.ops.activation import add
from tilewright.ops.attention import TILE_DEPTH, KvCache
from tilewright.ops.plan import empty, scope
from tilewright.types import RequestError, UnsupportedConfig

# Samples codes int64 [B] from fp32 logits [B, V] of the code at this place of the frame, 1 to Q - 1.
SampleCodes = Callable[[Tensor, int], Tensor]
# Gives rows of the thinker's token embeddings.
Embed = Callable[[Tensor], Tensor]
# `CodePredictor.predict`, recorded or not.
PredictCodes = Callable[[Tensor, SampleCodes], tuple[list[Tensor], list[Tensor]]]

NUM_HEADER_TOKENS = 3  # <|im_start|>, the role and a line break
NUM_PADDING = 4


@dataclass(frozen=True)
class TalkerPrompt:
    """The talker's rows before the answer's first token, and their positions; the row of that token is the last.

    A `SpeechSequence` of the engine holds it.
    """

    text_ids: tuple[int, ...]  # of the thinker's vocabulary; rows of a medium have its placeholder
    codec_ids: tuple[int, ...]  # of the talker's: of the last rows, the one of the answer's first token included
    positions: np.ndarray  # int64 [A, rows], that of the answer's first token included; later ones follow
    media_rows: tuple[int, ...]  # which rows are hidden states of the thinker
    thinker_rows: tuple[int, ...]  # of which tokens of its prompt those are
    answer_ids: tuple[int, ...] = ()  # what the prompt has of the answer itself

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
        """The position of the row after the prompt, on every axis."""
        return int(self.positions[:, -1].max()) + 1


def make_talker_prompt(
    token_ids: Sequence[int],
    positions: np.ndarray,
    turns: TurnTokens,
    codec: CodecTokens,
    speaker: int,
    media_ids: Collection[int],
) -> TalkerPrompt:
    """Return the talker's prompt for a prompt of the thinker and its rope positions [A, T].

    Positions skip the turns that are left out: a turn takes as many as in the thinker's prompt. RequestError if the
    prompt does not end with the beginning of an answer.
    """
    starts = [i for i, token_id in enumerate(token_ids) if token_id == turns.im_start]
    header = tuple(token_ids[starts[-1] : starts[-1] + NUM_HEADER_TOKENS]) if starts else ()
    if len(header) < NUM_HEADER_TOKENS or header[1] != turns.assistant:
        raise RequestError("the prompt does not end with the beginning of an answer, which is what is spoken")
    if starts[0] != 0:
        starts.insert(0, 0)
    answer = starts[-1]
    rows: list[int] = []
    places: list[np.ndarray] = []
    num_before = 0  # positions of the turns so far
    for start, stop in itertools.pairwise(starts):
        if token_ids[start + 1] == turns.user:
            first = positions[:, start].max()
            rows += range(start, stop)
            places.append(positions[:, start:stop] - first + num_before)
            num_before += int(positions[:, stop].max() - first)
    codec_ids = (codec.nothink, codec.think_bos, codec.think_eos, speaker, codec.pad, codec.bos)
    beginning = (*header, *[turns.tts_pad] * NUM_PADDING, turns.tts_bos)
    last = np.broadcast_to(num_before + np.arange(len(beginning) + 1), (len(positions), len(beginning) + 1))
    media = [(row, of) for row, of in enumerate(rows) if token_ids[of] in media_ids]
    return TalkerPrompt(
        text_ids=(*(token_ids[row] for row in rows), *beginning),
        codec_ids=codec_ids,
        positions=np.ascontiguousarray(np.concatenate([*places, last], axis=1)),
        media_rows=tuple(row for row, _ in media),
        thinker_rows=tuple(of for _, of in media),
        answer_ids=tuple(token_ids[answer + NUM_HEADER_TOKENS :]),
    )


class CodePredictor:
    """The decoder that gives the codes of a frame after the first, with a head and embeddings for each.

    A `Talker` holds it.
    """

    def __init__(self, config: CodePredictorConfig, name: str = f"{TALKER}.code_predictor") -> None:
        decoder = config.decoder
        self.config, self.num_codes = config, config.num_code_groups
        own = range(self.num_codes - 1)
        self.embeddings = [
            TokenEmbedding(f"{name}.model.codec_embedding.{i}", decoder.vocab_size, decoder.width) for i in own
        ]
        self.layers = [DecoderLayer(f"{name}.model.layers.{i}", spec, i) for i, spec in enumerate(decoder.layers)]
        self.norm = hidden_norm(f"{name}.model.norm", decoder.width, decoder.norm)
        self.heads = [
            GatheredLinear.named(f"{name}.lm_head.{i}", decoder.vocab_size, decoder.width, what="codes", is_head=True)
            for i in own
        ]
        self.ropes = ropes_of(decoder.layers)
        self._kv = KvSpec(kv_layers_of(self.layers))
        self._page_size = -(-self.num_codes // TILE_DEPTH) * TILE_DEPTH
        self._caches: tuple[KvCache, ...] = ()  # a page for each sequence; larger ones when there are more
        self._batches: dict[int, list[Batch]] = {}  # by the number of sequences, one for each code

    def predict(self, x_TD: Tensor, sample: SampleCodes) -> tuple[list[Tensor], list[Tensor]]:
        """Return the codes 1 to Q - 1 of one frame of each sequence, each int64 [B], and their embeddings, each [B, D].

        Each sequence has two rows of x, which are overwritten: the talker's hidden state for the first code, and the
        talker's embedding of it. Everything here is a kernel call, if `sample` is one, so a frame can be recorded.
        """
        num_sequences = len(x_TD) // 2
        batches = self._batches_for(num_sequences, x_TD.dtype)
        codes: list[Tensor] = []
        rows: list[Tensor] = []
        for i in range(self.num_codes - 1):
            with scope():
                codes.append(sample(self.logits(x_TD, batches[i], i), i + 1).to(x_TD.device))
            rows.append(self.embeddings[i](codes[-1]))
            if i + 2 < self.num_codes:
                x_TD = self.embeddings[i](codes[-1])  # embedded again: the layers overwrite it
        return codes, rows

    def logits(self, x_TD: Tensor, batch: Batch, i: int) -> Tensor:
        """Return fp32 logits [B, V] of code i + 1 from its new rows; x is overwritten."""
        ropes = self.ropes.tables(batch.positions_AT)
        for layer, rope in zip(self.layers[:-1], ropes, strict=False):
            layer(x_TD, batch, rope)
        last = self.layers[-1](x_TD, batch, ropes[-1], batch.logit_rows)
        return self.heads[i](self.norm(last), out_dtype=torch.float32)

    def _batches_for(self, num_sequences: int, dtype: torch.dtype) -> list[Batch]:
        """Return the batch of each pass: the first two rows of a frame, then one row each."""
        if not self._caches or self._caches[0].num_pages < num_sequences or self._caches[0].data.dtype != dtype:
            self._caches = tuple(self._kv.empty_caches(num_sequences, self._page_size, dtype))
            self._batches.clear()
        if num_sequences not in self._batches:
            rows = [(0, 2), *((place, 1) for place in range(2, self.num_codes))]
            self._batches[num_sequences] = [self._batch(num_sequences, first, count) for first, count in rows]
        return self._batches[num_sequences]

    def _batch(self, num_sequences: int, first: int, count: int) -> Batch:
        """Return a batch of rows [first, first + count) of every sequence's frame, with logits of the last of each."""
        device = backend.device()
        sequences, places = torch.arange(num_sequences), torch.arange(first, first + count)
        ends = (sequences + 1) * count
        return Batch(
            token_ids_T=torch.zeros(num_sequences * count, dtype=torch.int64, device=device),
            positions_AT=places.repeat(num_sequences)[None].to(device),
            slots_T=(sequences[:, None] * self._page_size + places).flatten().to(device),
            query_starts=torch.cat((torch.zeros(1), ends)).to(device, torch.int32),
            kv_lengths=torch.full((num_sequences,), first + count, dtype=torch.int32, device=device),
            block_table=sequences[:, None].to(device, torch.int32),
            kv_caches=self._caches,
            logit_rows=(ends - 1).to(device),
        )


NUM_SPECIAL = 1024  # the last ids of the codec's vocabulary are not codes


class Projection:
    """out(act(in(x))): projects rows of the thinker's width to the talker's."""

    def __init__(self, name: str, config: TalkerConfig) -> None:
        inner = config.projection.width
        shard = partition.current().width("projection's width", inner)
        self.activation = config.projection.activation
        self.inner = Linear([(f"{name}.linear_fc1", inner, shard)], config.thinker_width, bias=True)
        self.output = Linear([(f"{name}.linear_fc2", config.text.width)], inner, column_shard=shard, bias=True)

    def __call__(self, x_TW: Tensor) -> Tensor:
        return self.output(self.inner(x_TW, activation=self.activation))


class Talker:
    """The decoder that gives the first code of each frame; its `code_predictor` gives the others.

    A `SpeechModel` holds it. Its vocabulary is the codec's.
    """

    def __init__(self, config: TalkerConfig, name: str = TALKER) -> None:
        text, predictor = config.text, config.code_predictor
        if predictor.decoder.width != text.width:
            raise UnsupportedConfig(
                f"code_predictor_config has hidden_size {predictor.decoder.width}, expected the talker's, {text.width}"
            )
        self.config = config
        self.text_projection = Projection(f"{name}.text_projection", config)
        self.hidden_projection = Projection(f"{name}.hidden_projection", config)
        self.codec_embedding = TokenEmbedding(f"{name}.model.codec_embedding", text.vocab_size, text.width)
        self.layers = [DecoderLayer(f"{name}.model.layers.{i}", spec, i) for i, spec in enumerate(text.layers)]
        self.norm = hidden_norm(f"{name}.model.norm", text.width, text.norm)
        self.head = GatheredLinear.named(
            f"{name}.codec_head", text.vocab_size, text.width, what="codec vocabulary", is_head=True
        )
        self.ropes = ropes_of(text.layers)
        self.code_predictor = CodePredictor(predictor, f"{name}.code_predictor")
        self.kv_spec = KvSpec(kv_layers_of(self.layers))

    @property
    def num_position_axes(self) -> int:
        return self.ropes.num_axes

    @property
    def width(self) -> int:
        return self.config.text.width

    @property
    def vocab_size(self) -> int:
        return self.config.text.vocab_size

    @property
    def eos_id(self) -> int:
        return self.config.codec.eos

    @property
    def suppressed_ids(self) -> tuple[int, ...]:
        """The codec's special ids but its end, which must not be sampled."""
        special = range(self.vocab_size - NUM_SPECIAL, self.vocab_size)
        return tuple(code for code in special if code != self.eos_id)

    def hidden(self, x_TD: Tensor, batch: Batch) -> Tensor:
        """Return normalised hidden states of the rows that the batch asks for [R, D]; x is overwritten."""
        rows = batch.logit_rows
        ropes = self.ropes.tables(batch.positions_AT)
        for layer, rope in zip(self.layers[:-1], ropes, strict=False):
            with scope():
                layer(x_TD, batch, rope)
        out = empty((len(x_TD if rows is None else rows), self.config.text.width), x_TD.dtype)
        with scope():
            self.norm(self.layers[-1](x_TD, batch, ropes[-1], rows), out=out)
        return out

    def logits(self, h_TD: Tensor) -> Tensor:
        """Return fp32 logits [T, V] of what `hidden` returned."""
        return self.head(h_TD, out_dtype=torch.float32)

    def step(self, embed: Embed, text_ids_T: Tensor, codec_TD: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return each row's hidden state and fp32 logits, from the token ids of its text and from its codec row.

        Everything is a kernel call, so a step of one row per sequence can be recorded.
        """
        x_TD = self.text_projection(embed(text_ids_T))
        hidden_TD = self.hidden(add(x_TD, codec_TD, out=x_TD), batch)
        return hidden_TD, self.logits(hidden_TD)

    def complete_frames(
        self, hidden_BD: Tensor, first_codes_B: Tensor, sample: SampleCodes, predict: PredictCodes | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return frames of codes int64 [B, Q], and their codec rows [B, D], which the next step reads.

        They are predicted from the first code of each and the hidden state it was sampled from. A codec row is the sum
        of the embeddings of a frame's codes. `predict` replaces the code predictor's own, by a recorded one.
        """
        embedded = self.codec_embedding(first_codes_B)
        rows = torch.stack((hidden_BD, embedded), dim=1).flatten(0, 1)
        codes, others = (predict or self.code_predictor.predict)(rows, sample)
        total = torch.stack(others).float().sum(0) + embedded.float()
        return torch.stack((first_codes_B, *codes), dim=1), total.to(embedded.dtype)
