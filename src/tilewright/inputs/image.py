"""Reads images of any form as RGB: the size from the header, the pixels on demand.

Frame durations of WebP, PNG and GIF without times are read from the file's chunks: FFmpeg takes those files for one
frame.
"""

from __future__ import annotations

import hashlib
import io
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.inputs.media import UNREADABLE, MediaLimits, MediaPart, check_pixels, read_source
from tilewright.types import RequestError

if TYPE_CHECKING:
    from PIL.Image import Image

_PNG = b"\x89PNG\r\n\x1a\n"
_DEFAULT_DELAY_S = 0.1  # for frames without a duration, as in browsers


def frame_delays_s(data: bytes) -> list[float] | None:
    """Return the duration of each frame (one for a still image); None for files that FFmpeg has to read."""
    if data.startswith(_PNG):
        found = [_png_delay(body) for kind, body in _png_chunks(data) if kind == b"fcTL" and len(body) >= 26]
    elif data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        # A frame has 12 bytes of position and size, then its milliseconds in 3 bytes.
        bodies = [body for kind, body in _riff_chunks(data) if kind == b"ANMF" and len(body) >= 16]
        found = [int.from_bytes(body[12:15], "little") / 1000 for body in bodies]
    elif data[:6] in (b"GIF87a", b"GIF89a"):
        num_frames, num_controls = _count_gif_blocks(data)
        if num_controls >= num_frames:
            return None
        found = [0.0] * num_frames
    else:
        return None
    return [delay_s or _DEFAULT_DELAY_S for delay_s in found] or [_DEFAULT_DELAY_S]


def _png_delay(control: bytes) -> float:
    numerator, denominator = struct.unpack(">HH", control[20:24])
    return numerator / (denominator or 100)


def _png_chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    position = len(_PNG)
    while position + 8 <= len(data):
        size, kind = struct.unpack_from(">I4s", data, position)
        yield kind, data[position + 8 : position + 8 + min(size, 26)]
        position += size + 12


def _riff_chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    position = 12
    while position + 8 <= len(data):
        kind, size = struct.unpack_from("<4sI", data, position)
        yield kind, data[position + 8 : position + 8 + min(size, 16)]
        position += 8 + size + size % 2


def _count_gif_blocks(data: bytes) -> tuple[int, int]:
    """Return the numbers of frames and of blocks with a frame's duration."""
    num_frames = num_controls = 0
    position = 13 + (_color_table_bytes(data[10]) if len(data) > 10 else 0)
    while position + 2 < len(data):
        if data[position] == 0x21:  # an extension; its kind is the next byte
            num_controls += data[position + 1] == 0xF9
            position += 2
        elif data[position] == 0x2C and position + 9 < len(data):  # a frame: position, size, flags, code width
            num_frames += 1
            position += 11 + _color_table_bytes(data[position + 9])
        else:
            break
        while position < len(data) and (size := data[position]):  # data blocks, up to an empty one
            position += 1 + size
        position += 1
    return num_frames, num_controls


def _color_table_bytes(flags: int) -> int:
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


# Formats whose decoders are safe for untrusted bytes; some of Pillow's other formats start other programs.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_TURNED = (5, 6, 7, 8)  # EXIF orientations that swap height and width


@dataclass(frozen=True)
class OpenedImage:
    """An image of known size, upright. `decode` returns [height, width, 3] uint8, or raises RequestError.

    `open_image` makes it of a MediaPart; a processor makes a PreparedMedium of it.
    """

    name: str
    height: int
    width: int
    decode: Callable[[], np.ndarray]
    digest: bytes = b""  # of the file, or of the pixels and their shape; empty in a decoder process


ReadImage = Callable[[bytes, str, MediaLimits], OpenedImage]  # (encoded bytes, item's name for errors, limits)


def read_image(data: bytes, name: str, limits: MediaLimits) -> OpenedImage:
    """Return the image in the bytes, without a digest; its pixels are decoded on demand, in this process."""
    image = _open(data, name, limits)
    check_pixels(image.height, image.width, name, limits)
    height, width = image.height, image.width
    if _orientation(image, data, name) in _TURNED:
        height, width = width, height

    def decode() -> np.ndarray:
        pixels = _decode(lambda: _to_rgb(_open(data, name, limits)), name)
        if pixels.shape[:2] != (height, width):
            raise RequestError(f"{name}: decoded to {pixels.shape[1]} x {pixels.shape[0]}, its header says otherwise")
        return pixels

    return OpenedImage(name, height, width, decode)


def animation_frames(data: bytes, name: str, indices: Sequence[int], limits: MediaLimits) -> Iterator[np.ndarray]:
    """Yield the frames of an animated image at ascending indices, [H, W, 3] uint8 each."""
    image = _open(data, name, limits)
    # A PNG may have a separate default image for viewers without animations, which Pillow counts as a frame.
    first = int(getattr(image, "default_image", False))

    def frame(index: int) -> np.ndarray:
        image.seek(first + index)
        return _to_rgb(image)

    for index in indices:
        yield _decode(partial(frame, index), name)


def open_image(part: MediaPart, limits: MediaLimits, read: ReadImage = read_image) -> OpenedImage:
    """Return the image of a part: bytes, a file, a PIL image, an array or a tensor. `read` reads encoded ones."""
    from PIL import Image

    source = read_source(part, limits)
    if isinstance(source, bytes):
        digest = hashlib.blake2b(source, digest_size=32).digest()
        return replace(read(source, part.name, limits), digest=digest)
    if isinstance(source, Image.Image):
        check_pixels(source.height, source.width, part.name, limits)
        return _from_pixels(_decode(lambda: _to_rgb(source), part.name), part.name)
    if hasattr(source, "__array__"):  # numpy, torch, jax
        pixels = array_to_rgb(_as_array(source, part.name), part.name)
        check_pixels(pixels.shape[0], pixels.shape[1], part.name, limits)
        return _from_pixels(pixels, part.name)
    expected = "bytes, a path, a PIL image or an array"
    raise RequestError(f"{part.name}: it is a {type(source).__name__}, expected {expected}")


def _from_pixels(pixels: np.ndarray, name: str) -> OpenedImage:
    digest = hashlib.blake2b(repr(pixels.shape).encode(), digest_size=32)
    digest.update(np.ascontiguousarray(pixels).data)
    return OpenedImage(name, pixels.shape[0], pixels.shape[1], lambda: pixels, digest.digest())


def _open(data: bytes, name: str, limits: MediaLimits) -> Image:
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError as error:
        # Pillow's own limit, which a server's decoders turn off. The error has no size.
        most = 2 * (Image.MAX_IMAGE_PIXELS or 0)
        limit = (
            f"{limits.max_pixels} (--max-pixels)" if limits.max_pixels <= most else f"{most} (MAX_IMAGE_PIXELS of PIL)"
        )
        raise RequestError(f"{name}: more than {most} pixels, the limit is {limit}") from error
    except UnidentifiedImageError as error:
        raise RequestError(f"{name}: not an image that can be read, expected {', '.join(FORMATS)}") from error
    except Exception as error:
        raise _unreadable(name) from error


def _orientation(image: Image, data: bytes, name: str) -> int:
    # Pillow decodes a whole PNG to find EXIF after the pixels: skip that if there is none.
    if image.format == "PNG" and b"eXIf" not in data and b"Raw profile type" not in data:
        return 1
    try:
        return int(image.getexif().get(0x0112, 1))
    except Exception as error:
        raise _unreadable(name) from error


def _decode(to_rgb: Callable[[], np.ndarray], name: str) -> np.ndarray:
    try:
        return to_rgb()
    except MemoryError:
        raise
    except Exception as error:
        raise _unreadable(name) from error


def _unreadable(name: str) -> RequestError:
    # For damaged files decoders raise OSError, SyntaxError, struct.error, zlib.error and more.
    return RequestError(f"{name}: cannot be decoded: {UNREADABLE}")


def _to_rgb(image: Image) -> np.ndarray:
    """Return [H, W, 3] uint8: upright, transparency over white, the upper 8 of 16 bits."""
    from PIL import Image as Pillow
    from PIL import ImageOps

    image.load()
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):
        # 16-bit greys. Pillow's conversion clips at 255, which gives a white image.
        levels = np.asarray(image).astype(np.int32)
        is_wide = image.mode != "I" or levels.max() > 255
        grey = np.clip(levels >> 8 if is_wide else levels, 0, 255).astype(np.uint8)
        return np.repeat(grey[:, :, None], 3, axis=2)
    if "A" in image.getbands() or "a" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = Pillow.new("RGBA", image.size, (255, 255, 255, 255))
        image = Pillow.alpha_composite(white, image)
    return np.array(image.convert("RGB"))


def _as_array(source: Any, name: str) -> np.ndarray:
    if hasattr(source, "detach"):  # a tensor; numpy has no bf16
        source = source.detach().cpu()
        source = source.float() if source.is_floating_point() else source
    try:
        return np.asarray(source)
    except (TypeError, ValueError) as error:
        raise RequestError(f"{name}: it cannot be read as an array: {error}") from error


def array_to_rgb(array: np.ndarray, name: str) -> np.ndarray:
    """Return [..., H, W, 3] uint8 from [..., H, W, C] or [..., C, H, W] with C of 1, 3 or 4, or from a grey [H, W].

    uint8 levels are kept, floats are 0 to 1. If both ends could be channels, the first one is.
    """
    if array.ndim == 2:
        array = array[None]
    if array.ndim < 3 or 0 in array.shape:
        raise RequestError(f"{name}: its shape is {list(array.shape)}, expected [H, W, 3] or [3, H, W]")
    if array.shape[-3] in (1, 3, 4):
        array = np.moveaxis(array, -3, -1)
    elif array.shape[-1] not in (1, 3, 4):
        raise RequestError(f"{name}: its shape is {list(array.shape)}, expected 1, 3 or 4 channels first or last")
    if np.issubdtype(array.dtype, np.floating):
        low, high = float(array.min()), float(array.max())
        if not (low >= 0 and high <= 1):  # NaN fails too
            raise RequestError(f"{name}: its values are {low:g} to {high:g}, expected floats of 0 to 1 or uint8")
        array = np.rint(array * 255).astype(np.uint8)
    elif array.dtype == np.bool_:
        array = array.astype(np.uint8) * 255
    elif array.dtype != np.uint8:
        raise RequestError(f"{name}: its type is {array.dtype}, expected uint8, or floats of 0 to 1")
    if array.shape[-1] == 4:
        alpha = array[..., 3:].astype(np.float32) / 255
        array = np.rint(alpha * array[..., :3] + (1 - alpha) * 255).astype(np.uint8)
    elif array.shape[-1] == 1:
        array = np.repeat(array, 3, axis=-1)
    return np.ascontiguousarray(array)
