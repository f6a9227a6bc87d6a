"""A text as windows of tokens that a model reads one after the other. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.types import RequestError


@dataclass(frozen=True)
class Window:
    """Tokens that the model reads; those from `first_scored` on count, the ones before them are context."""

    token_ids: tuple[int, ...]
    first_scored: int

    @property
    def num_scored(self) -> int:
        return len(self.token_ids) - self.first_scored


def split(token_ids: Sequence[int], length: int, stride: int, beginning: Sequence[int] = ()) -> list[Window]:
    """Windows of at most `length` tokens, `stride` apart: every token but the first is scored once.

    `beginning` is what the tokenizer puts before a text: every window has it too, within its length.
    """
    size = length - len(beginning)
    if not 1 <= stride < size:
        raise RequestError(f"--stride is {stride}, expected 1 to {size - 1}: less than the tokens of a window")
    if len(token_ids) < 2:
        raise RequestError(f"the text has {len(token_ids)} tokens, expected 2 or more")
    windows = []
    scored = 0 if beginning else 1  # without a beginning, nothing foretells the first token
    start = 0
    while scored < len(token_ids):
        stop = min(start + size, len(token_ids))
        part = (*beginning, *token_ids[start:stop])
        windows.append(Window(part, len(beginning) + scored - start))
        scored = stop
        start += stride
    return windows
