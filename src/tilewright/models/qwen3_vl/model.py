"""Qwen3-VL, dense and with experts: the vision tower's features replace tokens of a Qwen3 decoder."""

from __future__ import annotations

from torch import Tensor

from tilewright.layers.batch import Batch
from tilewright.layers.decoder import Decoder, DecoderConfig
from tilewright.models.protocol import Family, MediaBatch
from tilewright.models.qwen3_vl.processor import Qwen3VlProcessor
from tilewright.models.qwen3_vl.vision import VisionConfig, VisionTower
from tilewright.models.text import DecoderModel
from tilewright.models.text_config import (
    Config,
    Shapes,
    decoder_config,
    has_separate_experts,
    integer,
    is_tied,
    moe_config,
    table,
    whole_name,
)
from tilewright.types import UnsupportedConfig
from tilewright.weights.linear import ExpertStorage

TEXT, VISION = "model.language_model", "model.visual"
UNSAID = {"rope_theta": 500_000.0}  # defaults of a config
HEAD_WIDTH = 128  # default of a dense model's config


class Qwen3Vl(DecoderModel):
    num_position_axes = 3
    cross_spec = None
    predictor = None
    state_spec = None

    def __init__(self, text: DecoderConfig, vision: VisionConfig) -> None:
        if len(vision.deepstack_layers) >= text.num_layers:
            raise UnsupportedConfig(
                f"deepstack_visual_indexes has {len(vision.deepstack_layers)} entries, expected fewer than the "
                f"{text.num_layers} layers of the text model"
            )
        self.vocab_size, self.max_context = text.vocab_size, text.max_context
        self.decoder = Decoder(TEXT, text)
        self.vision = VisionTower(VISION, vision)

    def checkpoint_name(self, name: str) -> str | None:
        return self.decoder.checkpoint_name(whole_name(name))

    def forward(self, batch: Batch) -> Tensor:
        return self.decoder(batch)

    def encode(self, batch: MediaBatch) -> list[Tensor]:
        return self.vision(batch)

    def split_features(self, features_MF: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        embeddings, *deepstack = features_MF.split(self.decoder.config.width, dim=1)
        return embeddings, tuple(deepstack)


def _build_dense(config: Config, shapes: Shapes) -> Qwen3Vl:
    text_config = {**UNSAID, **table(config, "text_config")}
    text = decoder_config(text_config, qk_norm=True, tied=is_tied(config), default_head_width=HEAD_WIDTH)
    return Qwen3Vl(text, VisionConfig.from_dict(table(config, "vision_config")))


def _build_moe(config: Config, shapes: Shapes) -> Qwen3Vl:
    text_config = {**UNSAID, **table(config, "text_config")}
    moe = moe_config(text_config, _expert_storage(text_config, shapes), renormalize=True)
    text = decoder_config(text_config, qk_norm=True, tied=is_tied(config), moe=moe)
    return Qwen3Vl(text, VisionConfig.from_dict(table(config, "vision_config")))


def _expert_storage(text_config: Config, shapes: Shapes) -> ExpertStorage:
    """Return how experts are stored: [E, inputs, outputs] as published; newer tools transpose or separate them."""
    if has_separate_experts(shapes):
        return ExpertStorage.separate
    width, inner = integer(text_config, "hidden_size"), integer(text_config, "moe_intermediate_size")
    published = {"gate_up_proj": (width, 2 * inner), "down_proj": (inner, width)}
    # Both weights decide: if experts are as wide as the model, or half as wide, one of them is square.
    found = {
        (part, shape[1:]) for name, shape in shapes.items() if (part := name.rpartition(".experts.")[2]) in published
    }
    return ExpertStorage.stacked_transposed if found == set(published.items()) else ExpertStorage.stacked


FAMILIES = {
    "qwen3_vl": Family(_build_dense, Qwen3VlProcessor),
    "qwen3_vl_moe": Family(_build_moe, Qwen3VlProcessor),
}
