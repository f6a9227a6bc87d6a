"""Reads the text config of Qwen3.5 or Qwen3-Next: which layers are recurrent, gates, norms, experts."""

from __future__ import annotations

from dataclasses import replace

from tilewright.layers.attention import AttentionConfig
from tilewright.layers.decoder import DecoderConfig, LayerSpec
from tilewright.layers.gated_delta import GatedDeltaConfig
from tilewright.layers.mlp import MoeConfig
from tilewright.layers.rope import rope_parameters
from tilewright.models.text_config import (
    Config,
    Shapes,
    decoder_config,
    has_separate_experts,
    integer,
    model_width,
    moe_config,
)
from tilewright.types import UnsupportedConfig
from tilewright.weights.linear import ExpertStorage

DELTA, ATTENTION = "linear_attention", "full_attention"
# Values of the released checkpoints, and the defaults of newer tools.
_ROPE = {"partial_rotary_factor": 0.25}
_MROPE = {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
_FULL_ATTENTION_INTERVAL = 4
_HEAD_WIDTH = 256


def text_config(config: Config, shapes: Shapes, *, tied: bool, interleaved: bool, num_axes: int) -> DecoderConfig:
    """Return the decoder of a text config.

    `interleaved`: Qwen3-Next's order of the recurrent layers' projections. With one axis of positions the sections of
    M-RoPE are dropped: text has the same position on all three.
    """
    moe = None
    if "num_experts" in config:
        renormalize = bool(config.get("norm_topk_prob", True))
        moe = moe_config(config, expert_storage(shapes, predictor=False), renormalize=renormalize)
    decoder = decoder_config(
        _with_rope(config, num_axes),
        qk_norm=True,
        norm_plus_one=True,
        output_gate=bool(config.get("attn_output_gate", True)),
        tied=tied,
        moe=moe,
        default_head_width=_HEAD_WIDTH,
    )
    delta, kinds = _delta_config(config, decoder.norm.eps, interleaved), _kinds(config)
    layers = (
        replace(spec, attention=delta) if kind == DELTA else spec
        for spec, kind in zip(decoder.layers, kinds, strict=True)
    )
    return replace(decoder, layers=tuple(layers))


def mtp_layer(config: Config, decoder: DecoderConfig, shapes: Shapes) -> LayerSpec | None:
    """Return the spec of the multi-token predictor's one layer; None if the checkpoint has none.

    It is an attention layer like the decoder's, with experts if any layer has them.
    """
    num_layers = integer(config, "mtp_num_hidden_layers", 1)
    if num_layers == 0 or not any(name.startswith("mtp.") for name in shapes):
        return None
    if num_layers != 1:
        raise UnsupportedConfig(f"mtp_num_hidden_layers is {num_layers}, expected 0 or 1")
    if config.get("mtp_use_dedicated_embeddings"):
        raise UnsupportedConfig("mtp_use_dedicated_embeddings is true, expected false: the model's own are used")
    layer = next(spec for spec in decoder.layers if isinstance(spec.attention, AttentionConfig))
    moe = next((spec.mlp for spec in decoder.layers if isinstance(spec.mlp, MoeConfig)), None)
    if moe is None:
        return layer
    return replace(layer, mlp=replace(moe, stored=expert_storage(shapes, predictor=True)))


def expert_storage(shapes: Shapes, *, predictor: bool) -> ExpertStorage:
    """Return how the experts of the decoder or of its predictor are stored: stacked as released, or separately."""
    names = [name for name in shapes if name.startswith("mtp.") == predictor]
    return ExpertStorage.separate if has_separate_experts(names) else ExpertStorage.stacked


def _with_rope(config: Config, num_axes: int) -> Config:
    given = rope_parameters(config)
    outer = {key: config[key] for key in _ROPE if key in config}
    parameters = {**_ROPE, **outer, **_MROPE, **given}
    if num_axes == 1:
        parameters = {key: value for key, value in parameters.items() if key not in _MROPE}
    return {**config, "rope_parameters": parameters}


def _delta_config(config: Config, eps: float, interleaved: bool) -> GatedDeltaConfig:
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedConfig(f"hidden_act is {config['hidden_act']!r}, expected silu: the convolution's")
    return GatedDeltaConfig(
        width=model_width(config),
        key_heads=integer(config, "linear_num_key_heads"),
        value_heads=integer(config, "linear_num_value_heads"),
        key_width=integer(config, "linear_key_head_dim"),
        value_width=integer(config, "linear_value_head_dim"),
        num_taps=integer(config, "linear_conv_kernel_dim"),
        eps=eps,
        interleaved=interleaved,
    )


def _kinds(config: Config) -> list[str]:
    """Return the kind of each layer: as listed, or every fourth attention, the others recurrent."""
    num_layers = integer(config, "num_hidden_layers")
    kinds = config.get("layer_types")
    if kinds is None:
        interval = integer(config, "full_attention_interval", _FULL_ATTENTION_INTERVAL)
        kinds = [DELTA if (layer + 1) % interval else ATTENTION for layer in range(num_layers)]
    if not isinstance(kinds, (list, tuple)) or len(kinds) != num_layers or not {*kinds} <= {DELTA, ATTENTION}:
        raise UnsupportedConfig(f"layer_types is {kinds!r}, expected {DELTA} or {ATTENTION} for each of {num_layers}")
    if ATTENTION not in kinds:
        raise UnsupportedConfig(f"layer_types has no {ATTENTION}: at least one layer must keep keys and values")
    return list(kinds)
