"""What the first rank and another say to each other while they start: JSON over a socket, with descriptors."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from typing import Any

MAX_BYTES = 1 << 16
MAX_FDS = 4


class Channel:
    """One end. A message is one packet: whole, or not there."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """The own end, and the socket of the other."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours), theirs

    def send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        socket.send_fds(self._connection, [json.dumps(message).encode()], fds)

    def receive(self) -> tuple[dict[str, Any], list[int]]:
        """The next message with its descriptors. EOFError: the other end is closed."""
        data, fds, *_ = socket.recv_fds(self._connection, MAX_BYTES, MAX_FDS)
        if not data:
            raise EOFError("the other end of the channel is closed")
        return json.loads(data), fds

    def close(self) -> None:
        self._connection.close()
