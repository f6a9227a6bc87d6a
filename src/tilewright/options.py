"""Options that are declared once, as fields of a dataclass: flags, help and tables of the docs follow from it."""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tilewright.types import did_you_mean

_ABOUT = "about"
BAR = "\\|"  # within a cell of a table


@dataclass(frozen=True)
class About:
    """What documents an option beside its name, type and default, and which values it takes."""

    help: str  # of a switch: what its flag does
    default_means: str = ""  # a description of the default
    note: str = ""  # more, for Python's documentation and the docs only
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    least: int | None = None  # the least whole number
    words: tuple[str, ...] = ()  # accepted instead of a number
    has_flag: bool = True


def option(default: Any, help: str, **more: Any) -> Any:
    """Return a field of a dataclass of options; `more` are fields of `About`."""
    return dataclasses.field(default=default, metadata={_ABOUT: About(help, **more)})


@dataclass(frozen=True)
class Option:
    """An option as it is declared."""

    name: str
    default: Any
    about: About

    @property
    def is_switch(self) -> bool:
        return isinstance(self.default, bool)

    @property
    def flag(self) -> str:
        return f"--{'no-' if self.default is True else ''}{self.name.replace('_', '-')}"

    def help(self, default: Any = None) -> str:
        """Return the flag's help, with the command's own default if it has one."""
        if self.is_switch:
            return self.about.help
        if default is None and self.about.default_means:
            return f"{self.about.help} (default: {self.about.default_means})"
        return f"{self.about.help} (default {self.default if default is None else default})"

    @property
    def text(self) -> str:
        """The text for Python's documentation and the docs."""
        found = f"{not self.default}: {self.about.help}" if self.is_switch else self.about.help
        if self.about.default_means:
            found += f"; {self.default}: {self.about.default_means}"
        return f"{found}. {self.about.note}" if self.about.note else found

    @property
    def values(self) -> str:
        """The values that the flag takes, as a command line shows them; empty for a switch."""
        return "|".join(self.about.choices) or self.about.metavar or ""


def declared(options: type[Any]) -> Iterator[Option]:
    """Yield the options that a dataclass declares, in order."""
    for field in dataclasses.fields(options):
        if _ABOUT in field.metadata:
            yield Option(field.name, field.default, field.metadata[_ABOUT])


def check_names(owner: str, given: Mapping[str, Any], options: type[Any]) -> None:
    """Raise TypeError, as Python does for arguments, for a name that is no option; it has the nearest name."""
    known = [option.name for option in declared(options)]
    for name in given:
        if name not in known:
            raise TypeError(f"{owner} has no option {name!r:.100}{did_you_mean(name, known)}")


def signature(options: type[Any], **first: Any) -> inspect.Signature:
    """Return the signature of a class that takes options by name, after the arguments in `first` and their defaults."""
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(name, kinds[0], default=default) for name, default in first.items()]
    parameters += [inspect.Parameter(option.name, kinds[1], default=option.default) for option in declared(options)]
    return inspect.Signature(parameters)


def described(options: type[Any], width: int = 120, margin: int = 4) -> str:
    """Return a paragraph for each option, for a docstring."""
    column = max(len(option.name) for option in declared(options)) + 2
    return "\n".join(
        textwrap.fill(
            f"{' | '.join(option.about.choices)}: {option.text}" if option.about.choices else option.text,
            width,
            initial_indent=" " * margin + option.name.ljust(column),
            subsequent_indent=" " * (margin + column),
        )
        for option in declared(options)
    )


def table(options: type[Any]) -> list[str]:
    """Return the rows of a table for the docs."""
    rows = ["| in Python | flag | default | |", "| --- | --- | --- | --- |"]
    for option in declared(options):
        flag = f"`{f'{option.flag} {option.values}'.strip()}`" if option.about.has_flag else ""
        cells = f"`{option.name}`", flag, f"`{option.default!r}`", option.text
        rows.append(f"| {' | '.join(cell.replace('|', BAR) for cell in cells)} |")
    return rows
