"""The models that come with the package, for whoever names none. Imports no torch.

`tiny_vl/` looks at pictures and answers, `tiny_omni/` hears and speaks, `tiny_draw/` makes pictures. Each is a
checkpoint folder as any other and is loaded by the same code; docs/embedded.md tells what they can do.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tilewright.types import RequestError

_HERE = Path(__file__).parents[1] / "embedded"
DEMO_PICTURE = _HERE / "tiny_vl_demo.png"
DEMO_SOUND = _HERE / "tiny_omni_demo.wav"


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
_FOLDERS = {key: _HERE / key for key in MODELS}
MODEL_NAME, OMNI_NAME, DRAWING_NAME = (MODELS[key].name for key in ("tiny_vl", "tiny_omni", "tiny_draw"))


def path(key: str = "tiny_vl") -> Path:
    """The folder of an embedded model; RequestError where the package was built without it."""
    folder, model = _FOLDERS[key], MODELS[key]
    if not has(key):
        raise RequestError(
            f"no model is named, and this package was built without the embedded one ({folder} has no {model.file}): "
            f"name {model.others}"
        )
    return folder


def has(key: str) -> bool:
    """Whether this package was built with it."""
    return (_FOLDERS[key] / MODELS[key].file).is_file()


def names() -> list[str]:
    """Return the names of the models that this package was built with."""
    return [model.name for key, model in MODELS.items() if has(key)]


def is_embedded(model: str | Path) -> bool:
    """Whether `model` is the folder of an embedded model, however it is written."""
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
    return next((key for key, own in _FOLDERS.items() if own.resolve() == folder), None)


def notice(how_to_name_another: str, key: str = "tiny_vl") -> str:
    """The notice for users who named no model."""
    return f"{MODELS[key].notice}. Another: {how_to_name_another}"
