"""Text that arrives in pieces, read by generators that pause until more arrives."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

SPACE = " \t\r\n"  # the white space of JSON, and of templates around tags

T = TypeVar("T")
Steps = Generator[None, None, T]  # yields while it needs more text; returns a T


class Ends:
    """The ends of a run of text: the first of some tags, or a character of a regular expression's class."""

    def __init__(self, *tags: str, characters: str = "") -> None:
        self.pattern = re.compile("|".join([*map(re.escape, tags), *([characters] if characters else [])]) or r"(?!)")
        self._tags = tags
        self._longest = max(map(len, tags), default=1)

    def num_undecided(self, text: str, start: int) -> int:
        """Return the number of last characters that may be the beginning of a tag."""
        for length in range(min(len(text) - start, self._longest - 1), 0, -1):
            end = text[len(text) - length :]
            if any(tag.startswith(end) for tag in self._tags):
                return length
        return 0


class Cursor:
    """A position in a text that grows at its end.

    Text that was read is dropped, so that the cost per character does not grow; after `mark` a copy is kept, for
    readers that may need it again.
    """

    def __init__(self) -> None:
        self._text = ""
        self._position = 0
        self._is_ended = False
        self._marked: list[str] | None = None

    def push(self, text: str) -> None:
        """Append text."""
        self._text = self._text[self._position :] + text
        self._position = 0

    def end(self) -> None:
        """Mark the end of the text: paused generators then finish with the text there is."""
        self._is_ended = True

    def mark(self) -> None:
        """Keep a copy of all text that is read from here on."""
        self._marked = []

    def since_mark(self) -> str:
        """Return the text read since `mark`, and drop the mark."""
        text = "".join(self._marked or [])
        self.unmark()
        return text

    def unmark(self) -> None:
        """Drop the mark, and the text read since."""
        self._marked = None

    def read(self, length: int) -> str:
        """Read the next `length` characters, which must have arrived."""
        text = self._text[self._position : self._position + length]
        self._position += length
        if self._marked is not None:
            self._marked.append(text)
        return text

    def peek(self) -> Steps[str]:
        """Return the next character without reading it; "" at the end."""
        while self._position == len(self._text):
            if self._is_ended:
                return ""
            yield
        return self._text[self._position]

    def read_if(self, tag: str) -> Steps[bool]:
        """Read the tag if it comes next; return whether it did."""
        while not self._text.startswith(tag, self._position):
            if self._is_ended or not tag.startswith(self._text[self._position : self._position + len(tag)]):
                return False
            yield
        self.read(len(tag))
        return True

    def read_markup(self, tag: str) -> Steps[bool]:
        """Do as `read_if`, and drop a tag that the end of the text cut off."""
        is_whole = yield from self.read_if(tag)
        rest = self._text[self._position :] if self._is_ended else ""
        if not is_whole and rest and tag.startswith(rest):
            self.read(len(rest))
        return is_whole

    def drop_cut(self, ends: Ends) -> Steps[None]:
        """Drop the rest of the text if it is an incomplete tag and nothing else."""
        while (yield from self.peek()):
            length = len(self._text) - self._position
            if ends.num_undecided(self._text, self._position) != length:
                return
            if self._is_ended:
                self.read(length)
                return
            yield

    @property
    def is_exhausted(self) -> bool:
        """True if the text has ended and all of it is read."""
        return self._is_ended and self._position == len(self._text)

    def read_all(self, characters: str) -> Steps[str]:
        """Read the run of these characters that comes next, which may be empty."""
        run: list[str] = []
        while (character := (yield from self.peek())) and character in characters:
            start = end = self._position
            while end < len(self._text) and self._text[end] in characters:
                end += 1
            run.append(self.read(end - start))
        return "".join(run)

    def read_space(self) -> Steps[str]:
        """Read the white space that comes next, which may be empty."""
        return (yield from self.read_all(SPACE))

    def read_until(self, ends: Ends, emit: Callable[[str], object]) -> Steps[str]:
        """Emit text as it arrives up to one of the ends, and return that without reading it; "" if the text ended."""
        while (found := ends.pattern.search(self._text, self._position)) is None:
            num_held = 0 if self._is_ended else ends.num_undecided(self._text, self._position)
            length = len(self._text) - self._position - num_held
            if length:
                emit(self.read(length))
            if self._is_ended:
                return ""
            yield
        if found.start() > self._position:
            emit(self.read(found.start() - self._position))
        return found.group()


class HeldEnd:
    """Passes text on, and holds back characters at its end that may have to be dropped."""

    def __init__(self, characters: str) -> None:
        self._characters = characters
        self._held: list[str] = []

    def push(self, text: str) -> str:
        """Append text and return what can be passed on now."""
        body = text.rstrip(self._characters)
        released = self.release() + body if body else ""
        if len(body) < len(text):
            self._held.append(text[len(body) :])
        return released

    def release(self) -> str:
        """Return the text that was held back."""
        held, self._held = self._held, []
        return "".join(held)
