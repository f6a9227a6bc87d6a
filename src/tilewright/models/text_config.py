"""Reads a checkpoint's config into a DecoderConfig, with clear errors for what is not supported."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from tilewright.layers.attention import AttentionConfig
from tilewright.layers.decoder import DecoderConfig, LayerSpec
from tilewright.layers.mlp import MlpConfig, MoeConfig, activation_named
from tilewright.layers.norm import NormConfig
from tilewright.layers.rope import RopeConfig
from tilewright.types import UnsupportedConfig
from tilewright.weights.checkpoint import Checkpoint
from tilewright.weights.linear import ExpertStorage

Config = Mapping[str, object]
Shapes = Mapping[str, tuple[int, ...]]  # of a checkpoint's tensors, by name


def integer(config: Config, key: str, default: int | None = None) -> int:
    """Return config[key], which must be an integer."""
    value = config.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise UnsupportedConfig(f"config has {key} {value!r}, expected a whole number")
    return value


def number(config: Config, key: str, default: float) -> float:
    """Return config[key], which must be a number."""
    value = config.get(key, default)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise UnsupportedConfig(f"config has {key} {value!r}, expected a number")
    return float(value)


def model_width(config: Config) -> int:
    """Return config's hidden_size, or d_model in its place."""
    return integer(config, "d_model" if config.get("hidden_size") is None and "d_model" in config else "hidden_size")


def head_width(config: Config, width: int, num_heads: int, default: int | None = None) -> int:
    """Return config's head_dim, or qk_head_dim; without either the family's default, or width / num_heads.

    null counts as missing: some tools write out derived entries.
    """
    if num_heads < 1:
        raise UnsupportedConfig(f"config has {num_heads} heads, expected 1 or more")
    key = next((key for key in ("head_dim", "qk_head_dim") if config.get(key) is not None), None)
    if key is not None:
        given = integer(config, key)
        if given < 1:
            raise UnsupportedConfig(f"config has {key} {given}, expected 1 or more")
        return given
    if default is not None:
        return default
    if width % num_heads:
        raise UnsupportedConfig(f"config has {num_heads} heads, expected a divisor of its width, {width}")
    return width // num_heads


def whole_name(stored_name: str) -> str:
    """Return a tensor's name in a whole model: checkpoints saved without a head leave out the prefix "model."."""
    part = stored_name.partition(".")[0]
    return f"model.{stored_name}" if part in _PARTS else stored_name


_PARTS = ("embed_tokens", "layers", "norm", "language_model", "visual")


def has_separate_experts(names: Iterable[str]) -> bool:
    """Return whether a checkpoint has a tensor per expert and projection."""
    return any(".mlp.experts." in name and name.endswith(".gate_proj.weight") for name in names)


def table(config: Config, key: str) -> Config:
    """Return config[key], which must be a table."""
    value = config.get(key)
    if not isinstance(value, Mapping):
        raise UnsupportedConfig(f"config has {key} {value!r}, expected a table")
    return value


def is_tied(config: Config) -> bool:
    """Return whether the head is the embedding table; a text part's own entry counts if the outer config has none."""
    text = table(config, "text_config") if "text_config" in config else config
    return bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))


def decoder_config(
    config: Config,
    *,
    qk_norm: bool = False,
    norm_plus_one: bool = False,
    output_gate: bool = False,
    qkv_bias: bool | None = None,
    output_bias: bool | None = None,
    tied: bool | None = None,
    moe: MoeConfig | None = None,
    default_head_width: int | None = None,
) -> DecoderConfig:
    """Return the decoder that a text config describes. Arguments that are None are read from the config.

    `norm_plus_one`: all norms scale by 1 + weight. `output_gate`: as in `AttentionConfig`. `moe` are the experts of
    layers that are not dense.
    """
    width, num_heads = model_width(config), integer(config, "num_attention_heads")
    num_kv_heads = integer(config, "num_key_value_heads", num_heads)
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise UnsupportedConfig(
            f"config has num_key_value_heads {num_kv_heads}, expected a divisor of num_attention_heads, {num_heads}"
        )
    each_head = head_width(config, width, num_heads, default_head_width)
    rope = RopeConfig.from_dict(config, each_head)
    norm = NormConfig(number(config, "rms_norm_eps", 1e-6), norm_plus_one)
    attention_bias = bool(config.get("attention_bias", False))
    attention = AttentionConfig(
        width=width,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_width=each_head,
        rope=rope,
        qk_norm=norm if qk_norm else None,
        qkv_bias=attention_bias if qkv_bias is None else qkv_bias,
        output_bias=attention_bias if output_bias is None else output_bias,
        output_gate=output_gate,
    )
    layers = (
        LayerSpec(replace(attention, window=window), mlp, norm)
        for window, mlp in zip(_windows(config), _mlps(config, moe), strict=True)
    )
    return DecoderConfig(
        vocab_size=integer(config, "vocab_size"),
        width=width,
        layers=tuple(layers),
        norm=norm,
        tied=bool(config.get("tie_word_embeddings", False)) if tied is None else tied,
        max_context=rope.longest_context,
    )


def _mlps(config: Config, moe: MoeConfig | None) -> list[MlpConfig | MoeConfig]:
    """Return the feed-forward config of each layer."""
    layers = range(integer(config, "num_hidden_layers"))
    is_dense = [moe is None or _is_dense(config, layer) for layer in layers]
    activation = activation_named(str(config.get("hidden_act", "silu")))
    # A config whose layers all have experts may have no width for dense ones.
    width = integer(config, "intermediate_size", None if any(is_dense) else 0)
    dense = MlpConfig(width, activation, bool(config.get("mlp_bias", False)))
    return [dense if moe is None or is_dense[layer] else moe for layer in layers]


def _windows(config: Config) -> tuple[int, ...]:
    """Return the sliding window of each layer of a Qwen2 or Qwen3 config; 0: it sees all tokens."""
    num_layers = integer(config, "num_hidden_layers")
    if not config.get("use_sliding_window") or not config.get("sliding_window"):
        return (0,) * num_layers
    window, kinds = integer(config, "sliding_window"), config.get("layer_types")
    if isinstance(kinds, (list, tuple)):
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    first = integer(config, "max_window_layers", num_layers)
    return tuple(window if layer >= first else 0 for layer in range(num_layers))


def moe_config(config: Config, stored: ExpertStorage, *, renormalize: bool) -> MoeConfig:
    """Return the experts that a Qwen3-MoE config describes."""
    return MoeConfig(
        num_experts=_num_experts(config),
        experts_per_token=integer(config, "num_experts_per_tok"),
        expert_width=integer(config, "moe_intermediate_size"),
        renormalize=renormalize,
        activation=activation_named(str(config.get("hidden_act", "silu"))),
        stored=stored,
        shared_width=integer(config, "shared_expert_intermediate_size", 0),
    )


def _num_experts(config: Config) -> int:
    return integer(config, "num_experts" if "num_experts" in config else "num_local_experts")


def _is_dense(config: Config, layer: int) -> bool:
    """Return whether a layer of a Qwen3-MoE config has no experts."""
    listed = config.get("mlp_only_layers") or ()
    if not isinstance(listed, (list, tuple)):
        raise UnsupportedConfig(f"config has mlp_only_layers {listed!r}, expected a list")
    step = integer(config, "decoder_sparse_step", 1)
    return layer in listed or _num_experts(config) == 0 or (layer + 1) % step != 0


_BLOCK_ROWS = 4096  # compared at a time: 40 MB of a model 5,120 wide

_log = logging.getLogger(__name__)


def config_as_stored(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the checkpoint's config, untied if it stores a head that differs from the embedding table.

    As in transformers: the tensors are what was trained, whatever the config says.
    """
    config = checkpoint.config
    names = [name for name in checkpoint.shapes if name.endswith(("lm_head.weight", "embed_tokens.weight"))]
    if len(names) != 2 or not is_tied(config) or _is_same(checkpoint, *names):
        return config
    _log.warning(
        "%s has tie_word_embeddings true, but %s and %s differ: both are used. Set it to false to say so",
        checkpoint.path,
        *names,
    )
    untied = {"tie_word_embeddings": False}
    text = config.get("text_config")
    return {**config, **untied, **({"text_config": {**text, **untied}} if isinstance(text, Mapping) else {})}


def _is_same(checkpoint: Checkpoint, first: str, second: str) -> bool:
    """Compare two tensors up to the first difference: only a head that equals the table is read whole."""
    num_rows = checkpoint.shapes[first][0]
    if checkpoint.shapes[first] != checkpoint.shapes[second]:
        return False
    for begin in range(0, num_rows, _BLOCK_ROWS):
        end = min(begin + _BLOCK_ROWS, num_rows)
        rows = [checkpoint.rows(name, begin, end) for name in (first, second)]
        dtype = torch.promote_types(rows[0].dtype, rows[1].dtype)
        if not torch.equal(rows[0].to(dtype), rows[1].to(dtype)):
            return False
        checkpoint.release(first)
        checkpoint.release(second)
    return True
