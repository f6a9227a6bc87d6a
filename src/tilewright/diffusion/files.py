"""Pictures and videos as the bytes of files. A picture's file carries the settings that make it again."""

from __future__ import annotations

import fractions
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

SETTINGS_KEY = "parameters"  # of a PNG's text: where other tools keep theirs
_EXIF_DESCRIPTION = 0x010E  # ImageDescription, for JPEG and WebP
_CRF = "18"  # of x264: visually close to the frames


def encode_picture(pixels: np.ndarray, file_format: str, settings: Mapping[str, Any], quality: int = 95) -> bytes:
    """The file of uint8 [H, W, 3]: png, jpeg or webp."""
    from PIL import Image, PngImagePlugin

    image = Image.fromarray(np.ascontiguousarray(pixels))
    text = json.dumps(dict(settings), ensure_ascii=True)
    file = io.BytesIO()
    if file_format == "png":
        info = PngImagePlugin.PngInfo()
        info.add_text(SETTINGS_KEY, text)
        image.save(file, "PNG", pnginfo=info)
    else:
        exif = Image.Exif()
        exif[_EXIF_DESCRIPTION] = text
        image.save(file, file_format.upper(), quality=quality, exif=exif)
    return file.getvalue()


def settings_of(data: bytes) -> dict[str, Any] | None:
    """The settings that a picture's file carries; None: it carries none."""
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        text = image.info.get(SETTINGS_KEY) or image.getexif().get(_EXIF_DESCRIPTION)
    try:
        found = json.loads(text) if text else None
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def encode_video(frames: np.ndarray | Sequence[np.ndarray], fps: float) -> bytes:
    """An MP4 of uint8 frames [T, H, W, 3], H.264 in 4:2:0: odd sides lose a row or a column."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=fractions.Fraction(fps).limit_denominator(1001))
        height, width = frames[0].shape[:2]
        stream.width, stream.height = width - width % 2, height - height % 2
        stream.pix_fmt = "yuv420p"
        stream.options = {"crf": _CRF}
        for pixels in frames:
            cut = np.ascontiguousarray(pixels[: stream.height, : stream.width])
            container.mux(stream.encode(av.VideoFrame.from_ndarray(cut, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()
