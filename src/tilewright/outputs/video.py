"""Encodes videos: MP4 for players and browsers, or an animated image, by the file's suffix.

Imports no torch: frames are uint8 arrays.
"""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.types import RequestError

_log = logging.getLogger(__name__)

# Encoders for MP4, best first. FFmpeg's build decides which of the two for H.264 exists; MPEG-4 part 2 always does, but
# few browsers play it.
MP4_ENCODERS = ("libx264", "libopenh264", "mpeg4")
ANIMATIONS = {".gif": "GIF", ".webp": "WEBP", ".png": "PNG"}
SUFFIXES = (".mp4", *ANIMATIONS)
X264_OPTIONS = {"crf": "18", "preset": "medium"}  # no visible loss, at twice the size of the default
BT709 = 1  # FFmpeg's number for matrix, primaries and transfer curve
LIMITED_RANGE = 1


def check_video_name(path: str | Path) -> str:
    """Return the suffix of a video's path; raise RequestError for a suffix of no known kind of video."""
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise RequestError(f"{path} ends in {suffix or 'nothing'}, expected one of {', '.join(SUFFIXES)}")
    return suffix


def encode_video(
    frames: np.ndarray, fps: float, suffix: str = ".mp4", settings: Mapping[str, Any] | None = None
) -> bytes:
    """Return the video file of frames uint8 [T, H, W, 3]. An MP4 stores `settings` as its comment."""
    if frames.ndim != 4 or frames.shape[3] != 3 or frames.dtype != np.uint8 or not len(frames):
        raise ValueError(f"frames are {frames.dtype} {list(frames.shape)}, expected uint8 [T, H, W, 3]")
    return _encode_mp4(frames, fps, settings) if suffix == ".mp4" else _encode_animation(frames, fps, suffix)


def _encode_mp4(frames: np.ndarray, fps: float, settings: Mapping[str, Any] | None) -> bytes:
    import av
    from av.video.reformatter import Colorspace

    # Chroma has half the size: odd sides lose a row or a column.
    height, width = (side - side % 2 for side in frames.shape[1:3])
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        if settings is not None:
            container.metadata["comment"] = json.dumps(settings, ensure_ascii=False)
        stream = container.add_stream(mp4_encoder(), rate=Fraction(fps).limit_denominator(1001))
        if stream.name == "libx264":
            stream.options = X264_OPTIONS
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        # Written to the file: otherwise players guess by its size, and show wrong colours.
        context = stream.codec_context
        context.colorspace = context.color_primaries = context.color_trc = BT709
        context.color_range = LIMITED_RANGE
        for pixels in frames:
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels[:height, :width]), format="rgb24")
            converted = frame.reformat(format="yuv420p", dst_colorspace=Colorspace.ITU709)
            container.mux(stream.encode(converted))
        container.mux(stream.encode(None))
    return file.getvalue()


def mp4_encoder() -> str:
    """Return the best encoder of this FFmpeg; log a warning if it is not for H.264."""
    import av

    for name in MP4_ENCODERS:
        try:
            av.codec.Codec(name, "w")
        except av.codec.codec.UnknownCodecError:
            continue
        if name == MP4_ENCODERS[-1]:
            _log.warning("PyAV has no encoder for H.264: the video is MPEG-4 part 2, which few browsers play")
        return name
    raise RequestError(f"PyAV has no encoder for MP4, expected one of {', '.join(MP4_ENCODERS)}")


def _encode_animation(frames: np.ndarray, fps: float, suffix: str) -> bytes:
    from PIL import Image

    images = [Image.fromarray(np.ascontiguousarray(frame)) for frame in frames]
    file = io.BytesIO()
    options = {"lossless": True} if suffix == ".webp" else {}
    images[0].save(
        file,
        ANIMATIONS[suffix],
        save_all=True,
        append_images=images[1:],
        duration=round(1000 / fps),
        loop=0,
        **options,
    )
    return file.getvalue()
