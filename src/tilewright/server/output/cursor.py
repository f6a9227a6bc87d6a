"""Text that comes in pieces, read from its front by generators that pause until more comes."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

SPACE = " \t\r\n"  # the white space of JSON, and of templates around tags

T = TypeVar("T")
Steps = Generator[None, None, T]  # yields until there is more text, or its end; returns a T


class Ends:
    """Where a run of text ends: at the first of some tags, or at a character of a regular expression's class."""

    def __init__(self, *tags: str, characters: str = "") -> None:
        self.pattern = re.compile("|".join([*map(re.escape, tags), *([characters] if characters else [])]) or r"(?!)")
        self._tags = tags
        self._longest = max(map(len, tags), default=1)

    def num_undecided(self, text: str, start: int) -> int:
        """How many of the last characters may be the beginning of a tag."""
        for length in range(min(len(text) - start, self._longest - 1), 0, -1):
            end = text[len(text) - length :]
            if any(tag.startswith(end) for tag in self._tags):
                return length
        return 0


class Cursor:
    """The front of a text.

    Text that was read is dropped, so that the cost per character does not grow; after `keep` a copy is kept, for a
    reader that may have to take it back.
    """

    def __init__(self) -> None:
        self._text = ""
        self._position = 0
        self._is_ended = False
        self._kept: list[str] | None = None

    def push(self, text: str) -> None:
        """More text at the back."""
        self._text = self._text[self._position :] + text
        self._position = 0

    def end(self) -> None:
        """No more text will come: generators that wait continue with what there is."""
        self._is_ended = True

    def keep(self) -> None:
        """From here on, what is read is kept too."""
        self._kept = []

    def kept(self) -> str:
        """What was read since `keep`, which ends here."""
        kept = "".join(self._kept or [])
        self.forget()
        return kept

    def forget(self) -> None:
        """Ends `keep`."""
        self._kept = None

    def take(self, length: int) -> str:
        """The next `length` characters, which have come already."""
        text = self._text[self._position : self._position + length]
        self._position += length
        if self._kept is not None:
            self._kept.append(text)
        return text

    def peek(self) -> Steps[str]:
        """The next character, still unread; "" at the end."""
        while self._position == len(self._text):
            if self._is_ended:
                return ""
            yield
        return self._text[self._position]

    def take_if(self, tag: str) -> Steps[bool]:
        """Whether the tag comes next; it is read then."""
        while not self._text.startswith(tag, self._position):
            if self._is_ended or not tag.startswith(self._text[self._position : self._position + len(tag)]):
                return False
            yield
        self.take(len(tag))
        return True

    def take_markup(self, tag: str) -> Steps[bool]:
        """As `take_if`; a tag that the text's end cut off is dropped."""
        is_whole = yield from self.take_if(tag)
        rest = self._text[self._position :] if self._is_ended else ""
        if not is_whole and rest and tag.startswith(rest):
            self.take(len(rest))
        return is_whole

    def drop_cut(self, ends: Ends) -> Steps[None]:
        """Drops what the text ends with if that is the beginning of a tag and nothing else."""
        while (yield from self.peek()):
            length = len(self._text) - self._position
            if ends.num_undecided(self._text, self._position) != length:
                return
            if self._is_ended:
                self.take(length)
                return
            yield

    @property
    def is_exhausted(self) -> bool:
        """Whether the text has ended, and all of it is read."""
        return self._is_ended and self._position == len(self._text)

    def take_all(self, characters: str) -> Steps[str]:
        """The run of these characters that comes next, perhaps empty."""
        run: list[str] = []
        while (character := (yield from self.peek())) and character in characters:
            start = end = self._position
            while end < len(self._text) and self._text[end] in characters:
                end += 1
            run.append(self.take(end - start))
        return "".join(run)

    def take_space(self) -> Steps[str]:
        """The white space that comes next, perhaps none."""
        return (yield from self.take_all(SPACE))

    def read_until(self, ends: Ends, emit: Callable[[str], object]) -> Steps[str]:
        """The end that was met, still unread; "" if the text ended. What comes before it is emitted as it comes."""
        while (found := ends.pattern.search(self._text, self._position)) is None:
            num_held = 0 if self._is_ended else ends.num_undecided(self._text, self._position)
            length = len(self._text) - self._position - num_held
            if length:
                emit(self.take(length))
            if self._is_ended:
                return ""
            yield
        if found.start() > self._position:
            emit(self.take(found.start() - self._position))
        return found.group()


class HeldEnd:
    """Passes text on, but holds back characters at its end that may have to be dropped."""

    def __init__(self, characters: str) -> None:
        self._characters = characters
        self._held: list[str] = []

    def push(self, text: str) -> str:
        """The text that can be passed on now."""
        body = text.rstrip(self._characters)
        released = self.release() + body if body else ""
        if len(body) < len(text):
            self._held.append(text[len(body) :])
        return released

    def release(self) -> str:
        """The text that was held back."""
        held, self._held = self._held, []
        return "".join(held)
