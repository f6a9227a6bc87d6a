"""What tokens see by cross-attention: pictures of adjacent placeholders, up to the next ones."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

from tilewright.types import Medium


@dataclass(frozen=True, eq=False)  # the same pictures may come again in a prompt, as another group of the same key
class CrossGroup:
    """Media whose placeholders stand side by side. Tokens `start` .. `stop` see them, or those of them up to itself.

    Their states lie one after the other, so that the token of the second sees the states of the first two, and the
    third's those of all three.
    """

    media: tuple[Medium, ...]
    start: int
    stop: int  # where the next group starts

    @cached_property
    def key(self) -> bytes:
        """16 bytes that stand for the contents, in order."""
        return group_key(medium.key for medium in self.media)

    @property
    def num_states(self) -> int:
        return sum(medium.num_states for medium in self.media)

    def cross_spans(self, start: int, stop: int) -> Iterator[CrossSpan]:
        """What tokens start .. stop see, cut to those that see the group."""
        num_states = 0
        for index, medium in enumerate(self.media):
            num_states += medium.num_states
            first = self.start + index
            last = first + 1 if index + 1 < len(self.media) else self.stop
            if max(first, start) < min(last, stop):
                yield CrossSpan(self, max(first, start), min(last, stop), num_states)


@dataclass(frozen=True)
class CrossSpan:
    """Tokens start .. stop of a sequence see the first num_states states of a group."""

    group: CrossGroup
    start: int
    stop: int
    num_states: int


def group_key(media_keys: Iterable[bytes]) -> bytes:
    """16 bytes that stand for media side by side, by their own keys."""
    return blake2b(b"".join(media_keys), digest_size=16).digest()


def cross_groups_of(media: Iterable[Medium]) -> list[CrossGroup]:
    """The groups of a prompt, in order; media whose features take the place of tokens are in none."""
    groups: list[list[Medium]] = []
    for medium in sorted((item for item in media if item.num_states), key=_place):
        if groups and _place(groups[-1][-1]) + 1 == _place(medium):
            groups[-1].append(medium)
        else:
            groups.append([medium])
    starts = [_place(group[0]) for group in groups]
    return [
        CrossGroup(tuple(group), start, stop)
        for group, start, stop in zip(groups, starts, [*starts[1:], sys.maxsize], strict=False)
    ]


def _place(medium: Medium) -> int:
    return medium.spans[0].start
