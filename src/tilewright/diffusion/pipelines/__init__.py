"""The pipelines, by the `_class_name` of model_index.json."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tilewright.diffusion.components import Components, pipeline_folder
from tilewright.diffusion.pipeline import Pipeline
from tilewright.host.files import read_json
from tilewright.types import UnsupportedConfig

# Module and class within diffusion/pipelines, imported on use.
PIPELINES: Mapping[str, tuple[str, str]] = {
    "Flux2KleinPipeline": ("flux2", "Flux2Klein"),
    "FluxKontextPipeline": ("flux", "Flux"),
    "FluxPipeline": ("flux", "Flux"),
    "QwenImageEditPipeline": ("qwen_image_edit", "QwenImageEdit"),
    "QwenImageEditPlusPipeline": ("qwen_image_edit", "QwenImageEdit"),
    "QwenImagePipeline": ("qwen_image", "QwenImage"),
    "WanImageToVideoPipeline": ("wan", "Wan"),
    "WanPipeline": ("wan", "Wan"),
    "ZImagePipeline": ("z_image", "ZImage"),
}


NOT_BUILT: Mapping[str, str] = {
    "QwenImageEditInpaintPipeline": "it takes a mask; QwenImageEditPipeline edits whole images",
}


def open_pipeline(model: str | Path, **options: Any) -> Pipeline:
    """Return the pipeline of a checkpoint, without loading weights. `options` are those of `Components`."""
    folder = pipeline_folder(model)
    name = str(read_json(folder / "model_index.json").get("_class_name"))
    if name in NOT_BUILT:
        raise UnsupportedConfig(f"{folder} is of a {name}, which is not supported: {NOT_BUILT[name]}")
    if name not in PIPELINES:
        raise UnsupportedConfig(
            f"{folder / 'model_index.json'} is of a {name}, expected one of {', '.join(sorted(PIPELINES))}"
        )
    module, class_name = PIPELINES[name]
    pipeline = getattr(importlib.import_module(f"tilewright.diffusion.pipelines.{module}"), class_name)
    return pipeline(Components(folder, pipeline.BUILDERS, **options))
