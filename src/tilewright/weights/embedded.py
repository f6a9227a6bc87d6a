"""The models of the distribution tilewright-tiny, for users who name none. Imports no torch.

`tiny_vl/` answers questions about images, `tiny_omni/` hears and speaks, `tiny_draw/` makes images. Each is an
ordinary checkpoint folder, loaded by the same code; docs/embedded.md describes what they can do.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from tilewright.types import RequestError

# The distribution announces its folder under this name, so that it can be installed anywhere or left out.
_ENTRY_POINTS = "tilewright.embedded"


@dataclass(frozen=True)
class Embedded:
    name: str  # for users: accepted wherever a model is named
    abilities: str
    file: str  # exists if the model is installed
    others: str  # accepted names of other models

    @property
    def notice(self) -> str:
        return f"no model named: using the embedded {self.name} ({self.abilities})"


_CHECKPOINTS, _PIPELINES = "a folder, a GGUF file or a hub id", "a folder in diffusers' layout or a hub id"
MODELS = {
    "tiny_vl": Embedded(
        "tilewright-tiny-vl",
        "21M parameters; it knows drawn shapes, short words, bar charts",
        "config.json",
        _CHECKPOINTS,
    ),
    "tiny_omni": Embedded(
        "tilewright-tiny-omni",
        "18M parameters; it hears and speaks short English sentences of some 390 words",
        "config.json",
        _CHECKPOINTS,
    ),
    "tiny_draw": Embedded(
        "tilewright-tiny-draw", "15M parameters; it draws coloured shapes", "model_index.json", _PIPELINES
    ),
}
MODEL_NAME, OMNI_NAME, DRAWING_NAME = (MODELS[key].name for key in ("tiny_vl", "tiny_omni", "tiny_draw"))


@cache
def _home() -> Path | None:
    """Return the folder that tilewright-tiny announces, or None if it is not installed."""
    found = next(iter(metadata.entry_points(group=_ENTRY_POINTS)), None)
    return None if found is None else Path(found.load())


@cache
def _folders() -> dict[str, Path]:
    """Return the folder of each embedded model, by its key."""
    home = _home()
    return {} if home is None else {key: home / key for key in MODELS}


def path(key: str = "tiny_vl") -> Path:
    """Return the folder of an embedded model; RequestError if it is not installed."""
    if not has(key):
        raise RequestError(
            f"no model is named, and {MODELS[key].name} is not installed: install the package tilewright-tiny, or name "
            f"{MODELS[key].others}"
        )
    return _folders()[key]


def has(key: str) -> bool:
    """Return whether the model is installed."""
    folder = _folders().get(key)
    return folder is not None and (folder / MODELS[key].file).is_file()


def demo_file(name: str) -> Path:
    """Return the path of a demo file of `tilewright demo`: `demo.png` or `demo.wav`."""
    home = _home()
    if home is None:
        raise RequestError(f"{name} is not installed: install the package tilewright-tiny, or name a file of yours")
    return home / name


def names() -> list[str]:
    """Return the names of the installed models."""
    return [model.name for key, model in MODELS.items() if has(key)]


def is_embedded(model: str | Path) -> bool:
    """Return whether `model` is the folder of an embedded model, in any spelling."""
    return _key_of(model) is not None


def name_of(model: str | Path) -> str:
    """Return the name of a model for users: that of its folder, file or hub repository."""
    key = _key_of(model)
    return Path(model).name if key is None else MODELS[key].name


def resolve(model: str) -> str:
    """Return the folder of the embedded model with this name, or `model` itself."""
    return next((str(path(key)) for key, own in MODELS.items() if own.name == model), model)


def _key_of(model: str | Path) -> str | None:
    folder = Path(resolve(str(model))).expanduser().resolve()
    return next((key for key, own in _folders().items() if own.resolve() == folder), None)


def notice(how_to_name_another: str, key: str = "tiny_vl") -> str:
    """Return the notice for users who named no model."""
    return f"{MODELS[key].notice}. Another: {how_to_name_another}"
