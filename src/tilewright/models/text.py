"""Llama, Qwen2, Qwen3 and Qwen3-MoE: the same decoder, different configs."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from tilewright.layers.batch import Batch
from tilewright.layers.decoder import Decoder, DecoderConfig
from tilewright.models.decoder_model import DecoderModel
from tilewright.models.media_batch import MediaBatch
from tilewright.models.protocol import Family
from tilewright.models.text_config import Config, decoder_config, moe_config, whole_name
from tilewright.weights.experts import ExpertFormat

QWEN3_HEAD_WIDTH = 128  # what a dense Qwen3 config without head_dim means

Shapes = Mapping[str, tuple[int, ...]]


class TextModel(DecoderModel):
    """A language model that takes text alone."""

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
    # As published a tensor per expert; some tools save the experts of a layer in one.
    is_stacked = any(name.endswith(".mlp.experts.gate_up_proj") for name in shapes)
    stored = ExpertFormat.stacked if is_stacked else ExpertFormat.separate
    moe = moe_config(config, stored, renormalize=renormalize)
    return TextModel(decoder_config(config, qk_norm=True, moe=moe))


FAMILIES = {
    "llama": Family(_build_llama),
    "qwen2": Family(_build_qwen2),
    "qwen3": Family(_build_qwen3),
    "qwen3_moe": Family(_build_qwen3_moe),
}
