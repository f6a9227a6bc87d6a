"""Streams beside clients that misbehave: prompts of 20 MB, half-sent requests, and readers that take a byte at a time.

    python tests/server/soak_beside.py --concurrency 64 --seconds 60

starts a server of a tiny model, measures the streams first alone, then beside the others, and prints what it found.
Only this command measures times: tests assert what does not depend on who else uses the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from processes import family_of, memory_bytes
from soak import CHAT, COMPLETIONS, WORDS, said

from tilewright.bench.http_client import Client, ServerAddress

LONG_PROMPT_BYTES = 20_000_000
NUM_LONG_SENDERS, NUM_HALF_SENT, NUM_SLOW_READERS = 2, 64, 8
MAX_TOKENS = 60


@dataclass
class Streams:
    """What came of the streams."""

    answers: dict[bytes, object] = field(default_factory=dict)  # by body
    wrong: list[str] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)  # the worst of each stream, between two pieces
    first_s: list[float] = field(default_factory=list)  # to the first piece
    memory: list[int] = field(default_factory=list)  # bytes of all processes of the server, after each


def stream_body(index: int) -> bytes:
    text = " ".join(WORDS[(index + offset) % len(WORDS)] for offset in range(1 + index % 7))
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": MAX_TOKENS, "temperature": 0}
    return json.dumps({**body, "stream": True, "ignore_eos": True}).encode()


async def run_streams(url: str, pid: int, count: int, concurrency: int, seconds: float = 0.0) -> Streams:
    """At least `count` streams, so many at once, going on until so many seconds are over."""
    found, client = Streams(), Client(ServerAddress.parse(url))
    deadline, indices = time.monotonic() + seconds, iter(range(sys.maxsize))

    async def work() -> None:
        while (index := next(indices)) < count or time.monotonic() < deadline:
            body = stream_body(index % 24)
            status, answer = await asyncio.wait_for(_timed(client, body, found), 300)
            if status != 200 or not answer.endswith(b"data: [DONE]\n\n"):
                found.wrong.append(f"{status}: {answer[-200:]!r}")
            else:
                heard = said(answer.replace(b": reading\n\n", b""))
                if found.answers.setdefault(body, heard) != heard:
                    found.wrong.append(f"{heard}, another time {found.answers[body]}")
            found.memory.append(sum(map(memory_bytes, family_of(pid))))

    await asyncio.gather(*(work() for _ in range(concurrency)))
    client.close()
    return found


async def _timed(client: Client, body: bytes, found: Streams) -> tuple[int, bytes]:
    began_s = time.perf_counter()
    async with client.request("POST", CHAT, body) as response:
        pieces, last_s, worst_s = [], None, 0.0
        async for piece in response.pieces():
            now_s = time.perf_counter()
            if last_s is None:
                found.first_s.append(now_s - began_s)
            else:
                worst_s = max(worst_s, now_s - last_s)
            last_s = now_s
            pieces.append(piece)
        found.gaps_s.append(worst_s)
        return response.status, b"".join(pieces)


class Misbehaviour:
    """Threads that send what no client should, until they are stopped; sockets' own calls leave the interpreter
    to the streams that are measured."""

    def __init__(self, url: str, num_long: int, num_half_sent: int, num_slow: int) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._address = (host, int(port))
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self.statuses: Counter[tuple[str, int | str]] = Counter()
        self.errors: Counter[str] = Counter()
        prompt = b"a " * (LONG_PROMPT_BYTES // 2)
        self._long = _post(COMPLETIONS, b'{"prompt": "' + prompt + b'"}')
        self._stream = _post(CHAT, stream_body(3).replace(b'"max_tokens": 60', b'"max_tokens": 400'))
        jobs = [self._send_long] * num_long + [self._half_send] * num_half_sent + [self._read_slowly] * num_slow
        self._threads = [threading.Thread(target=self._repeat, args=(job,), daemon=True) for job in jobs]

    @contextlib.contextmanager
    def under_way(self) -> Iterator[Misbehaviour]:
        for thread in self._threads:
            thread.start()
        try:
            yield self
        finally:
            self._is_over.set()
            for thread in self._threads:
                thread.join(60)

    def _repeat(self, job) -> None:
        while not self._is_over.is_set():
            try:
                with socket.create_connection(self._address, timeout=30) as connection:
                    kind, status = job(connection)
            except OSError as error:
                kind, status = job.__name__, type(error).__name__
            with self._lock:
                self.statuses[kind, status] += 1

    def _send_long(self, connection: socket.socket) -> tuple[str, int]:
        connection.sendall(self._long)
        status, body = _answer(connection)
        with self._lock:
            self.errors[json.loads(body)["error"]["code"]] += 1
        return "20 MB prompt", status

    def _half_send(self, connection: socket.socket) -> tuple[str, int]:
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nx-half: ")
        connection.settimeout(1.0)
        while not self._is_over.is_set():
            with contextlib.suppress(TimeoutError):
                return "half-sent", _answer(connection)[0]
        return "half-sent", 0

    def _read_slowly(self, connection: socket.socket) -> tuple[str, int]:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(self._stream)
        num_bytes = 0
        while not self._is_over.wait(0.05) and connection.recv(1):
            num_bytes += 1
        return "slow reader", 200 if num_bytes else 0


def _post(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def _answer(connection: socket.socket) -> tuple[int, bytes]:
    """(status, body) of an answer that ends with the connection; (0, b"") of none."""
    received = b""
    while data := connection.recv(1 << 16):
        received += data
    head, _, body = received.partition(b"\r\n\r\n")
    return (int(head.split()[1]), body) if head else (0, b"")


def table_row(name: str, streams: Streams) -> str:
    gaps = sorted(streams.gaps_s)
    return (
        f"{name}: {len(gaps)} streams, {len(streams.wrong)} wrong; worst gap {gaps[-1]:.2f} s, of half of them under "
        f"{statistics.median(gaps):.2f} s; first piece after {max(streams.first_s):.2f} s at most; memory "
        f"{streams.memory[0] / 2**20:.0f} MiB at first, {max(streams.memory) / 2**20:.0f} at most, "
        f"{streams.memory[-1] / 2**20:.0f} at last"
    )


def main() -> int:
    tests = Path(__file__).parents[1]
    sys.path += [str(tests), str(tests / "models")]  # as pytest has them
    from serve_process import ServerProcess
    from tiny_checkpoint import write_vision_model

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = ServerProcess(write_vision_model(Path(folder)))
    try:
        size = (options.concurrency, options.concurrency, options.seconds)
        for _ in range(2):  # once to warm up
            alone = asyncio.run(run_streams(server.url, server.process.pid, *size))
        print(table_row("alone", alone))
        misbehaviour = Misbehaviour(server.url, NUM_LONG_SENDERS, NUM_HALF_SENT, NUM_SLOW_READERS)
        with misbehaviour.under_way():
            beside = asyncio.run(run_streams(server.url, server.process.pid, *size))
        print(table_row("beside", beside))
        print("the others:", dict(misbehaviour.statuses), dict(misbehaviour.errors))
        return bool(alone.wrong or beside.wrong)
    finally:
        server.end()


if __name__ == "__main__":
    sys.exit(main())
