"""Messages between the engine and decoder processes: a JSON header, then raw bytes. Nothing is unpickled."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from typing import Any

_SIZES = struct.Struct("<II")  # of the header, of the bytes after it
_MAX_HEADER_BYTES = 2**16
MAX_PAYLOAD_BYTES = 2**23  # the times of a million frames; pixels and samples go through shared memory


class WireError(Exception):
    """The bytes received are not a message."""


def pack(header: Mapping[str, Any], payload: bytes = b"") -> bytes:
    """The message as it is sent."""
    text = json.dumps(header).encode()
    return _SIZES.pack(len(text), len(payload)) + text + payload


def receive(read_exactly: Callable[[int], bytes]) -> tuple[dict[str, Any], bytes]:
    """The next message; its sizes are checked before any of it is read."""
    header_bytes, payload_bytes = _SIZES.unpack(read_exactly(_SIZES.size))
    if header_bytes > _MAX_HEADER_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
        raise WireError(f"a message of {header_bytes} + {payload_bytes} bytes")
    text = read_exactly(header_bytes)
    payload = read_exactly(payload_bytes)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WireError("a header that is not JSON") from error
    if not isinstance(header, dict):
        raise WireError("a header that is no object")
    return header, payload
