"""Turns messages or prompts with media into the thinker's inputs: ids, positions, patches, mel frames."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilewright.host.files import CheckpointError, read_optional_json
from tilewright.inputs.audio import OpenedSound
from tilewright.inputs.chat_template import ChatTemplate
from tilewright.inputs.isolation.opener import Opener
from tilewright.inputs.media import MediaLimits, MediaPart, check_duration, content_key
from tilewright.inputs.precomputed import Precomputed
from tilewright.inputs.precomputed_values import ValueSizes
from tilewright.inputs.precomputed_values import prepare as prepare_values
from tilewright.inputs.processor import Placement, PreparedMedium
from tilewright.inputs.tokenizer import Tokenizer
from tilewright.inputs.video import OpenedVideo, SampledFrames
from tilewright.models.qwen3_omni.config import AudioConfig, MediaTokens
from tilewright.models.qwen3_vl.preprocessing import Preprocessing, image_size
from tilewright.models.qwen3_vl.processor import Qwen3VlProcessor
from tilewright.models.text_config import integer
from tilewright.ops.media import HOP, MIN_SAMPLES, SAMPLE_RATE, WINDOW, log_mel
from tilewright.types import MediaKind, RequestError, Span

# Merged patches of one frame, and of all frames of a video: the arguments of the released processor.
_MIN_FRAME_TOKENS, _MAX_FRAME_TOKENS = 128, 768
_MAX_VIDEO_TOKENS = 115_200
# Windows of attention encoded at once: 32 seconds with the released config, as much work as an image of 500 x 500. A
# longer sound continues in the next step, so that other answers do not wait for all of it.
_WINDOWS_PER_PIECE = 4
# Budgets are counted in patches; the tower does twice as much work for a feature of a sound as for a patch of an
# image.
ROWS_PER_FEATURE = 2


@dataclass(frozen=True)
class SoundPreprocessing:
    """The conversion of samples to mel frames. All of it is part of a sound's key."""

    num_mel_bins: int
    frames_per_chunk: int
    frames_per_piece: int

    @classmethod
    def read(cls, audio: AudioConfig, folder: str | Path | None) -> SoundPreprocessing:
        """Read the config; a folder's file must agree with it, and with Whisper's window, hop and rate."""
        expected = {
            "feature_size": audio.num_mel_bins,
            "n_fft": WINDOW,
            "hop_length": HOP,
            "sampling_rate": SAMPLE_RATE,
            "dither": 0.0,
        }
        settings = {} if folder is None else _read_settings(Path(folder))
        for key, value in expected.items():
            if settings.get(key, value) != value:
                raise CheckpointError(f"sound preprocessing has {key} {settings[key]}, expected {value}")
        frames = audio.frames_per_chunk
        return cls(audio.num_mel_bins, frames, frames * audio.chunks_per_window * _WINDOWS_PER_PIECE)

    def num_samples(self, sound: OpenedSound) -> int:
        """Return how many samples are read: decoded sound is cut or padded to the length its file states."""
        num_samples = round(sound.duration_s * SAMPLE_RATE)
        if num_samples < MIN_SAMPLES:
            shortest_ms = MIN_SAMPLES * 1000 / SAMPLE_RATE
            raise RequestError(
                f"{sound.name}: {sound.duration_s * 1000:.1f} milliseconds, expected {shortest_ms:.1f} or more"
            )
        return num_samples

    def pieces(self, num_frames: int) -> list[tuple[int, int]]:
        """Return the mel frames [begin, end) of each piece that is encoded separately: whole windows, and the rest."""
        step = self.frames_per_piece
        return [(begin, min(begin + step, num_frames)) for begin in range(0, num_frames, step)]

    def chunk_length(self, num_frames: int) -> int:
        """Return the frames that the chunks of a sound are padded to; a sound shorter than a chunk is not padded."""
        return min(num_frames, self.frames_per_chunk)


def _read_settings(folder: Path) -> Mapping[str, Any]:
    section = read_optional_json(folder / "processor_config.json").get("feature_extractor")
    return section or read_optional_json(folder / "preprocessor_config.json")


def frame_indices(num_frames: int, fps: float, settings: Preprocessing) -> list[int]:
    """Return the frames of a video that are read: whole groups, evenly spread from the first frame on."""
    group = settings.temporal_patch_size
    most = min(settings.max_frames, num_frames) // group * group
    wanted = min(max(num_frames / fps * settings.fps, settings.min_frames), most)
    count = int(wanted / group) * group or min(num_frames, group)
    return [index * num_frames // count for index in range(count)]


def frame_size(video: OpenedVideo, num_sampled: int, settings: Preprocessing) -> tuple[int, int]:
    """Return the height and width of each frame, within the budget of a frame, and of all frames."""
    share = _MAX_VIDEO_TOKENS * settings.temporal_patch_size // num_sampled
    most = max(min(_MAX_FRAME_TOKENS, share), int(_MIN_FRAME_TOKENS * 1.05))
    area = settings.factor**2
    bounded = replace(settings, min_pixels=_MIN_FRAME_TOKENS * area, max_pixels=most * area)
    return image_size(video.height, video.width, bounded, video.name)


def seconds_per_group(video: OpenedVideo, num_sampled: int, settings: Preprocessing) -> float:
    """Return how much of a video's time one group of its frames covers."""
    return video.num_frames / video.fps / num_sampled * settings.temporal_patch_size


def place(
    ids: Sequence[int],
    media: Sequence[PreparedMedium],
    tokens: MediaTokens,
    audio: AudioConfig,
    *,
    merge_size: int,
    positions_per_second: int,
) -> Placement:
    """Return the prompt with every medium in place of its placeholder, those of each kind in order.

    A medium has one placeholder, or as many as it has features. A video with its sound has one: the tokens around a
    sound are nested in those around a video, and the features of both are ordered by time.
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
    """Token ids and positions, appended from left to right.

    Text and sound count up on all three axes. Frames run over rows and columns, at the time they are shown. The next
    part continues after the largest position of the previous one.
    """

    def __init__(self, tokens: MediaTokens, audio: AudioConfig, merge_size: int, positions_per_second: int) -> None:
        self._tokens, self._audio = tokens, audio
        self._merge_size, self._positions_per_second = merge_size, positions_per_second
        self._ids: list[int] = []
        self._positions: list[np.ndarray] = []
        self._next_position = 0
        self._spans: dict[int, tuple[PreparedMedium, list[Span]]] = {}  # by identity: a medium may occur twice

    def add_text(self, ids: Sequence[int]) -> None:
        self._ids += ids
        self._count_up(self._next_position, len(ids))
        self._next_position += len(ids)

    def add_medium(self, medium: PreparedMedium, start: int, length: int) -> None:
        """Append a medium in place of `length` placeholders from token `start` on."""
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
        """Return the time of a group of frames, in positions after its video's start; 0 for an image."""
        return int(medium.times_s[group] * self._positions_per_second) if medium.times_s else 0

    def _add_joined(self, video: PreparedMedium) -> None:
        """Append a video and its sound by time; at the same time frames come first."""
        self.add_text([self._tokens.audio_start])
        sound, first = _Sound(video.sound, self._audio), self._next_position
        for group in range(video.grid[0]):
            earlier = min(self._time(video, group) - sound.num_placed, sound.num_left)
            if earlier > 0:
                self._add_sound(sound, earlier, first)
            self._add_group(video, group, first)
        if sound.num_left:
            self._add_sound(sound, sound.num_left, first)
        self.add_text([self._tokens.audio_end])

    def _add_sound(self, sound: _Sound, count: int, first: int) -> None:
        """Append the next features of a sound whose first feature is at position `first`."""
        begin = first + sound.num_placed
        for piece, length in sound.next_features(count):
            self._add_span(piece, Span(len(self._ids), length))
            self._ids += [self._tokens.audio] * length
        self._count_up(begin, count)
        self._next_position = begin + count

    def _add_group(self, medium: PreparedMedium, group: int, first: int) -> None:
        """Append an image, or a group of frames of a video that starts at position `first`."""
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
    """Remaining features of a sound's pieces."""

    def __init__(self, pieces: Sequence[PreparedMedium], audio: AudioConfig) -> None:
        self._left = [(piece, audio.num_features(piece.grid[1])) for piece in pieces]
        self.num_placed = 0
        self.num_left = sum(count for _, count in self._left)

    def next_features(self, count: int) -> Iterator[tuple[PreparedMedium, int]]:
        """Yield the pieces of the next `count` features, with the number of each."""
        self.num_placed += count
        self.num_left -= count
        while count:
            piece, available = self._left[0]
            placed = min(count, available)
            yield piece, placed
            count -= placed
            self._left[0] = piece, available - placed
            if placed == available:
                self._left.pop(0)


class OmniProcessor(Qwen3VlProcessor):
    accepts: Sequence[MediaKind] = ("image", "video", "audio")

    def __init__(
        self,
        config: Mapping[str, Any],
        folder: str | Path | None,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        limits: MediaLimits | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
        opener: Opener | None = None,
    ) -> None:
        thinker = config.get("thinker_config", config)
        self.tokens = MediaTokens.from_dict(thinker)
        around = {"vision_start_token_id": self.tokens.vision_start, "vision_end_token_id": self.tokens.vision_end}
        super().__init__({**thinker, **around}, folder, tokenizer, template, limits, dtype=dtype, opener=opener)
        self.audio = AudioConfig.from_dict(thinker["audio_config"])
        self.sound = SoundPreprocessing.read(self.audio, folder)
        self.positions_per_second = integer(thinker, "position_id_per_seconds", 13)

    def _place(self, ids: Sequence[int], media: Sequence[PreparedMedium]) -> Placement:
        return place(
            ids,
            media,
            self.tokens,
            self.audio,
            merge_size=self.image.merge_size,
            positions_per_second=self.positions_per_second,
        )

    def _prepare(self, part: MediaPart) -> PreparedMedium:
        if part.kind == "audio":
            return self._prepare_sound(part)
        medium = super()._prepare(part)
        if not part.with_sound:
            return medium
        if not isinstance(part.source, str | Path | bytes | bytearray | memoryview):
            raise RequestError(f"{part.name}: use_audio_in_video is asked for, expected a file: frames have no sound")
        sound = self._prepare_sound(dataclasses.replace(part, kind="audio", with_sound=False))
        return dataclasses.replace(medium, sound=sound.sound)

    def _prepare_sound(self, part: MediaPart) -> PreparedMedium:
        """Return the sound in pieces that are encoded separately; the rows belong to the pieces."""
        sound, settings = self.opener.open_sound(part, self.limits, SAMPLE_RATE), self.sound
        mel = _MelFrames(sound, settings.num_samples(sound), settings.num_mel_bins)
        chunk, key = settings.chunk_length(mel.num_frames), (mel.num_frames, settings)
        pieces = []
        for begin, end in settings.pieces(mel.num_frames):
            num_frames = end - begin
            num_rows = -(-num_frames * settings.num_mel_bins // self.media_buffer.shape[1])
            pieces.append(
                PreparedMedium(
                    part.name,
                    "audio",
                    key=content_key(sound.digest, "audio", begin, *key),
                    grid=(chunk, num_frames, settings.num_mel_bins),
                    num_rows=num_rows,
                    encoder_rows=ROWS_PER_FEATURE * self.audio.num_features(num_frames),
                    write=mel.writer(begin, end),
                )
            )
        return dataclasses.replace(pieces[0], num_rows=0, sound=tuple(pieces))

    def _prepare_values(self, given: Precomputed, name: str) -> PreparedMedium:
        if given.kind != "audio":
            return super()._prepare_values(given, name)
        _, num_frames, num_bins = given.grid
        whole = self._value_sizes(given, name)
        values = prepare_values(given, whole, name, self.limits, self.media_buffer.rows.dtype)
        chunk, pieces, first_feature = self.sound.chunk_length(num_frames), [], 0
        for begin, end in self.sound.pieces(num_frames):
            sizes = self._sound_sizes(end - begin)
            rows = (first_feature, first_feature + sizes.num_features) if given.is_encoded else (begin, end)
            grid = (chunk, end - begin, num_bins)
            pieces.append(self._medium_of_values(given, name, sizes, values.part(*rows), grid))
            first_feature += sizes.num_features
        return dataclasses.replace(pieces[0], num_rows=0, sound=tuple(pieces))

    def _value_sizes(self, given: Precomputed, name: str) -> ValueSizes:
        if given.kind != "audio":
            return super()._value_sizes(given, name)
        one, num_frames, num_bins = given.grid
        fewest = MIN_SAMPLES // HOP
        if one != 1 or num_bins != self.sound.num_mel_bins or num_frames < fewest:
            raise RequestError(
                f"{name}: grid is {given.grid}, expected (1, mel frames, {self.sound.num_mel_bins}), {fewest} frames "
                "or more"
            )
        if given.tiling != (1, 1) or given.times_s:
            raise RequestError(f"{name}: a sound has neither tiling nor times_s, expected grid alone")
        check_duration(num_frames * HOP / SAMPLE_RATE, name, self.limits)
        counts = [self.audio.num_features(end - begin) for begin, end in self.sound.pieces(num_frames)]
        return dataclasses.replace(self._sound_sizes(num_frames), num_features=sum(counts))

    def _sound_sizes(self, num_frames: int) -> ValueSizes:
        """Return the sizes of a piece that is encoded separately."""
        num_features = self.audio.num_features(num_frames)
        return ValueSizes(
            num_rows=num_frames,
            row_width=self.sound.num_mel_bins,
            num_features=num_features,
            feature_width=self.audio.output_width,
            encoder_rows=ROWS_PER_FEATURE * num_features,
        )

    def _frame_indices(self, video: OpenedVideo) -> Sequence[int]:
        return frame_indices(video.num_frames, video.fps, self.video)

    def _frame_size(self, video: OpenedVideo, num_sampled: int) -> tuple[int, int]:
        return frame_size(video, num_sampled, self.video)

    def _group_times(self, video: OpenedVideo, sampled: SampledFrames) -> Sequence[float]:
        num_sampled, group = len(sampled.indices), self.video.temporal_patch_size
        seconds = seconds_per_group(video, num_sampled, self.video)
        return [index * seconds for index in range(-(-num_sampled // group))]


class _MelFrames:
    """Mel frames of a sound, computed when its first piece is written, and kept until the last one is."""

    def __init__(self, sound: OpenedSound, num_samples: int, num_bins: int) -> None:
        self._sound, self._num_samples, self._num_bins = sound, num_samples, num_bins
        self.num_frames = num_samples // HOP
        self._frames: Tensor | None = None

    def writer(self, begin: int, end: int) -> Callable[[Tensor], None]:
        """Return a function that writes the frames [begin, end) contiguously to rows of any width."""

        def write(rows: Tensor) -> None:
            frames = self._frames
            if frames is None:
                frames = log_mel(torch.from_numpy(self._samples()), self._num_bins)
            self._frames = frames if end < self.num_frames else None
            rows.view(-1)[: (end - begin) * self._num_bins].copy_(frames[begin:end].flatten())

        return write

    def _samples(self) -> np.ndarray:
        samples = self._sound.decode()[: self._num_samples]
        return np.pad(samples, (0, self._num_samples - len(samples)))
