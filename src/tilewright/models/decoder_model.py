"""What every model around one decoder answers alike."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tilewright.layers.cost import DecoderCost
from tilewright.layers.decoder import Decoder
from tilewright.models.protocol import KvSpec
from tilewright.ops.kv_cache import KvCache


class DecoderModel:
    """A model whose text side is `decoder`."""

    decoder: Decoder

    @property
    def width(self) -> int:
        return self.decoder.config.width

    @property
    def kv_spec(self) -> KvSpec:
        return KvSpec(self.decoder.kv_layers)

    @property
    def num_embeddings(self) -> int:
        return self.decoder.config.num_embeddings

    def fit_context(self, max_context: int) -> None:
        self.decoder.ropes.fit(max_context)

    def store_cross_states(self, states_ND: Tensor, slots_N: Tensor, kv_caches: Sequence[KvCache]) -> None:
        self.decoder.store_states(states_ND, slots_N, kv_caches)

    def cost(self) -> DecoderCost:
        return self.decoder.cost()
