"""Flags of commands from declared options (options.py), and the options that a command line gives."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from tilewright.options import Option, declared

# argparse's own groups have no name.
Group = Any


def add_options(group: Group, options: type[Any], defaults: Mapping[str, Any] | None = None) -> None:
    """Add a flag for each option that has one; its default is None, or the command's own in `defaults`."""
    for option in declared(options):
        if not option.about.has_flag:
            continue
        own = (defaults or {}).get(option.name)
        # argparse formats % in help.
        how: dict[str, Any] = {"dest": option.name, "default": own, "help": option.help(own).replace("%", "%%")}
        if option.is_switch:
            group.add_argument(option.flag, action="store_const", const=not option.default, **how)
        else:
            about = option.about
            how |= {"choices": about.choices} if about.choices else {"metavar": about.metavar}
            group.add_argument(option.flag, type=_parser(option), **how)


def given_options(options: type[Any], namespace: argparse.Namespace) -> dict[str, Any]:
    """Return the options that a command line gives, by name."""
    names = [option.name for option in declared(options) if option.about.has_flag]
    return {name: value for name in names if (value := getattr(namespace, name)) is not None}


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
