"""The small decoder that gives the codes of a frame after the first, one after the other.

For each frame it reads the talker's hidden state and the embedding of the first code, then its own codes. Nothing is
carried from frame to frame. Frames of several voices are predicted together, each in a page of its own.

Legend of shape suffixes: B voices, T packed rows, D model width, Q codes of a frame, V codes of a codebook.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewright.layers.batch import Batch
from tilewright.layers.decoder import DecoderLayer, hidden_norm, kv_layers_of, ropes_of
from tilewright.layers.linear import GatheredLinear
from tilewright.layers.token_embedding import TokenEmbedding
from tilewright.models.protocol import KvSpec
from tilewright.models.qwen3_omni.config import TALKER, CodePredictorConfig
from tilewright.models.speaking import Choose
from tilewright.ops import backend
from tilewright.ops.kv_cache import TILE_DEPTH, KvCache
from tilewright.ops.plan import scope


class CodePredictor:
    """A head and a table of embeddings for each code but the first, around one decoder."""

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
        self._caches: tuple[KvCache, ...] = ()  # a page for each voice; larger ones when there are more voices
        self._batches: dict[int, list[Batch]] = {}  # by the number of voices, one for each code

    def predict(self, x_TD: Tensor, choose: Choose) -> tuple[list[Tensor], list[Tensor]]:
        """The codes 1 to Q - 1 of one frame of each voice, each int64 [B], and their embeddings, each [B, D].

        Two rows of x are a voice's: what the talker's head read for the first code, and the talker's embedding of it.
        They are overwritten. All that is done here are kernel calls, if `choose` is one: a frame can be recorded.
        """
        num_voices = len(x_TD) // 2
        batches = self._batches_for(num_voices, x_TD.dtype)
        codes: list[Tensor] = []
        rows: list[Tensor] = []
        for i in range(self.num_codes - 1):
            with scope():
                codes.append(choose(self.logits(x_TD, batches[i], i), i + 1).to(x_TD.device))
            rows.append(self.embeddings[i](codes[-1]))
            if i + 2 < self.num_codes:
                x_TD = self.embeddings[i](codes[-1])  # once more: the layers overwrite it
        return codes, rows

    def logits(self, x_TD: Tensor, batch: Batch, i: int) -> Tensor:
        """fp32 [B, V] of code i + 1, from the rows that are new with it; x is overwritten."""
        ropes = self.ropes.tables(batch.positions_AT)
        for layer, rope in zip(self.layers[:-1], ropes, strict=False):
            layer(x_TD, batch, rope)
        last = self.layers[-1](x_TD, batch, ropes[-1], batch.logit_rows)
        return self.heads[i](self.norm(last), out_dtype=torch.float32)

    def _batches_for(self, num_voices: int, dtype: torch.dtype) -> list[Batch]:
        """Which rows each pass has: the first two of a frame, then one after the other."""
        if not self._caches or self._caches[0].num_pages < num_voices or self._caches[0].data.dtype != dtype:
            self._caches = tuple(self._kv.empty_caches(num_voices, self._page_size, dtype))
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
