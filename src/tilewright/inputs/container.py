"""Files of video and sound, opened so that they can reach nothing but themselves."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tilewright.inputs.media import UNREADABLE
from tilewright.types import RequestError


@contextmanager
def opened_container(data: bytes, name: str, formats: str) -> Iterator[Any]:
    """The bytes as one of PyAV's containers; what goes wrong inside the block is a `RequestError` too.

    `formats` are FFmpeg's names of those that hold what they play. It also reads playlists: those name other files and
    addresses, which it would open.
    """
    import av

    options = {"format_whitelist": formats, "protocol_whitelist": "none"}
    try:
        # A title in an old encoding is no reason to refuse a file.
        with av.open(io.BytesIO(data), mode="r", options=options, metadata_errors="replace") as container:
            yield container
    except RequestError:
        raise
    except (av.FFmpegError, OSError, ValueError, EOFError, OverflowError) as error:
        raise RequestError(f"{name}: cannot be decoded: {UNREADABLE}") from error
