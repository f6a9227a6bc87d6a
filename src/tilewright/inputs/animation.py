"""How long the frames of an animation are shown, from its chunks: of those that FFmpeg does not read, and Pillow does.

That is WebP, PNG, and GIF whose frames say nothing of time: FFmpeg takes all of those for one frame.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

_PNG = b"\x89PNG\r\n\x1a\n"
_DEFAULT_DELAY_S = 0.1  # for frames that say none, as browsers have it


def frame_delays_s(data: bytes) -> list[float] | None:
    """The seconds of each frame, one for a still picture; None for a file that is FFmpeg's to read."""
    if data.startswith(_PNG):
        found = [_png_delay(body) for kind, body in _png_chunks(data) if kind == b"fcTL" and len(body) >= 26]
    elif data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        # A frame has its place and size, 3 bytes each, before the milliseconds, which are 3 too.
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
    """(frames, blocks that say how long one is shown)."""
    num_frames = num_controls = 0
    position = 13 + (_color_table_bytes(data[10]) if len(data) > 10 else 0)
    while position + 2 < len(data):
        if data[position] == 0x21:  # an extension, of the kind that comes next
            num_controls += data[position + 1] == 0xF9
            position += 2
        elif data[position] == 0x2C and position + 9 < len(data):  # a frame: place, size, flags, the width of codes
            num_frames += 1
            position += 11 + _color_table_bytes(data[position + 9])
        else:
            break
        while position < len(data) and (size := data[position]):  # its blocks, up to an empty one
            position += 1 + size
        position += 1
    return num_frames, num_controls


def _color_table_bytes(flags: int) -> int:
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0
