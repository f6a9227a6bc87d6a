"""The autoencoders there are, by the class that a diffusers config names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tilewright.models.autoencoder_kl import model as autoencoder_kl
from tilewright.models.autoencoder_wan import model as autoencoder_wan
from tilewright.models.vae import Vae
from tilewright.types import UnsupportedConfig

BUILDERS: Mapping[str, Callable[[Mapping[str, Any]], Vae]] = {
    "AutoencoderKL": autoencoder_kl.build,
    "AutoencoderKLFlux2": autoencoder_kl.build,
    "AutoencoderKLQwenImage": autoencoder_wan.build,
    "AutoencoderKLWan": autoencoder_wan.build,
}


def build_vae(config: Mapping[str, Any]) -> Vae:
    """The autoencoder of a component's config.json, its weights still to be loaded."""
    name = config.get("_class_name")
    if not isinstance(name, str) or name not in BUILDERS:
        raise UnsupportedConfig(f"_class_name of the vae is {name!r}, expected one of {', '.join(sorted(BUILDERS))}")
    return BUILDERS[name](config)
