"""Flags of commands from declared options (options.py), and the options that a command line gives."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping
from typing import Any

from tilewright.options import Option, declared

# argparse's own groups have no name.
Group = Any


def add_options(
    group: Group,
    options: type[Any],
    defaults: Mapping[str, Any] | None = None,
    *,
    names: Collection[str] | None = None,
    prefix: str = "",
) -> None:
    """Add a flag for each option that has one, or for those in `names`; its default is None, or the command's own.

    With the `prefix` image, `tp` is --image-tp and `image_tp`, and its help says that it is about the image model.
    """
    for option in _with_flag(options, names):
        own = (defaults or {}).get(option.name)
        flag = f"--{prefix}-{option.flag[2:]}" if prefix else option.flag
        text = f"{prefix} model: {option.help(own)}" if prefix else option.help(own)
        how: dict[str, Any] = {"dest": _dest(option, prefix), "default": own}
        how["help"] = text.replace("%", "%%")  # argparse formats % in help
        if option.is_switch:
            group.add_argument(flag, action="store_const", const=not option.default, **how)
        else:
            about = option.about
            how |= {"choices": about.choices} if about.choices else {"metavar": about.metavar}
            group.add_argument(flag, type=_parser(option), **how)


def given_options(
    options: type[Any], namespace: argparse.Namespace, *, names: Collection[str] | None = None, prefix: str = ""
) -> dict[str, Any]:
    """Return the options that a command line gives, by name."""
    found = {option.name: getattr(namespace, _dest(option, prefix)) for option in _with_flag(options, names)}
    return {name: value for name, value in found.items() if value is not None}


def _with_flag(options: type[Any], names: Collection[str] | None) -> list[Option]:
    return [option for option in declared(options) if option.about.has_flag and (names is None or option.name in names)]


def _dest(option: Option, prefix: str) -> str:
    return f"{prefix}_{option.name}" if prefix else option.name


def _parser(option: Option) -> Callable[[str], Any]:
    about = option.about
    if about.least is None:
        return str
    least = about.least
    return lambda text: text if text in about.words else whole_number(text, least)


def positive(text: str) -> int:
    return whole_number(text, 1)


def natural(text: str) -> int:
    return whole_number(text, 0)


def whole_number(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {least} or more")
    return int(text)
