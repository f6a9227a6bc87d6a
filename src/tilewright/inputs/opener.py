"""Who opens the media of a request: this process, or one that may come to harm."""

from __future__ import annotations

from typing import Protocol

from tilewright.inputs.audio import Sound, open_audio
from tilewright.inputs.image import Picture, open_picture
from tilewright.inputs.media import Fetch, MediaLimits, MediaPart
from tilewright.inputs.video import Video, open_video


class Opener(Protocol):
    """Opens media: their sizes first, what they hold when it is asked for."""

    def open_picture(self, part: MediaPart, limits: MediaLimits, fetch: Fetch | None = None) -> Picture: ...

    def open_video(self, part: MediaPart, limits: MediaLimits, fetch: Fetch | None = None) -> Video: ...

    def open_audio(
        self, part: MediaPart, limits: MediaLimits, sample_rate: int, fetch: Fetch | None = None
    ) -> Sound: ...

    def close(self) -> None: ...


class InProcessOpener:
    """For media one trusts: decoded here, by the thread that asks."""

    def open_picture(self, part: MediaPart, limits: MediaLimits, fetch: Fetch | None = None) -> Picture:
        return open_picture(part, limits, fetch)

    def open_video(self, part: MediaPart, limits: MediaLimits, fetch: Fetch | None = None) -> Video:
        return open_video(part, limits, fetch)

    def open_audio(self, part: MediaPart, limits: MediaLimits, sample_rate: int, fetch: Fetch | None = None) -> Sound:
        return open_audio(part, limits, sample_rate, fetch)

    def close(self) -> None:
        """Nothing is held open."""
