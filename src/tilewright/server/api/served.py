"""The table of the models that a server serves: what each can do, and which of them a request means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from tilewright.server.http.admission import Admission
from tilewright.server.http.errors import ApiError
from tilewright.server.http.settings import ServerSettings
from tilewright.server.link.backend import Backend, ModelInfo, names_model
from tilewright.server.link.diffusion import DiffusionBackend

# What a request asks of a model: to answer in text, read a text out, write down what is said, or make images or videos.
Kind = Literal["chat", "speak", "hear", "draw"]


@dataclass(frozen=True)
class ServedTextModel:
    """A model behind an engine. Its properties raise EngineUnavailable while the engine is not ready."""

    backend: Backend
    admission: Admission
    served_name: str | None = None  # the name for clients, instead of the model's own

    @property
    def info(self) -> ModelInfo:
        model = self.backend.model
        return replace(model, name=self.served_name or model.name)

    @property
    def name(self) -> str:
        return self.info.name

    def is_meant_by(self, name: str) -> bool:
        """Return whether a request names this model: by its served name, or by its own."""
        return self.info.is_meant_by(name) or name == self.backend.model.name

    def can(self, kind: Kind) -> bool:
        if kind == "speak":
            return bool(self.info.voices)
        return "audio" in self.info.accepts if kind == "hear" else kind == "chat"

    def refusal(self, kind: Kind) -> ApiError:
        """Return the error of a request of a kind that the model cannot answer."""
        model = self.info
        fault, needed = "does not speak", "does"
        if kind == "hear":
            takes = " and ".join(("text", *model.accepts)) if model.accepts else "text only"
            fault, needed = f"accepts {takes}", "accepts sound"
        message = f"{model.name} {fault}: this endpoint needs a model that {needed}"
        return ApiError(400, message, param="model", code="unsupported_model")

    def as_object(self, created: int, settings: ServerSettings) -> dict[str, Any]:
        """Return the model's entry in /v1/models."""
        model, limits = self.info, settings.media.limits
        return {
            "id": model.name,
            "object": "model",
            "created": created,
            "owned_by": "tilewright",
            "max_model_len": model.max_context,
            "input_modalities": ["text", *model.accepts],
            "output_modalities": ["text", "audio"] if model.voices else ["text"],
            **({"voices": list(model.voices), "voice_aliases": dict(model.voice_aliases)} if model.voices else {}),
            "limits": {
                "max_body_bytes": settings.max_body_bytes,
                "max_media_bytes": limits.max_bytes,
                "max_media_total_bytes": limits.max_total_bytes,
                "max_media": limits.max_items,
                "max_pixels": limits.max_pixels,
                "max_duration_s": limits.max_duration_s,
            },
        }


@dataclass(frozen=True)
class ServedImageModel:
    """A model that makes images or videos. Its backend has the queue that admits requests."""

    backend: DiffusionBackend

    @property
    def name(self) -> str:
        return self.backend.name

    def is_meant_by(self, name: str) -> bool:
        return names_model(name, self.name)

    def can(self, kind: Kind) -> bool:
        return kind == "draw"

    def as_object(self, created: int, settings: ServerSettings) -> dict[str, Any]:
        """Return the model's entry in /v1/models. Its limits are known once it has been used."""
        limits = self.backend.limits
        found = {"id": self.name, "object": "model", "created": created, "owned_by": "tilewright"}
        if limits is None:
            return {**found, "input_modalities": ["text"], "output_modalities": ["image"], "limits": None}
        makes_video = limits.max_frames > 1
        return {
            **found,
            "input_modalities": ["text", *(["image"] if limits.takes_image else [])],
            "output_modalities": ["image", *(["video"] if makes_video else [])],
            "limits": {
                "size_multiple": limits.size_multiple,
                "min_side": limits.min_side,
                "max_side": limits.max_side,
                "max_pixels": limits.max_pixels,
                "default_size": f"{limits.default_width}x{limits.default_height}",
                "max_steps": limits.max_steps,
                "default_steps": limits.default_steps,
                "default_guidance": limits.default_guidance,
                "max_pictures": limits.max_images,
                "max_frames": limits.max_frames,
                "takes_negative_prompt": limits.takes_negative_prompt,
            },
        }


@dataclass(frozen=True)
class Served:
    """The models of a server. A request that names none means the first that can do what it asks."""

    text_models: Sequence[ServedTextModel] = ()
    image_models: Sequence[ServedImageModel] = ()

    def find_text(self, name: str | None, kind: Kind = "chat") -> ServedTextModel:
        """Return the model that answers a request in text or speech; raise a 404 if there is none of this name."""
        models = self.text_models
        if not models:
            raise ApiError(404, "this server makes images only: it has no model for text", code="model_not_found")
        named = [model for model in models if not name or model.is_meant_by(name)]
        if not named:
            assert name
            message = f"there is no model {name[:200]!r} here, only {_names(models)}"
            if any(model.is_meant_by(name) for model in self.image_models):
                message = f"the model {name[:200]!r} makes images only, use {_names(models)}"
            raise ApiError(404, message, param="model", code="model_not_found")
        able = [model for model in named if model.can(kind)]
        if not able:
            raise named[0].refusal(kind)
        return able[0]

    def find_image(self, name: str | None) -> ServedImageModel:
        """Return the model that makes an image or a video; raise a 404 if there is none of this name."""
        models = self.image_models
        message = "this server makes no images: it was started without --image-model"
        for model in models:
            if not name or model.is_meant_by(name):
                return model
            message = f"{name[:200]!r} makes no images here, only {_names(models)} does"
        raise ApiError(404, message, param="model", code="model_not_found")

    def find(self, name: str) -> ServedTextModel | ServedImageModel:
        """Return the model of this name, whatever it can do; raise a 404 if there is none."""
        for model in self.image_models:
            if model.is_meant_by(name):
                return model
        return self.find_text(name)

    def objects(self, created: int, settings: ServerSettings) -> list[dict[str, Any]]:
        """Return the models and what each can do, for /v1/models."""
        models: list[ServedTextModel | ServedImageModel] = [*self.text_models, *self.image_models]
        return [model.as_object(created, settings) for model in models]


def _names(models: Sequence[ServedTextModel] | Sequence[ServedImageModel]) -> str:
    return " or ".join(repr(model.name) for model in models)
