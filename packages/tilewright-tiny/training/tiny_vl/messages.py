"""An item as the one message that asks it: its images in order, its clip, its question."""

from __future__ import annotations

import base64
import io
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import av
import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from training.tiny_vl.items import Item


def for_server(item: Item) -> list[dict[str, Any]]:
    """The messages with media as data URLs, lossless: the server sees the pixels that were drawn."""
    content = [_url_part("image", "image/png", png(image)) for image in item.images]
    if item.clip:
        content.append(_url_part("video", "video/mp4", mp4(item.clip, item.fps)))
    return [{"role": "user", "content": [*content, {"type": "text", "text": item.question}]}]


def for_engine(item: Item) -> list[dict[str, Any]]:
    """The messages with media as they are."""
    content: list[dict[str, Any]] = [{"type": "image", "image": image} for image in item.images]
    if item.clip:
        content.append({"type": "video", "video": frames(item.clip), "fps": item.fps})
    return [{"role": "user", "content": [*content, {"type": "text", "text": item.question}]}]


def frames(clip: tuple[Image.Image, ...]) -> np.ndarray:
    """[frames, height, width, 3] uint8."""
    return np.stack([np.asarray(frame.convert("RGB")) for frame in clip])


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def mp4(clip: tuple[Image.Image, ...], fps: float) -> bytes:
    """The frames as H.264 of RGB with a quantiser of 0, which loses nothing."""
    rate = Fraction(fps).limit_denominator(1000)
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("libx264rgb", rate=rate, options={"qp": "0", "preset": "ultrafast"})
        stream.width, stream.height, stream.pix_fmt = clip[0].width, clip[0].height, "rgb24"
        for frame in frames(clip):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))
    return buffer.getvalue()


def _url_part(kind: str, media_type: str, data: bytes) -> dict[str, Any]:
    url = f"data:{media_type};base64,{base64.b64encode(data).decode()}"
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}
