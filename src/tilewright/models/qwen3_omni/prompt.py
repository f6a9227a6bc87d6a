"""Media in their places: placeholders expanded, positions on three axes, a video's sound between its frames."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tilewright.inputs.media_processor import Placement, PreparedMedium
from tilewright.models.qwen3_omni.config import AudioConfig, MediaTokens
from tilewright.types import MediaKind, RequestError, Span


def place(
    ids: Sequence[int],
    media: Sequence[PreparedMedium],
    tokens: MediaTokens,
    audio: AudioConfig,
    *,
    merge_size: int,
    positions_per_second: int,
) -> Placement:
    """The prompt with every medium in the place of its placeholder, those of a kind in order.

    A medium has one placeholder, or as many as it has features. A video with its sound has one: between the tokens
    around it stand those around a sound, then the features of both, by the time at which they are seen and heard.
    """
    kinds: dict[int, MediaKind] = {tokens.image: "image", tokens.video: "video", tokens.audio: "audio"}
    waiting = {kind: [medium for medium in media if medium.kind == kind] for kind in kinds.values()}
    prompt = _Prompt(tokens, audio, merge_size, positions_per_second)
    position = 0
    while position < len(ids):
        kind = kinds.get(ids[position])
        start = position
        position += 1
        if kind is None:
            while position < len(ids) and ids[position] not in kinds:
                position += 1
            prompt.add_text(ids[start:position])
            continue
        while position < len(ids) and ids[position] == ids[start]:
            position += 1
        if not waiting[kind]:
            given = sum(medium.kind == kind for medium in media)
            raise RequestError(f"the prompt has more placeholders of {kind}s than the {given} given have use for")
        prompt.add_medium(waiting[kind].pop(0), start, position - start)
    for left in waiting.values():
        if left:
            raise RequestError(f"{left[0].name}: the prompt has no placeholder left for it")
    return prompt.build()


class _Prompt:
    """Token ids and positions, written from left to right.

    Text and sound count up on all three axes. Frames run over rows and columns, and are at the time at which they are
    shown. What follows goes on behind the latest of the positions of what came last.
    """

    def __init__(self, tokens: MediaTokens, audio: AudioConfig, merge_size: int, positions_per_second: int) -> None:
        self._tokens, self._audio = tokens, audio
        self._merge_size, self._positions_per_second = merge_size, positions_per_second
        self._ids: list[int] = []
        self._positions: list[np.ndarray] = []
        self._next_position = 0
        self._spans: dict[int, tuple[PreparedMedium, list[Span]]] = {}  # by identity: a medium may come twice

    def add_text(self, ids: Sequence[int]) -> None:
        self._ids += ids
        self._count_up(self._next_position, len(ids))
        self._next_position += len(ids)

    def add_medium(self, medium: PreparedMedium, start: int, length: int) -> None:
        """In the place of a run of `length` placeholders, which begins at token `start`."""
        num_features = self._num_features(medium)
        is_joined = medium.kind == "video" and medium.sound
        if length not in ({1} if is_joined else {1, num_features}):
            expected = "1" if is_joined or num_features == 1 else f"1 or {num_features}"
            raise RequestError(f"{medium.name}: {length} placeholders from token {start} on, expected {expected}")
        first = self._next_position
        if medium.kind == "audio":
            self._add_sound(_Sound(medium.sound, self._audio), num_features, first)
        elif is_joined:
            self._add_joined(medium)
        else:
            for group in range(medium.grid[0]):
                self._add_group(medium, group, first)

    def build(self) -> Placement:
        media = [(medium, tuple(spans)) for medium, spans in self._spans.values()]
        positions = np.concatenate(self._positions, axis=1)
        return Placement(self._ids, positions, int(positions.max()) + 1, media)

    def _num_features(self, medium: PreparedMedium) -> int:
        if medium.kind == "audio":
            return sum(self._audio.num_features(piece.grid[1]) for piece in medium.sound)
        groups, rows, columns = medium.grid
        return groups * rows * columns // self._merge_size**2

    def _time(self, medium: PreparedMedium, group: int) -> int:
        """Of a group of frames, in positions after the beginning of its video; a picture is at its beginning."""
        return int(medium.times_s[group] * self._positions_per_second) if medium.times_s else 0

    def _add_joined(self, video: PreparedMedium) -> None:
        """A video and its sound: at one time frames come first."""
        self.add_text([self._tokens.audio_start])
        sound, first = _Sound(video.sound, self._audio), self._next_position
        for group in range(video.grid[0]):
            earlier = min(self._time(video, group) - sound.num_taken, sound.num_left)
            if earlier > 0:
                self._add_sound(sound, earlier, first)
            self._add_group(video, group, first)
        if sound.num_left:
            self._add_sound(sound, sound.num_left, first)
        self.add_text([self._tokens.audio_end])

    def _add_sound(self, sound: _Sound, count: int, first: int) -> None:
        """The next features of a sound whose first one is at `first`."""
        begin = first + sound.num_taken
        for piece, length in sound.take(count):
            self._add_span(piece, Span(len(self._ids), length))
            self._ids += [self._tokens.audio] * length
        self._count_up(begin, count)
        self._next_position = begin + count

    def _add_group(self, medium: PreparedMedium, group: int, first: int) -> None:
        """A picture, or a group of frames of a video whose corner at its beginning is at `first`."""
        rows, columns = (side // self._merge_size for side in medium.grid[1:])
        self._add_span(medium, Span(len(self._ids), rows * columns))
        self._ids += [self._tokens.image if medium.kind == "image" else self._tokens.video] * (rows * columns)
        positions = np.indices((1, rows, columns), dtype=np.int64).reshape(3, -1) + first
        positions[0] += self._time(medium, group)
        self._positions.append(positions)
        self._next_position = int(positions.max()) + 1

    def _add_span(self, medium: PreparedMedium, span: Span) -> None:
        self._spans.setdefault(id(medium), (medium, []))[1].append(span)

    def _count_up(self, first: int, count: int) -> None:
        positions = np.arange(count, dtype=np.int64) + first
        self._positions.append(np.broadcast_to(positions, (3, count)))


class _Sound:
    """The features of a sound's pieces, taken from the front."""

    def __init__(self, pieces: Sequence[PreparedMedium], audio: AudioConfig) -> None:
        self._left = [(piece, audio.num_features(piece.grid[1])) for piece in pieces]
        self.num_taken = 0
        self.num_left = sum(count for _, count in self._left)

    def take(self, count: int) -> Iterator[tuple[PreparedMedium, int]]:
        """The pieces that the next `count` features are of, and how many of each."""
        self.num_taken += count
        self.num_left -= count
        while count:
            piece, available = self._left[0]
            taken = min(count, available)
            yield piece, taken
            count -= taken
            self._left[0] = piece, available - taken
            if taken == available:
                self._left.pop(0)
