"""Families by model_type, and autoencoders by the class name in a diffusers config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tilewright.models import autoencoder_kl, text
from tilewright.models.autoencoder_wan import model as autoencoder_wan
from tilewright.models.mllama import model as mllama
from tilewright.models.protocol import Family
from tilewright.models.qwen3_5 import model as qwen3_5
from tilewright.models.qwen3_omni import model as qwen3_omni
from tilewright.models.qwen3_vl import model as qwen3_vl
from tilewright.models.vae import Vae
from tilewright.types import UnsupportedConfig

FAMILIES: Mapping[str, Family] = {
    **text.FAMILIES,
    **qwen3_vl.FAMILIES,
    **qwen3_5.FAMILIES,
    **qwen3_omni.FAMILIES,
    **mllama.FAMILIES,
}


def family_of(config: Mapping[str, object]) -> Family:
    """Return the family of a checkpoint."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UnsupportedConfig(f"model_type is {model_type!r}, expected one of {', '.join(sorted(FAMILIES))}")
    return FAMILIES[model_type]


BUILDERS: Mapping[str, Callable[[Mapping[str, Any]], Vae]] = {
    "AutoencoderKL": autoencoder_kl.build,
    "AutoencoderKLFlux2": autoencoder_kl.build,
    "AutoencoderKLQwenImage": autoencoder_wan.build,
    "AutoencoderKLWan": autoencoder_wan.build,
}


def build_vae(config: Mapping[str, Any]) -> Vae:
    """Return the autoencoder of a component's config.json, without weights."""
    name = config.get("_class_name")
    if not isinstance(name, str) or name not in BUILDERS:
        raise UnsupportedConfig(f"_class_name of the vae is {name!r}, expected one of {', '.join(sorted(BUILDERS))}")
    return BUILDERS[name](config)
