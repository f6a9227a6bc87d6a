"""HTTP/1.1's chunked bodies."""

from __future__ import annotations

import re

from tilewright.bench.http_errors import MalformedAnswer

MAX_LINE_BYTES = 1 << 12  # the line with a chunk's size


class ChunkDecoder:
    """Decodes a chunked body that arrives in arbitrary pieces."""

    def __init__(self) -> None:
        self.is_complete = False
        self.rest = b""  # received, not decoded yet
        self._missing = 0  # bytes of the current chunk
        self._is_line_end_due = False  # the one after a chunk
        self._is_in_trailer = False

    def feed(self, data: bytes) -> bytes:
        data, at, parts = self.rest + data, 0, []
        while not self.is_complete:
            if self._missing:
                part = data[at : at + self._missing]
                if not part:
                    break
                parts.append(part)
                at += len(part)
                self._missing -= len(part)
                self._is_line_end_due = not self._missing
                continue
            end = data.find(b"\n", at)
            if end < 0:
                if len(data) - at > MAX_LINE_BYTES:
                    raise MalformedAnswer(f"the line with a chunk's size is over {MAX_LINE_BYTES} bytes")
                break
            self._take_line(data[at:end].rstrip(b"\r"))
            at = end + 1
        self.rest = data[at:]
        return b"".join(parts)

    def _take_line(self, line: bytes) -> None:
        if self._is_line_end_due:
            if line:
                raise MalformedAnswer("a chunk is longer than its size says")
            self._is_line_end_due = False
        elif self._is_in_trailer:
            self.is_complete = not line
        else:
            size = re.match(rb"[0-9a-fA-F]{1,15}(?=[ \t;]|$)", line)
            if not size:
                raise MalformedAnswer(f"the size of a chunk is {line[:40]!r}")
            self._missing = int(size[0], 16)
            self._is_in_trailer = not self._missing
