"""What opens the media of a request: this process, or a decoder process of its own."""

from __future__ import annotations

from typing import Protocol

from tilewright.inputs.audio import Sound, open_audio
from tilewright.inputs.image import Picture, open_picture
from tilewright.inputs.media import Fetch, MediaLimits, MediaPart
from tilewright.inputs.video import Video, open_video


class Opener(Protocol):
    """Opens media: sizes at once, pixels and samples when they are asked for."""

    def open_picture(self, part: MediaPart, limits: MediaLimits, fetch: Fetch | None = None) -> Picture: ...

    def open_video(self, part: MediaPart, limits: MediaLimits, fetch: Fetch | None = None) -> Video: ...

    def open_audio(
        self, part: MediaPart, limits: MediaLimits, sample_rate: int, fetch: Fetch | None = None
    ) -> Sound: ...

    def close(self) -> None: ...


class InProcessOpener:
    """For trusted media: decoded in this process, by the calling thread."""

    def open_picture(self, part: MediaPart, limits: MediaLimits, fetch: Fetch | None = None) -> Picture:
        return open_picture(part, limits, fetch)

    def open_video(self, part: MediaPart, limits: MediaLimits, fetch: Fetch | None = None) -> Video:
        return open_video(part, limits, fetch)

    def open_audio(self, part: MediaPart, limits: MediaLimits, sample_rate: int, fetch: Fetch | None = None) -> Sound:
        return open_audio(part, limits, sample_rate, fetch)

    def close(self) -> None:
        """Nothing is held open."""
