"""The small decoder that gives the codes of a frame after the first, one after the other.

For each frame it reads the talker's hidden state and the embedding of the first code, then its own codes. Nothing is
carried from frame to frame. Frames of several voices are predicted together, each in a page of its own.

Legend of shape suffixes: B voices, T packed rows, D model width, Q codes of a frame, V codes of a codebook.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tilewright.layers.attention import heads_of
from tilewright.layers.batch import Batch
from tilewright.layers.decoder import DecoderLayer, hidden_norm
from tilewright.layers.linear import GatheredLinear
from tilewright.layers.rope import Rope
from tilewright.layers.token_embedding import TokenEmbedding
from tilewright.models.qwen3_omni.config import TALKER, CodePredictorConfig
from tilewright.ops import backend
from tilewright.ops.kv_cache import TILE_DEPTH, KvCache

# Tokens from fp32 logits [B, V] of the code at this place of the frame, 1 to Q - 1.
Choose = Callable[[Tensor, int], Tensor]


class CodePredictor:
    """A head and a table of embeddings for each code but the first, around one decoder."""

    def __init__(self, config: CodePredictorConfig, name: str = f"{TALKER}.code_predictor") -> None:
        decoder = config.decoder
        self.config, self.num_codes = config, config.num_code_groups
        own = range(self.num_codes - 1)
        self.embeddings = [
            TokenEmbedding(f"{name}.model.codec_embedding.{i}", decoder.vocab_size, decoder.width) for i in own
        ]
        self.layers = [DecoderLayer(f"{name}.model.layers.{i}", decoder, i, i) for i in range(decoder.num_layers)]
        self.norm = hidden_norm(f"{name}.model.norm", decoder)
        self.heads = [
            GatheredLinear.named(f"{name}.lm_head.{i}", decoder.vocab_size, decoder.width, what="codes", is_head=True)
            for i in own
        ]
        self.rope = Rope(decoder.rope)
        self._num_kv_heads = heads_of(decoder.attention).num_keys
        self._page_size = -(-self.num_codes // TILE_DEPTH) * TILE_DEPTH
        self._caches: tuple[KvCache, ...] = ()  # a page for each voice; larger ones when there are more voices
        self._batches: dict[int, list[Batch]] = {}  # by the number of voices, one for each code

    def predict(self, hidden_BD: Tensor, embedded_BD: Tensor, choose: Choose) -> Tensor:
        """The codes 1 to Q - 1 of one frame of each voice, int64 [B, Q - 1].

        `hidden_BD` is what the talker's head read for the first code, `embedded_BD` the talker's embedding of it.
        """
        num_voices = len(hidden_BD)
        batches = self._batches_for(num_voices, hidden_BD.dtype)
        codes: list[Tensor] = []
        for i in range(self.num_codes - 1):
            if i == 0:
                x_TD = torch.stack((hidden_BD, embedded_BD), dim=1).flatten(0, 1)
            else:
                x_TD = self.embeddings[i - 1](codes[-1])
            codes.append(choose(self.logits(x_TD, batches[i], i), i + 1).to(x_TD.device))
        return torch.stack(codes, dim=1)

    def logits(self, x_TD: Tensor, batch: Batch, i: int) -> Tensor:
        """fp32 [B, V] of code i + 1, from the rows that are new with it; x is overwritten."""
        cos, sin = self.rope.tables(batch.positions_AT)
        for layer in self.layers[:-1]:
            layer(x_TD, batch, cos, sin)
        last = self.layers[-1](x_TD, batch, cos, sin, batch.logit_rows)
        return self.heads[i](self.norm(last), out_dtype=torch.float32)

    def embed(self, codes_BQ: Tensor) -> Tensor:
        """The sum of the embeddings of codes 1 to Q - 1, fp32 [B, D]."""
        rows = [table(codes_B) for table, codes_B in zip(self.embeddings, codes_BQ.t().contiguous(), strict=True)]
        return torch.stack(rows).float().sum(0)

    def _batches_for(self, num_voices: int, dtype: torch.dtype) -> list[Batch]:
        """Which rows each pass has: the first two of a frame, then one after the other."""
        if not self._caches or self._caches[0].num_pages < num_voices or self._caches[0].data.dtype != dtype:
            shape = num_voices, self._page_size, self._num_kv_heads, self.config.decoder.attention.head_width
            self._caches = tuple(KvCache.empty(*shape, dtype) for _ in self.layers)
            self._batches.clear()
        if num_voices not in self._batches:
            rows = [(0, 2), *((place, 1) for place in range(2, self.num_codes))]
            self._batches[num_voices] = [self._batch(num_voices, first, count) for first, count in rows]
        return self._batches[num_voices]

    def _batch(self, num_voices: int, first: int, count: int) -> Batch:
        """Rows [first, first + count) of every voice's frame; the last of each is asked for."""
        device = backend.device()
        voices, places = torch.arange(num_voices), torch.arange(first, first + count)
        ends = (voices + 1) * count
        return Batch(
            token_ids_T=torch.zeros(num_voices * count, dtype=torch.int64, device=device),
            positions_AT=places.repeat(num_voices)[None].to(device),
            slots_T=(voices[:, None] * self._page_size + places).flatten().to(device),
            query_starts=torch.cat((torch.zeros(1), ends)).to(device, torch.int32),
            kv_lengths=torch.full((num_voices,), first + count, dtype=torch.int32, device=device),
            block_table=voices[:, None].to(device, torch.int32),
            kv_caches=self._caches,
            logit_rows=(ends - 1).to(device),
        )
