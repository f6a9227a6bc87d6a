"""The multi-token predictor of Qwen3.5 and Qwen3-Next: from a token's hidden state and the next token, the one after.

    drafted_RD = mtp(decoder, next_token_ids_T, hidden_TD, batch)   # then decoder.logits(drafted_RD)

Row t has the model's hidden state of the token at t (what its head reads: after the final norm) and the id of the token
that follows it, at the place and position of the token at t. What comes out is again what the head reads: its logits
are of the second token after t, and it is the hidden state from which a further token is drafted. Rows attend to each
other in a cache of keys and values of the predictor's own, the last of the batch's.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tilewright.layers.attention import AttentionConfig
from tilewright.layers.batch import Batch, MediaRun
from tilewright.layers.cost import PredictorCost, linear_cost
from tilewright.layers.decoder import Decoder, DecoderLayer, LayerSpec, hidden_norm
from tilewright.layers.linear import GatheredLinear
from tilewright.ops.plan import empty, scope

PREFIX = "mtp"


class MultiTokenPredictor:
    """One attention layer over [norm(embedding of the next token) | norm(hidden state)], projected to the width.

    Embedding, head and rope are the decoder's. `kv_layer` is which of the batch's caches is its own.
    """

    def __init__(self, spec: LayerSpec, kv_layer: int) -> None:
        assert isinstance(spec.attention, AttentionConfig)
        self.attention = spec.attention
        width, norm = spec.attention.width, spec.norm
        self.embedding_norm = hidden_norm(f"{PREFIX}.pre_fc_norm_embedding", width, norm)
        self.hidden_norm = hidden_norm(f"{PREFIX}.pre_fc_norm_hidden", width, norm)
        self.projection = GatheredLinear.named(f"{PREFIX}.fc", width, 2 * width, what="predictor's projection")
        self.layer = DecoderLayer(f"{PREFIX}.layers.0", spec, kv_layer)
        self.norm = hidden_norm(f"{PREFIX}.norm", width, norm)

    def __call__(
        self,
        decoder: Decoder,
        next_token_ids_T: Tensor,
        hidden_TD: Tensor,
        batch: Batch,
        next_media: Sequence[MediaRun] = (),
    ) -> Tensor:
        """What the head reads for the second token after each logit row of the batch [R, D]; all leave keys and values.

        `batch` says where the rows stand; its ids and media are not read. `next_media` are the runs of rows whose
        next token is a medium's.
        """
        width, rows = self.attention.width, batch.logit_rows
        out = empty((len(hidden_TD if rows is None else rows), width), hidden_TD.dtype)
        with scope():
            x_TD = empty((len(hidden_TD), width), hidden_TD.dtype)
            both = empty((len(hidden_TD), 2 * width), hidden_TD.dtype)
            self.embedding_norm(decoder.embed(next_token_ids_T, next_media), out=both[:, :width])
            self.hidden_norm(hidden_TD, out=both[:, width:])
            self.projection(both, out=x_TD)
            rope = decoder.ropes.of(self.attention.rope).tables(batch.positions_AT)
            self.norm(self.layer(x_TD, batch, rope, rows), out=out)
        return out

    def cost(self) -> PredictorCost:
        return PredictorCost(
            keys=linear_cost(self.projection, self.layer.attention),
            rest=self.layer.mlp.cost(),
            multiply_adds_per_pair=self.attention.multiply_adds_per_pair,
        )
