"""Media in their places: placeholders expanded, positions on three axes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tilewright.inputs.media_processor import Placement, PreparedMedium
from tilewright.types import MediaKind, RequestError, Span

_Run = tuple[MediaKind, int, int]  # kind, start, length


@dataclass(frozen=True)
class Placeholders:
    """Ids of the tokens that stand for media, and of those around each picture and each group of frames."""

    of_kind: Mapping[MediaKind, int]
    start: int
    end: int


def place(
    ids: Sequence[int],
    media: Sequence[PreparedMedium],
    placeholders: Placeholders,
    merge_size: int,
    encode: Callable[[str], list[int]],
) -> Placement:
    """The prompt with every medium in the place of its placeholders, in order.

    A medium without times has one placeholder, or as many as it has features. One with times (a video) has one, which
    becomes a time, a start, the features and an end for each group of frames; or each group has its run of
    placeholders already.
    """
    runs = _runs(ids, placeholders.of_kind)
    waiting = {kind: _Waiting(kind, media, runs) for kind in placeholders.of_kind}
    prompt = _Prompt(merge_size)
    position = 0
    for kind, start, length in runs:
        medium, is_expanded = waiting[kind].take(), waiting[kind].is_expanded
        token_id = placeholders.of_kind[kind]
        prompt.add_text(ids[position:start])
        position = start + length
        if not medium.times_s or is_expanded:
            allowed = {prompt.group_length(medium)} | (set() if medium.times_s else {1})
            _check_run(medium, start, length, allowed)
            prompt.add_group(token_id, medium)
            continue
        _check_run(medium, start, length, {1})
        for time_s in medium.times_s:
            prompt.add_text([*encode(f"<{time_s:.1f} seconds>"), placeholders.start])
            prompt.add_group(token_id, medium)
            prompt.add_text([placeholders.end])
    prompt.add_text(ids[position:])
    for queue in waiting.values():
        if queue.media:
            raise RequestError(f"{queue.media[0].name}: the prompt has no placeholder left for it")
    return prompt.build()


class _Waiting:
    """The media of a kind that have no place yet; one with times comes once per group where groups have runs."""

    def __init__(self, kind: MediaKind, media: Sequence[PreparedMedium], runs: Sequence[_Run]) -> None:
        self.kind = kind
        given = [medium for medium in media if medium.kind == kind]
        self.num_given = len(given)
        self.is_expanded = sum(other == kind for other, _, _ in runs) != len(given)
        self.media = [medium for medium in given for _ in (medium.times_s if self.is_expanded else ()) or (0,)]

    def take(self) -> PreparedMedium:
        if not self.media:
            raise RequestError(
                f"the prompt has more placeholders of {self.kind}s than the {self.num_given} given have use for"
            )
        return self.media.pop(0)


def _check_run(medium: PreparedMedium, start: int, length: int, allowed: set[int]) -> None:
    if length not in allowed:
        expected = " or ".join(str(count) for count in sorted(allowed))
        raise RequestError(f"{medium.name}: {length} placeholders from token {start} on, expected {expected}")


class _Prompt:
    """Token ids and positions, written from left to right.

    Text counts up on all three axes. A group of patches stays at one time and runs over its rows and columns; text goes
    on behind the longer of the two.
    """

    def __init__(self, merge_size: int) -> None:
        self._merge_size = merge_size
        self._ids: list[int] = []
        self._positions: list[np.ndarray] = []
        self._next_position = 0
        self._spans: dict[int, tuple[PreparedMedium, list[Span]]] = {}  # by identity: a picture may come twice

    def add_text(self, ids: Sequence[int]) -> None:
        self._ids += ids
        positions = np.arange(len(ids), dtype=np.int64) + self._next_position
        self._positions.append(np.broadcast_to(positions, (3, len(ids))))
        self._next_position += len(ids)

    def group_length(self, medium: PreparedMedium) -> int:
        """How many features a picture, or a group of a video's frames, has."""
        return medium.grid[1] * medium.grid[2] // self._merge_size**2

    def add_group(self, token_id: int, medium: PreparedMedium) -> None:
        rows, columns = (side // self._merge_size for side in medium.grid[1:])
        span = Span(len(self._ids), rows * columns)
        self._spans.setdefault(id(medium), (medium, []))[1].append(span)
        self._ids += [token_id] * span.length
        self._positions.append(np.indices((1, rows, columns), dtype=np.int64).reshape(3, -1) + self._next_position)
        self._next_position += max(rows, columns)

    def build(self) -> Placement:
        media = [(medium, tuple(spans)) for medium, spans in self._spans.values()]
        return Placement(self._ids, np.concatenate(self._positions, axis=1), self._next_position, media)


def _runs(ids: Sequence[int], of_kind: Mapping[MediaKind, int]) -> list[_Run]:
    """Every run of equal placeholders."""
    kinds = {token_id: kind for kind, token_id in of_kind.items()}
    found: list[_Run] = []
    for index, token_id in enumerate(ids):
        kind = kinds.get(token_id)
        if kind is None:
            continue
        if found and found[-1][0] == kind and sum(found[-1][1:]) == index:
            found[-1] = (kind, found[-1][1], found[-1][2] + 1)
        else:
            found.append((kind, index, 1))
    return found
