"""The Engine's options as flags, for every command that runs a model. Imports the engine only to open one."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.engine.options import EngineOptions
from tilewright.flags.options import add_options, given_options
from tilewright.host import files
from tilewright.host.files import CheckpointError
from tilewright.host.memory import explained_shortage, require_start
from tilewright.types import RequestError, UnsupportedConfig
from tilewright.weights import embedded, hub

if TYPE_CHECKING:
    from tilewright.engine.engine import Engine

MODEL_HELP = f"a folder, a GGUF file or a hub id (default: the embedded {embedded.MODEL_NAME})"


class _ModelAction(argparse.Action):
    """Stores the model, given as an argument or as -m; the last of several -m counts."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        if values is None:  # the argument is left out
            return
        is_argument = option is None
        if namespace.model is not None and (is_argument or getattr(namespace, "model_is_argument", False)):
            parser.error(f"two models are named, {namespace.model} and {values}: expected one")
        namespace.model, namespace.model_is_argument = values, is_argument


def add_model_argument(parser: argparse.ArgumentParser, text: str, *, is_positional: bool = False) -> None:
    """Add -m and, if `is_positional`, the argument MODEL."""
    if is_positional:
        parser.add_argument("model", nargs="?", metavar="MODEL", action=_ModelAction, help=text)
        text = "the same"
    parser.add_argument("-m", "--model", metavar="MODEL", action=_ModelAction, help=text)


def add_arguments(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """Add -m and the engine's options; `defaults` are this command's defaults that differ from the Engine's."""
    add_model_argument(parser, MODEL_HELP)
    add_engine_arguments(parser, **defaults)


def add_engine_arguments(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """Add the engine's options, for a command that adds the model's flag itself."""
    add_options(parser.add_argument_group("engine"), EngineOptions, defaults)


def engine_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the Engine's arguments from the flags, with the embedded model if they name none."""
    given = given_options(EngineOptions, options)
    return {"model": str(embedded.path(embedded_key(options))) if options.model is None else options.model, **given}


def embedded_key(options: argparse.Namespace) -> str:
    """Return the embedded model of a command without -m: tiny_omni for sound or speech, else tiny_vl."""
    return "tiny_omni" if getattr(options, "audio", None) or getattr(options, "speak", None) else "tiny_vl"


def check_file(flag: str, file: str) -> Path:
    """Return the path of a file to read; raise RequestError if there is none."""
    path = Path(file).expanduser()
    try:
        files.open_regular(path).close()
    except FileNotFoundError:
        raise RequestError(f"{flag} {file}: there is no such file") from None
    except OSError as error:
        raise RequestError(f"{flag} {file}: {error.strerror or error}") from error
    return path


def check_model(model: str | None, mmproj: str | None = None) -> None:
    """Raise RequestError for a missing model, before seconds are spent on importing torch."""
    if model is not None and hub.find(model) is None:
        hub.check(model)
    if mmproj not in (None, "none"):
        in_folder = None if model is None else Path(model).expanduser().parent / mmproj
        check_file("--mmproj", mmproj if in_folder is None or not files.exists(in_folder) else str(in_folder))


def open_engine(options: argparse.Namespace, *, progress: bool, **more: Any) -> Engine:
    """Open the Engine from the flags and the further arguments `more`; raise RequestError if it cannot be loaded.

    If the embedded model is used because none is named, a line on standard error says so, unless --quiet.
    """
    given = engine_options(options)
    check_model(options.model, options.mmproj)
    if options.model is None and not getattr(options, "quiet", False):
        print(f"tilewright: {embedded.notice('-m ./Qwen3-VL-2B-Instruct', embedded_key(options))}", file=sys.stderr)
    return make_engine(progress=progress, **given, **more)


def make_engine(**options: Any) -> Engine:
    """Open an Engine; raise RequestError for a model that cannot be loaded."""
    name = embedded.name_of(options.get("model") or embedded.MODEL_NAME)
    require_start(name)
    try:
        with explained_shortage(name):
            from tilewright.engine.engine import Engine

            return Engine(**options)
    except (CheckpointError, UnsupportedConfig, FileNotFoundError) as error:
        raise RequestError(str(error)) from error
