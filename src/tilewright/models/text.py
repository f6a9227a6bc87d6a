"""Llama, Qwen2, Qwen3 and Qwen3-MoE: configs of one decoder; and the base of all models around a decoder."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tilewright.layers.batch import Batch, WantedStates
from tilewright.layers.cost import DecoderCost
from tilewright.layers.decoder import Decoder, DecoderConfig
from tilewright.models.protocol import Family, KvSpec, MediaBatch
from tilewright.models.text_config import Config, Shapes, decoder_config, moe_config, whole_name
from tilewright.ops.attention import KvCache
from tilewright.weights.linear import ExpertStorage


class DecoderModel:
    """A model whose text model is `decoder`."""

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

    def forward_with_states(self, batch: Batch, wanted: WantedStates) -> tuple[Tensor, Tensor]:
        return self.decoder.with_states(batch, wanted)

    def cost(self) -> DecoderCost:
        return self.decoder.cost()


QWEN3_HEAD_WIDTH = 128  # default of dense Qwen3 configs


class TextModel(DecoderModel):
    """A language model without media."""

    num_position_axes = 1
    cross_spec = None
    predictor = None
    state_spec = None

    def __init__(self, config: DecoderConfig) -> None:
        self.vocab_size, self.max_context = config.vocab_size, config.max_context
        self.decoder = Decoder("model", config)

    def checkpoint_name(self, name: str) -> str | None:
        return self.decoder.checkpoint_name(whole_name(name))

    def forward(self, batch: Batch) -> Tensor:
        return self.decoder(batch)

    def encode(self, batch: MediaBatch) -> list[Tensor]:
        raise NotImplementedError("a text model has no encoder; its processor refuses media")

    def split_features(self, features_MF: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        raise NotImplementedError("a text model has no features")


def _build_llama(config: Config, shapes: Shapes) -> TextModel:
    return TextModel(decoder_config(config))


def _build_qwen2(config: Config, shapes: Shapes) -> TextModel:
    return TextModel(decoder_config(config, qkv_bias=True, output_bias=False))


def _build_qwen3(config: Config, shapes: Shapes) -> TextModel:
    return TextModel(decoder_config(config, qk_norm=True, default_head_width=QWEN3_HEAD_WIDTH))


def _build_qwen3_moe(config: Config, shapes: Shapes) -> TextModel:
    renormalize = bool(config.get("norm_topk_prob", False))
    # Published with a tensor per expert; some tools stack the experts of a layer.
    is_stacked = any(name.endswith(".mlp.experts.gate_up_proj") for name in shapes)
    stored = ExpertStorage.stacked if is_stacked else ExpertStorage.separate
    moe = moe_config(config, stored, renormalize=renormalize)
    return TextModel(decoder_config(config, qk_norm=True, moe=moe))


FAMILIES = {
    "llama": Family(_build_llama),
    "qwen2": Family(_build_qwen2),
    "qwen3": Family(_build_qwen3),
    "qwen3_moe": Family(_build_qwen3_moe),
}
