"""The models of the distribution tilewright-tiny, for users who name none. Imports no torch.

`tiny_vl/` looks at pictures and answers, `tiny_omni/` hears and speaks, `tiny_draw/` makes pictures. Each is a
checkpoint folder as any other and is loaded by the same code; docs/embedded.md tells what they can do.
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
    name: str  # for users, who may give it wherever a model is named
    abilities: str
    file: str  # that is there if the model is
    others: str  # what another model may be

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
    """The folder that tilewright-tiny announces, or None where it is not installed."""
    found = next(iter(metadata.entry_points(group=_ENTRY_POINTS)), None)
    return None if found is None else Path(found.load())


@cache
def _folders() -> dict[str, Path]:
    """The folder of each embedded model, by its key."""
    home = _home()
    return {} if home is None else {key: home / key for key in MODELS}


def path(key: str = "tiny_vl") -> Path:
    """The folder of an embedded model; RequestError where it is not installed."""
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
    """The file that `tilewright demo` shows a model: `demo.png` or `demo.wav`."""
    home = _home()
    if home is None:
        raise RequestError(f"{name} is not installed: install the package tilewright-tiny, or name a file of yours")
    return home / name


def names() -> list[str]:
    """The names of the models that are installed."""
    return [model.name for key, model in MODELS.items() if has(key)]


def is_embedded(model: str | Path) -> bool:
    """Return whether `model` is the folder of an embedded model, however it is written."""
    return _key_of(model) is not None


def name_of(model: str | Path) -> str:
    """The name of a model for its users: that of its folder, file or hub repository."""
    key = _key_of(model)
    return Path(model).name if key is None else MODELS[key].name


def resolve(model: str) -> str:
    """The folder of the embedded model that has this name; `model` itself where none has it."""
    return next((str(path(key)) for key, own in MODELS.items() if own.name == model), model)


def _key_of(model: str | Path) -> str | None:
    folder = Path(resolve(str(model))).expanduser().resolve()
    return next((key for key, own in _folders().items() if own.resolve() == folder), None)


def notice(how_to_name_another: str, key: str = "tiny_vl") -> str:
    """The notice for users who named no model."""
    return f"{MODELS[key].notice}. Another: {how_to_name_another}"
