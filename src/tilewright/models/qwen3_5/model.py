"""Qwen3.5, dense or with experts, with or without vision, and Qwen3-Next: recurrent layers between attention layers.

Its multi-token predictor drafts the token after the next:

    drafted_RD = mtp(decoder, next_token_ids_T, hidden_TD, batch)   # then decoder.logits(drafted_RD)

Row t has the model's hidden state of token t (the head's input: after the final norm) and the id of the token after it,
at the slot and position of token t. The result is again a head's input: its logits are of the second token after t, and
a further token is drafted from it. Rows attend to each other in the predictor's own KV cache, the last of the batch's.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tilewright.layers.attention import AttentionConfig
from tilewright.layers.batch import Batch, FeatureRun
from tilewright.layers.cost import PredictorCost, linear_cost
from tilewright.layers.decoder import Decoder, DecoderConfig, DecoderLayer, LayerSpec, hidden_norm, kv_layers_of
from tilewright.layers.gated_delta import GatedDeltaConfig, own_config
from tilewright.layers.linear import GatheredLinear
from tilewright.models.protocol import Family, KvSpec, MediaBatch, StateSpec
from tilewright.models.qwen3_5.config import mtp_layer, text_config
from tilewright.models.qwen3_vl.processor import Qwen3VlProcessor
from tilewright.models.qwen3_vl.vision import VisionConfig, VisionTower
from tilewright.models.text import DecoderModel
from tilewright.models.text_config import Config, Shapes, is_tied, table, whole_name
from tilewright.ops.embedding import embedding
from tilewright.ops.plan import empty, scope
from tilewright.types import UnsupportedConfig

PREFIX = "mtp"


class MultiTokenPredictor:
    """One attention layer over [norm(embedding of the next token) | norm(hidden state)], projected to the width.

    Embedding, head and rope are the decoder's. `kv_layer` is the index of its cache.
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
        next_feature_runs: Sequence[FeatureRun] = (),
    ) -> Tensor:
        """Return the head's inputs for the second token after each logit row [R, D]; all rows store keys and values.

        `batch` has the rows' places; its ids and features are not read. `next_feature_runs` are of the rows whose
        next token is a medium's.
        """
        width, rows = self.attention.width, batch.logit_rows
        out = empty((len(hidden_TD if rows is None else rows), width), hidden_TD.dtype)
        with scope():
            x_TD = empty((len(hidden_TD), width), hidden_TD.dtype)
            both = empty((len(hidden_TD), 2 * width), hidden_TD.dtype)
            self.embedding_norm(decoder.embed(next_token_ids_T, next_feature_runs), out=both[:, :width])
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


TEXT, VISION = "model.language_model", "model.visual"
TEXT_ALONE = "model"
NO_PREDICTOR = "the model was built without a multi-token predictor"


class Qwen35(DecoderModel):
    """The text model, with a vision tower or a predictor if the checkpoint has one."""

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
        """Layers of the decoder, then the predictor's."""
        return KvSpec(self.decoder.kv_layers + (() if self.mtp is None else kv_layers_of([self.mtp.layer])))

    @property
    def predictor(self) -> Qwen35 | None:
        return None if self.mtp is None else self

    def draft_cost(self) -> PredictorCost:
        assert self.mtp is not None, NO_PREDICTOR
        return self.mtp.cost()

    def checkpoint_name(self, name: str) -> str | None:
        """Return the name, or None for tensors of parts that are not built: the predictor, or the vision tower.

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
        """Return the logits of `forward`, and the hidden states of all tokens [T, D] for the predictor."""
        hidden_TD = self.decoder.hidden(batch)
        rows = batch.logit_rows
        return self.decoder.logits(hidden_TD if rows is None else embedding(rows, hidden_TD)), hidden_TD

    def draft(
        self, next_token_ids_T: Tensor, hidden_TD: Tensor, batch: Batch, next_feature_runs: Sequence[FeatureRun] = ()
    ) -> tuple[Tensor, Tensor]:
        """Return logits [R, V] of the second token after each logit row of the batch, and their hidden states [R, D].

        A further token can be drafted from the latter.
        """
        assert self.mtp is not None, NO_PREDICTOR
        drafted_RD = self.mtp(self.decoder, next_token_ids_T, hidden_TD, batch, next_feature_runs)
        return self.decoder.logits(drafted_RD), drafted_RD

    def encode(self, batch: MediaBatch) -> list[Tensor]:
        if self.vision is None:
            raise NotImplementedError("a text model has no encoder; its processor refuses media")
        return self.vision(batch)

    def split_features(self, features_MF: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        return features_MF, ()


def _state_spec(text: DecoderConfig) -> StateSpec | None:
    """Return the state of this rank's heads."""
    configs = [spec.attention for spec in text.layers if isinstance(spec.attention, GatedDeltaConfig)]
    if not configs:
        return None
    delta = own_config(configs[0])  # all are equal
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
