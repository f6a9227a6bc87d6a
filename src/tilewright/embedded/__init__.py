"""The model that comes with the package, for whoever names none. Imports no torch.

`tiny_vl/` is a checkpoint folder as any other and is loaded by the same code; docs/embedded.md tells what it can do.
"""

from pathlib import Path

from tilewright.types import RequestError

MODEL_NAME = "tilewright-tiny-vl"
ABILITIES = "21M parameters; it knows drawn shapes, short words, bar charts"
DEMO_PICTURE = Path(__file__).with_name("tiny_vl_demo.png")

_FOLDER = Path(__file__).with_name("tiny_vl")


def path() -> Path:
    """The folder of the embedded model; RequestError where the package was built without it."""
    if not (_FOLDER / "config.json").is_file():
        raise RequestError(
            f"no model is named, and this package was built without the embedded one ({_FOLDER} has no config.json): "
            "name a folder, a GGUF file or a hub id"
        )
    return _FOLDER


def is_embedded(model: str | Path) -> bool:
    """Whether `model` is the folder of the embedded model, however it is written."""
    return Path(model).expanduser().resolve() == _FOLDER.resolve()


def name_of(model: str | Path) -> str:
    """The name of a model for its users: that of its folder, file or hub repository."""
    return MODEL_NAME if is_embedded(model) else Path(model).name


def notice(how_to_name_another: str) -> str:
    """The notice for users who named no model."""
    return f"no model named: using the embedded {MODEL_NAME} ({ABILITIES}). Another: {how_to_name_another}"
