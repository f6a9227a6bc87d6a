"""Messages or prompts with pictures, videos and sounds to what the thinker reads: ids, positions, patches, mel."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilewright.inputs.audio import Sound
from tilewright.inputs.chat_template import ChatTemplate
from tilewright.inputs.media import Fetch, MediaLimits, MediaPart, check_duration, content_key
from tilewright.inputs.media_processor import Placement, PreparedMedium
from tilewright.inputs.opener import Opener
from tilewright.inputs.precomputed import Precomputed
from tilewright.inputs.precomputed_values import ValueSizes
from tilewright.inputs.precomputed_values import prepare as prepare_values
from tilewright.inputs.tokenizer import Tokenizer
from tilewright.inputs.video import Sampled, Video
from tilewright.models.qwen3_omni.config import AudioConfig, MediaTokens
from tilewright.models.qwen3_omni.preprocessing import (
    ROWS_PER_FEATURE,
    SoundPreprocessing,
    frame_indices,
    frame_size,
    seconds_per_group,
)
from tilewright.models.qwen3_omni.prompt import place
from tilewright.models.qwen3_vl.processor import Qwen3VlProcessor
from tilewright.models.text_config import integer
from tilewright.ops.mel import HOP, MIN_SAMPLES, SAMPLE_RATE, log_mel
from tilewright.types import MediaKind, RequestError


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

    def _prepare(self, part: MediaPart, fetch: Fetch | None) -> PreparedMedium:
        if part.kind == "audio":
            return self._prepare_sound(part, fetch)
        medium = super()._prepare(part, fetch)
        if not part.with_sound:
            return medium
        if not isinstance(part.source, str | Path | bytes | bytearray | memoryview):
            raise RequestError(f"{part.name}: use_audio_in_video is asked for, expected a file: frames have no sound")
        sound = self._prepare_sound(dataclasses.replace(part, kind="audio", with_sound=False), fetch)
        return dataclasses.replace(medium, sound=sound.sound)

    def _prepare_sound(self, part: MediaPart, fetch: Fetch | None) -> PreparedMedium:
        """The sound in pieces that are encoded by themselves; the pieces have the rows, the whole has none."""
        sound, settings = self.opener.open_audio(part, self.limits, SAMPLE_RATE, fetch), self.sound
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
        """Of a piece that is encoded by itself."""
        num_features = self.audio.num_features(num_frames)
        return ValueSizes(
            num_rows=num_frames,
            row_width=self.sound.num_mel_bins,
            num_features=num_features,
            feature_width=self.audio.output_width,
            encoder_rows=ROWS_PER_FEATURE * num_features,
        )

    def _frame_indices(self, video: Video) -> Sequence[int]:
        return frame_indices(video.num_frames, video.fps, self.video)

    def _frame_size(self, video: Video, num_sampled: int) -> tuple[int, int]:
        return frame_size(video, num_sampled, self.video)

    def _group_times(self, video: Video, sampled: Sampled) -> Sequence[float]:
        num_sampled, group = len(sampled.indices), self.video.temporal_patch_size
        seconds = seconds_per_group(video, num_sampled, self.video)
        return [index * seconds for index in range(-(-num_sampled // group))]


class _MelFrames:
    """The mel frames of a sound, made when the first piece of it is written, and kept until the last one is."""

    def __init__(self, sound: Sound, num_samples: int, num_bins: int) -> None:
        self._sound, self._num_samples, self._num_bins = sound, num_samples, num_bins
        self.num_frames = num_samples // HOP
        self._frames: Tensor | None = None

    def writer(self, begin: int, end: int) -> Callable[[Tensor], None]:
        """Writes the frames [begin, end) to rows of any width, one after the other."""

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
