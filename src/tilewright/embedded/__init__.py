"""The models that come with the package, for whoever names none. Imports no torch.

`tiny_vl/` answers, `tiny_draw/` makes pictures. Each is a checkpoint folder as any other and is loaded by the same
code; docs/embedded.md tells what they can do.
"""

from pathlib import Path

from tilewright.types import RequestError

MODEL_NAME = "tilewright-tiny-vl"
DRAWING_NAME = "tilewright-tiny-draw"
ABILITIES = "21M parameters; it knows drawn shapes, short words, bar charts"
DRAWING_ABILITIES = "15M parameters; it draws coloured shapes"
DEMO_PICTURE = Path(__file__).with_name("tiny_vl_demo.png")

_FOLDERS = {name: Path(__file__).with_name(name) for name in ("tiny_vl", "tiny_draw")}
_NAMES = {"tiny_vl": MODEL_NAME, "tiny_draw": DRAWING_NAME}
_EXPECTED = {
    "tiny_vl": "a folder, a GGUF file or a hub id",
    "tiny_draw": "a folder in diffusers' layout or a hub id",
}
_FILES = {"tiny_vl": "config.json", "tiny_draw": "model_index.json"}


def path(name: str = "tiny_vl") -> Path:
    """The folder of an embedded model; RequestError where the package was built without it."""
    folder, file = _FOLDERS[name], _FILES[name]
    if not (folder / file).is_file():
        raise RequestError(
            f"no model is named, and this package was built without the embedded one ({folder} has no {file}): "
            f"name {_EXPECTED[name]}"
        )
    return folder


def has(name: str) -> bool:
    """Whether this package was built with it."""
    return (_FOLDERS[name] / _FILES[name]).is_file()


def is_embedded(model: str | Path) -> bool:
    """Whether `model` is the folder of an embedded model, however it is written."""
    return _embedded_name(model) is not None


def name_of(model: str | Path) -> str:
    """The name of a model for its users: that of its folder, file or hub repository."""
    return _embedded_name(model) or Path(model).name


def _embedded_name(model: str | Path) -> str | None:
    folder = Path(model).expanduser().resolve()
    return next((_NAMES[name] for name, own in _FOLDERS.items() if own.resolve() == folder), None)


def notice(how_to_name_another: str) -> str:
    """The notice for users who named no model."""
    return f"no model named: using the embedded {MODEL_NAME} ({ABILITIES}). Another: {how_to_name_another}"


def drawing_notice(how_to_name_another: str) -> str:
    """The same where a picture is made."""
    return f"no model named: using the embedded {DRAWING_NAME} ({DRAWING_ABILITIES}). Another: {how_to_name_another}"
