"""The model families there are, by the model_type of a checkpoint's config."""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.models import text
from tilewright.models.mllama import model as mllama
from tilewright.models.protocol import Family
from tilewright.models.qwen3_5 import model as qwen3_5
from tilewright.models.qwen3_omni import model as qwen3_omni
from tilewright.models.qwen3_vl import model as qwen3_vl
from tilewright.types import UnsupportedConfig

FAMILIES: Mapping[str, Family] = {
    **text.FAMILIES,
    **qwen3_vl.FAMILIES,
    **qwen3_5.FAMILIES,
    **qwen3_omni.FAMILIES,
    **mllama.FAMILIES,
}


def family_of(config: Mapping[str, object]) -> Family:
    """The family of a checkpoint."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UnsupportedConfig(f"model_type is {model_type!r}, expected one of {', '.join(sorted(FAMILIES))}")
    return FAMILIES[model_type]
