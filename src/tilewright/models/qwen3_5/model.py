"""Qwen3.5, dense or with experts, with or without vision, and Qwen3-Next: recurrent layers between attention layers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tilewright.layers.batch import Batch, MediaRun
from tilewright.layers.cost import PredictorCost
from tilewright.layers.decoder import Decoder, DecoderConfig, LayerSpec, kv_layers_of
from tilewright.layers.gated_delta import GatedDeltaConfig, own_config
from tilewright.models.decoder_model import DecoderModel
from tilewright.models.media_batch import MediaBatch
from tilewright.models.protocol import Family, KvSpec, StateSpec
from tilewright.models.qwen3_5.config import Shapes, mtp_layer, text_config
from tilewright.models.qwen3_5.mtp import PREFIX, MultiTokenPredictor
from tilewright.models.qwen3_vl.processor import Qwen3VlProcessor
from tilewright.models.qwen3_vl.vision import VisionConfig, VisionTower
from tilewright.models.text_config import Config, is_tied, table, whole_name
from tilewright.ops.embedding import embedding
from tilewright.types import UnsupportedConfig

TEXT, VISION = "model.language_model", "model.visual"
TEXT_ALONE = "model"
NO_PREDICTOR = "the model was built without a multi-token predictor"


class Qwen35(DecoderModel):
    """The text model, the vision tower where there is one, and the predictor where the checkpoint has one."""

    cross_spec = None

    def __init__(self, text: DecoderConfig, vision: VisionConfig | None, mtp: LayerSpec | None) -> None:
        if vision is not None and vision.deepstack_layers:
            raise UnsupportedConfig(f"deepstack_visual_indexes is {list(vision.deepstack_layers)}, expected none")
        self.vocab_size, self.max_context = text.vocab_size, text.max_context
        self.num_position_axes = 1 if vision is None else 3
        self.decoder = Decoder(TEXT_ALONE if vision is None else TEXT, text)
        self.vision = None if vision is None else VisionTower(VISION, vision)
        self.mtp = None if mtp is None else MultiTokenPredictor(mtp, len(self.decoder.kv_layers))
        self.state_spec = _state_spec(text)

    @property
    def kv_spec(self) -> KvSpec:
        """The predictor's layer is the last."""
        return KvSpec(self.decoder.kv_layers + (() if self.mtp is None else kv_layers_of([self.mtp.layer])))

    @property
    def predictor(self) -> Qwen35 | None:
        return None if self.mtp is None else self

    def draft_cost(self) -> PredictorCost:
        assert self.mtp is not None, NO_PREDICTOR
        return self.mtp.cost()

    def checkpoint_name(self, name: str) -> str | None:
        """As the checkpoint has it, except tensors of parts that are not built: the predictor, or the vision tower.

        A text model may be stored under the names it has inside a vision-language model.
        """
        if self.mtp is None and name.startswith(f"{PREFIX}."):
            return None
        name = whole_name(name)
        if self.vision is None:
            if name.startswith(f"{VISION}."):
                return None
            name = name.replace(f"{TEXT}.", f"{TEXT_ALONE}.", 1)
        return self.decoder.checkpoint_name(name)

    def forward(self, batch: Batch) -> Tensor:
        return self.decoder(batch)

    def forward_with_hidden(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The logits `forward` gives, and what the predictor reads: the hidden states of all tokens [T, D]."""
        hidden_TD = self.decoder.hidden(batch)
        rows = batch.logit_rows
        return self.decoder.logits(hidden_TD if rows is None else embedding(rows, hidden_TD)), hidden_TD

    def draft(
        self, next_token_ids_T: Tensor, hidden_TD: Tensor, batch: Batch, next_media: Sequence[MediaRun] = ()
    ) -> tuple[Tensor, Tensor]:
        """Logits [R, V] of the second token after each of the batch's logit rows, and the predictor's states [R, D].

        From those a further token can be drafted (models/qwen3_5/mtp.py).
        """
        assert self.mtp is not None, NO_PREDICTOR
        drafted_RD = self.mtp(self.decoder, next_token_ids_T, hidden_TD, batch, next_media)
        return self.decoder.logits(drafted_RD), drafted_RD

    def encode(self, batch: MediaBatch) -> list[Tensor]:
        if self.vision is None:
            raise NotImplementedError("a text model has no encoder; its processor refuses media")
        return self.vision(batch)

    def split_features(self, features_MF: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        return features_MF, ()


def _state_spec(text: DecoderConfig) -> StateSpec | None:
    """Of this rank's heads."""
    configs = [spec.attention for spec in text.layers if isinstance(spec.attention, GatedDeltaConfig)]
    if not configs:
        return None
    delta = own_config(configs[0])  # they are alike
    return StateSpec(
        len(configs),
        (delta.num_taps - 1, delta.num_channels),
        (delta.value_heads, delta.key_width, delta.value_width),
    )


def _build_vision(config: Config, shapes: Shapes) -> Qwen35:
    text = table(config, "text_config")
    decoder = text_config(text, shapes, tied=is_tied(config), interleaved=False, num_axes=3)
    vision = VisionConfig.from_dict(table(config, "vision_config"))
    return Qwen35(decoder, vision, mtp_layer(text, decoder, shapes))


def _build_text(config: Config, shapes: Shapes) -> Qwen35:
    return _text_alone(config, shapes, interleaved=False)


def _build_next(config: Config, shapes: Shapes) -> Qwen35:
    return _text_alone(config, shapes, interleaved=True)


def _text_alone(config: Config, shapes: Shapes, *, interleaved: bool) -> Qwen35:
    tied = is_tied(config)
    decoder = text_config(config, shapes, tied=tied, interleaved=interleaved, num_axes=1)
    return Qwen35(decoder, None, mtp_layer(config, decoder, shapes))


_MTP = f"{PREFIX}."
FAMILIES = {
    "qwen3_5": Family(_build_vision, Qwen3VlProcessor, _MTP),
    "qwen3_5_moe": Family(_build_vision, Qwen3VlProcessor, _MTP),
    "qwen3_5_text": Family(_build_text, None, _MTP),
    "qwen3_5_moe_text": Family(_build_text, None, _MTP),
    "qwen3_next": Family(_build_next, None, _MTP),
}
