"""Encodes generated images, with their settings in the file."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

SETTINGS_KEY = "parameters"  # key of a PNG's text, as in other tools
_EXIF_DESCRIPTION = 0x010E  # ImageDescription, for JPEG and WebP


def encode_image(pixels: np.ndarray, file_format: str, settings: Mapping[str, Any], quality: int = 95) -> bytes:
    """Return the png, jpeg or webp file of uint8 [H, W, 3]."""
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
    """Return the settings stored in an image's file; None if it has none."""
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        text = image.info.get(SETTINGS_KEY) or image.getexif().get(_EXIF_DESCRIPTION)
    try:
        found = json.loads(text) if text else None
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
