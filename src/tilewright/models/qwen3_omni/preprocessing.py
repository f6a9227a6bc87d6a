"""What a Qwen3-Omni checkpoint says of its media: frames of videos, and log-mel frames of sounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tilewright.inputs.audio import Sound
from tilewright.inputs.video import Video
from tilewright.model_files import CheckpointError, read_optional_json
from tilewright.models.qwen3_omni.config import AudioConfig
from tilewright.models.qwen3_vl.preprocessing import Preprocessing, picture_size
from tilewright.ops.mel import HOP, MIN_SAMPLES, SAMPLE_RATE, WINDOW
from tilewright.types import RequestError

# Merged patches of one frame, and of all frames of a video together: what the released processor is called with.
_MIN_FRAME_TOKENS, _MAX_FRAME_TOKENS = 128, 768
_MAX_VIDEO_TOKENS = 115_200
# So many windows of attention are encoded at once: 32 seconds with the released config, as much work as a picture of
# 500 x 500. A longer sound goes on in the next step, so that others' answers do not wait for all of it.
_WINDOWS_PER_PIECE = 4
# The tower does twice as much for a feature of a sound as that of pictures for a patch, which budgets are counted in.
ROWS_PER_FEATURE = 2


@dataclass(frozen=True)
class SoundPreprocessing:
    """How samples become mel frames. All of it is part of a sound's key."""

    num_mel_bins: int
    frames_per_chunk: int
    frames_per_piece: int

    @classmethod
    def read(cls, audio: AudioConfig, folder: str | Path | None) -> SoundPreprocessing:
        """The config's; a folder's file must say the same, and Whisper's window, hop and rate."""
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

    def num_samples(self, sound: Sound) -> int:
        """How many are read: what is decoded is cut, or filled up with zeros, to as many as the file says it has."""
        num_samples = round(sound.duration_s * SAMPLE_RATE)
        if num_samples < MIN_SAMPLES:
            shortest_ms = MIN_SAMPLES * 1000 / SAMPLE_RATE
            raise RequestError(
                f"{sound.name}: {sound.duration_s * 1000:.1f} milliseconds, expected {shortest_ms:.1f} or more"
            )
        return num_samples

    def pieces(self, num_frames: int) -> list[tuple[int, int]]:
        """The mel frames [begin, end) of each piece that is encoded by itself: whole windows, and the rest."""
        step = self.frames_per_piece
        return [(begin, min(begin + step, num_frames)) for begin in range(0, num_frames, step)]

    def chunk_length(self, num_frames: int) -> int:
        """Frames that the chunks of a sound are filled up to: a sound shorter than one is not filled up."""
        return min(num_frames, self.frames_per_chunk)


def _read_settings(folder: Path) -> Mapping[str, Any]:
    section = read_optional_json(folder / "processor_config.json").get("feature_extractor")
    return section or read_optional_json(folder / "preprocessor_config.json")


def frame_indices(num_frames: int, fps: float, settings: Preprocessing) -> list[int]:
    """The frames of a video that are read: whole groups of them, evenly from the first one on."""
    group = settings.temporal_patch_size
    most = min(settings.max_frames, num_frames) // group * group
    wanted = min(max(num_frames / fps * settings.fps, settings.min_frames), most)
    count = int(wanted / group) * group or min(num_frames, group)
    return [index * num_frames // count for index in range(count)]


def frame_size(video: Video, num_sampled: int, settings: Preprocessing) -> tuple[int, int]:
    """The height and width of each frame. The budget is a frame's own, and less than that where there are many."""
    share = _MAX_VIDEO_TOKENS * settings.temporal_patch_size // num_sampled
    most = max(min(_MAX_FRAME_TOKENS, share), int(_MIN_FRAME_TOKENS * 1.05))
    area = settings.factor**2
    bounded = replace(settings, min_pixels=_MIN_FRAME_TOKENS * area, max_pixels=most * area)
    return picture_size(video.height, video.width, bounded, video.name)


def seconds_per_group(video: Video, num_sampled: int, settings: Preprocessing) -> float:
    """How much of a video's time a group of its frames stands for."""
    return video.num_frames / video.fps / num_sampled * settings.temporal_patch_size
