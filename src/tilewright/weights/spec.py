"""What a model needs from a checkpoint: each weight says which tensors it is made of and how they are laid out.

Layers hold `Weight`s as attributes; `weights.load` finds them (`iter_weights`), checks all their sources against the
checkpoint at once, and fills `value` one weight at a time, from blocks of rows where it can, so that no more than the
packed model and one tensor are in memory.
A weight shared by two layers (a tied head) is one object, and is loaded once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

Value = TypeVar("Value")


@dataclass(frozen=True)
class Source:
    """A tensor of the checkpoint, and the shape it must have."""

    name: str
    shape: tuple[int, ...]


class Reader(Protocol):
    """A source as it is read: bf16 or fp32, whatever the file has."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self) -> Tensor:
        """All of it."""

    def rows(self, begin: int, end: int) -> Tensor:
        """Rows [begin, end) of its first axis. The memory of earlier rows may be given back: copy what is kept."""


class Weight(ABC, Generic[Value]):
    """A weight of the model: where it comes from, and its value once it is loaded.

    Attributes beside the value are plain (numbers, strings, tuples of them): with the class they are the `recipe`.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = tuple(sources)
        self._value: Value | None = None

    @property
    def value(self) -> Value:
        assert self._value is not None, f"{self.sources[0].name} is not loaded"
        return self._value

    @abstractmethod
    def build_from(self, readers: Sequence[Reader], dtype: torch.dtype) -> None:
        """Makes the value from the sources, in their order. The value keeps none of their memory."""

    def build(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> None:
        """The same from tensors in memory."""
        self.build_from([_InMemory(tensor) for tensor in tensors], dtype)

    def restore(self, value: Value) -> None:
        """Takes a value that a weight of the same recipe had."""
        self._value = value

    @property
    def recipe(self) -> str:
        """All that the value depends on but the sources' contents and the dtype: same recipe, same value."""
        settings = {name: value for name, value in sorted(vars(self).items()) if name not in ("_value", "sources")}
        for name, setting in settings.items():
            if not _is_plain(setting):
                raise TypeError(f"{type(self).__name__}.{name} is {setting!r}, expected numbers, strings or tuples")
        return f"{type(self).__qualname__} {settings} {[astuple(source) for source in self.sources]}"


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))


@dataclass(frozen=True)
class _InMemory:
    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def read(self) -> Tensor:
        return self.tensor

    def rows(self, begin: int, end: int) -> Tensor:
        return self.tensor[begin:end]


def iter_weights(part: object) -> Iterator[Weight]:
    """Every weight of a model, once each, in the order in which its layers name them."""
    seen: set[int] = set()

    def visit(part: object) -> Iterator[Weight]:
        if isinstance(part, Weight):
            if id(part) not in seen:
                seen.add(id(part))
                yield part
        elif isinstance(part, (list, tuple)):
            for item in part:
                yield from visit(item)
        elif type(part).__module__.startswith("tilewright.") and hasattr(part, "__dict__"):
            for item in vars(part).values():
                yield from visit(item)

    return visit(part)
