"""Llama-3.2-Vision: a Llama decoder with cross-attention layers that attend to the vision tower's states."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from tilewright.layers.attention import AttentionConfig, CrossAttentionConfig
from tilewright.layers.batch import Batch
from tilewright.layers.decoder import Decoder, DecoderConfig, LayerSpec
from tilewright.models.mllama.processor import MllamaProcessor
from tilewright.models.mllama.vision import MllamaVisionConfig, MllamaVisionTower
from tilewright.models.protocol import CrossSpec, Family, MediaBatch
from tilewright.models.text import DecoderModel
from tilewright.models.text_config import Config, Shapes, decoder_config, integer, table
from tilewright.types import UnsupportedConfig

TEXT, VISION, PROJECTOR = "model.language_model", "model.vision_model", "model.multi_modal_projector"
NUM_EXTRA_EMBEDDINGS = 8  # including the image's token
UNSAID = {"rms_norm_eps": 1e-5, "rope_theta": 500_000.0}  # defaults of a config
# Names in released checkpoints -> names saved by newer tools.
_RENAMED = {
    "language_model.lm_head.": "lm_head.",
    "language_model.model.": f"{TEXT}.",
    "vision_model.": f"{VISION}.",
    "multi_modal_projector.": f"{PROJECTOR}.",
}


def model_name(stored_name: str) -> str:
    """Return our name for a tensor under either of its names."""
    for prefix, ours in _RENAMED.items():
        if stored_name.startswith(prefix):
            return ours + stored_name.removeprefix(prefix)
    return stored_name


class Mllama(DecoderModel):
    num_position_axes = 1
    state_spec = None
    predictor = None

    def __init__(self, text: DecoderConfig, vision: MllamaVisionConfig, biases: frozenset[str]) -> None:
        self.vocab_size, self.max_context = text.vocab_size, text.max_context
        self.decoder = Decoder(TEXT, text)
        self.cross_spec = CrossSpec(self.decoder.cross_layers, vision.max_tiles * vision.rows_per_tile)
        self.vision = MllamaVisionTower(VISION, PROJECTOR, vision, text.width, biases)

    def checkpoint_name(self, name: str) -> str | None:
        return self.decoder.checkpoint_name(model_name(name))

    def forward(self, batch: Batch) -> Tensor:
        return self.decoder(batch)

    def encode(self, batch: MediaBatch) -> list[Tensor]:
        return self.vision(batch)

    def split_features(self, features_MF: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        raise NotImplementedError("tokens attend to features here; no feature replaces a token")


def _build(config: Config, shapes: Shapes) -> Mllama:
    text_config, vision_config = {**UNSAID, **table(config, "text_config")}, table(config, "vision_config")
    decoder, cross_layers = decoder_config(text_config, tied=False), _cross_layers(text_config)
    layers = (_with_cross(spec) if i in cross_layers else spec for i, spec in enumerate(decoder.layers))
    text = replace(decoder, layers=tuple(layers), num_extra_embeddings=NUM_EXTRA_EMBEDDINGS)
    biases = frozenset(name for name in map(model_name, shapes) if name.endswith(".bias"))
    return Mllama(text, MllamaVisionConfig.from_dict(vision_config), biases)


def _with_cross(spec: LayerSpec) -> LayerSpec:
    """Return `spec` with cross-attention to encoder states instead of self-attention."""
    own = spec.attention
    assert isinstance(own, AttentionConfig)
    cross = CrossAttentionConfig(
        width=own.width,
        num_heads=own.num_heads,
        num_kv_heads=own.num_kv_heads,
        head_width=own.head_width,
        eps=spec.norm.eps,
    )
    return replace(spec, attention=cross)


def _cross_layers(config: Config) -> tuple[int, ...]:
    layers, num_layers = config.get("cross_attention_layers"), integer(config, "num_hidden_layers")
    if not isinstance(layers, (list, tuple)) or not layers or not set(layers) < set(range(num_layers)):
        raise UnsupportedConfig(
            f"text_config has cross_attention_layers {layers!r}, expected some of its layers, 0 to {num_layers - 1}"
        )
    return tuple(sorted(set(layers)))


FAMILIES = {"mllama": Family(_build, MllamaProcessor)}
