"""Decodes server-sent events from a body that arrives in arbitrary pieces."""

from __future__ import annotations


class EventDecoder:
    """The data of each event; comments, names and ids are ignored."""

    def __init__(self) -> None:
        self._rest = b""  # of a line
        self._data: list[bytes] = []  # lines of the current event
        self._is_after_cr = False

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of the events that are complete with this piece. Lines end in LF, CRLF or CR."""
        if self._is_after_cr and piece.startswith(b"\n"):
            piece = piece[1:]
            self._is_after_cr = False
        if b"\r" in piece:
            self._is_after_cr = piece.endswith(b"\r")
            piece = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        elif piece:
            self._is_after_cr = False
        *lines, self._rest = (self._rest + piece).split(b"\n")
        return [event for line in lines if (event := self._take_line(line)) is not None]

    def end(self) -> list[bytes]:
        """The last event, if the body ended without its empty line."""
        found = [self._take_line(line) for line in (self._rest, b"")]
        self._rest = b""
        return [event for event in found if event is not None]

    def _take_line(self, line: bytes) -> bytes | None:
        if line.startswith(b"data:"):
            self._data.append(line[6:] if line[5:6] == b" " else line[5:])
        elif line == b"data":
            self._data.append(b"")
        elif not line and self._data:
            event = b"\n".join(self._data)
            self._data = []
            return event
        return None
