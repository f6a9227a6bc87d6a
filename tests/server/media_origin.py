"""A server on this machine that media are fetched from, and a resolver that knows its names."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

Answer = bytes | Callable[[asyncio.StreamWriter], object]  # what is sent, or who sends it


def ok(body: bytes, *headers: str) -> bytes:
    lines = ["HTTP/1.1 200 OK", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def redirect(location: str, status: int = 302) -> bytes:
    return f"HTTP/1.1 {status} Over there\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n".encode()


@dataclass
class Origin:
    answers: Mapping[str, Answer]
    port: int = 0
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    num_open: int = 0
    most_open: int = 0
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.requests]

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                path = head[0].split(" ")[1]
                self.requests.append((path, dict(line.split(": ", 1) for line in head[1:] if line)))
                self.num_open += 1
                self.most_open = max(self.most_open, self.num_open)
                try:
                    await self.answer(path, writer)
                finally:
                    self.num_open -= 1
        writer.close()

    async def answer(self, path: str, writer: asyncio.StreamWriter) -> None:
        answer = self.answers[path]
        if isinstance(answer, bytes):
            writer.write(answer)
        else:
            await answer(writer)
        await writer.drain()


@contextlib.asynccontextmanager
async def serving(answers: Mapping[str, Answer], tls: ssl.SSLContext | None = None) -> AsyncIterator[Origin]:
    """The origin, at the same port of 127.0.0.1 and 127.0.0.2."""
    origin = Origin(answers)
    server = await asyncio.start_server(origin.handle, "127.0.0.1", 0, ssl=tls)
    origin.port = server.sockets[0].getsockname()[1]
    other = await asyncio.start_server(origin.handle, "127.0.0.2", origin.port, ssl=tls)
    try:
        yield origin
    finally:
        server.close()
        other.close()
        for writer in origin.writers:
            writer.transport.abort()
        await asyncio.sleep(0)


class Names:
    """A resolver of a few names, each with the answers to give in turn, the last one for ever; and of numbers.

    The network is not used.
    """

    def __init__(self, names: Mapping[str, Sequence[Sequence[str]]]) -> None:
        self.names = {name: list(answers) for name, answers in names.items()}
        self.hosts: list[str] = []

    def __call__(self, host: str, port: int) -> list[str]:
        self.hosts.append(host)
        answers = self.names.get(host)
        if answers:
            return list(answers.pop(0) if len(answers) > 1 else answers[0])
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        return [str(address[0]) for *_, address in found]
