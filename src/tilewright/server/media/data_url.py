"""The bytes of a data: URL, decoded piece by piece.

Python's base64 decoder holds the interpreter lock: 20 MB in one call would stop the event loop for 0.2 s. Between two
pieces other threads run.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from urllib.parse import unquote, unquote_to_bytes

from tilewright.inputs.media import MediaLimits, base64_fault, check_bytes
from tilewright.types import RequestError

PIECE_CHARACTERS = 1 << 16  # 0.7 ms of decoding


def decode_data_url(url: str, name: str, limits: MediaLimits) -> bytes:
    """The bytes of a data: URL that `check_data_url` accepts.

    RequestError, with the item's name, for one that is not base64, empty or too large.
    """
    comma = url.index(",")
    return _decode(url, name, limits, start=comma + 1, is_base64=url[:comma].lower().endswith(";base64"))


def decode_frames_url(url: str, name: str, limits: MediaLimits) -> list[bytes]:
    """The encoded frames of a video, of a URL as vLLM takes them: data:video/jpeg;base64,FRAME,FRAME,..."""
    frames = url[url.index(",") + 1 :].split(",")
    return [_decode(frame, f"{name}, frame {number}", limits) for number, frame in enumerate(frames, 1)]


def _decode(text: str, name: str, limits: MediaLimits, start: int = 0, is_base64: bool = True) -> bytes:
    data = bytearray()
    pieces = _pieces(text, start)
    try:
        for piece in _base64_pieces(pieces) if is_base64 else map(unquote_to_bytes, pieces):
            data += piece
            if len(data) > limits.max_bytes:
                break  # refused below
    except ValueError as error:
        fault = f"base64: {error}" if is_base64 else "text: it has half of a surrogate pair"
        raise RequestError(f"{name}: the data: URL is not {fault}") from error
    return check_bytes(bytes(data), name, limits)


def _pieces(text: str, start: int) -> Iterator[str]:
    """The text from `start` on, cut nowhere within an escape such as %2B."""
    while start < len(text):
        end = min(start + PIECE_CHARACTERS, len(text))
        if end < len(text) and (escape := text.rfind("%", end - 2, end)) > start:
            end = escape
        yield text[start:end]
        start = end


def _base64_pieces(pieces: Iterator[str]) -> Iterator[bytes]:
    left = ""  # the beginning of a group of four characters
    num_characters, has_padding = 0, False
    for piece in pieces:
        characters = left + "".join((unquote(piece) if "%" in piece else piece).split())
        whole = len(characters) // 4 * 4
        left = characters[whole:]
        if whole and has_padding:
            raise ValueError("it goes on after its padding")
        has_padding = has_padding or characters.endswith("=", 0, whole)
        num_characters += whole
        yield _decoded(characters[:whole])
    if num_characters and not has_padding and not left.strip("="):
        return  # padding that is not needed, which Python's decoder allows too
    if len(left) == 1:
        raise ValueError(f"{num_characters + 1} characters, one more than a multiple of 4")
    yield _decoded(left)


def _decoded(characters: str) -> bytes:
    try:
        return base64.b64decode(characters, validate=True)
    except ValueError:
        raise ValueError(base64_fault(characters)) from None
