"""A server on loopback that answers exactly what a test says, valid or not."""

import asyncio
import json
import ssl
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

Answer = Iterable[bytes | None]  # pieces, each sent on its own; None closes the connection


@dataclass(frozen=True)
class ReceivedRequest:
    """A request as it came."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    connection: int  # which connection it came by

    def json(self):
        return json.loads(self.body)


class OddServer:
    """`with OddServer(answer) as server`: `answer(request)` gives the bytes of each answer, head and all."""

    def __init__(
        self, answer: Callable[[ReceivedRequest], Answer], tls: ssl.SSLContext | None = None, port: int = 0
    ) -> None:
        self.answer = answer
        self.port = port  # 0: one that is free
        self.tls = tls
        self.requests: list[ReceivedRequest] = []
        self.num_connections = 0
        self.num_under_way = 0
        self.most_under_way = 0

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://localhost:{self.port}"

    def __enter__(self) -> "OddServer":
        started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main(started)), daemon=True)
        self._thread.start()
        assert started.wait(10)
        return self

    def __exit__(self, *error) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    async def _main(self, started: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=self.tls)
        self.port = server.sockets[0].getsockname()[1]
        started.set()
        await self._stop.wait()
        server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        connection = self.num_connections
        try:
            while await self._answer_one(reader, writer, connection):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, ssl.SSLError):
            pass
        finally:
            writer.close()

    async def _answer_one(self, reader, writer, connection: int) -> bool:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        method, path, _ = first.split(" ")
        request = ReceivedRequest(method, path, headers, body, connection)
        self.requests.append(request)
        self.num_under_way += 1
        self.most_under_way = max(self.most_under_way, self.num_under_way)
        try:
            for piece in self.answer(request):
                if piece is None:
                    return False
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
        finally:
            self.num_under_way -= 1
        return True


def chunked(*pieces: bytes, kind: str = "text/event-stream", status: str = "200 OK") -> list[bytes]:
    """An answer whose chunks are the pieces."""
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    return [head, *(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces), b"0\r\n\r\n"]


def plain(body: bytes, status: str = "200 OK", kind: str = "application/json", more: str = "") -> list[bytes]:
    """An answer of known length."""
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{more}\r\n"
    return [head.encode() + body]


def event(**chunk) -> bytes:
    return f"data: {json.dumps(chunk)}\n\n".encode()


def token(text: str, index: int = 0, **more) -> bytes:
    return event(choices=[{"index": index, "delta": {"content": text}, "finish_reason": None} | more])


def finish(index: int = 0, reason: str = "length") -> bytes:
    return event(choices=[{"index": index, "delta": {}, "finish_reason": reason}])


def usage(prompt_tokens: int, completion_tokens: int, **more) -> bytes:
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens} | more
    return event(choices=[], usage=counts)


DONE = b"data: [DONE]\n\n"


def models(*names: str) -> list[bytes]:
    return plain(json.dumps({"object": "list", "data": [{"id": name} for name in names]}).encode())


def well_behaved(request: ReceivedRequest) -> Answer:
    """What a good server answers: a model, and as many tokens as requested."""
    if request.path.endswith("/v1/models"):
        return models("first", "second")
    body = request.json()
    count = body["max_tokens"]
    if "messages" in body:
        role = event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
        tokens = [token(f" {number}") for number in range(count)]
    else:
        role = b": a comment\n\n"
        tokens = [event(choices=[{"index": 0, "text": f" {n}", "finish_reason": None}]) for n in range(count)]
    return chunked(role, *tokens, finish(), usage(100, count), DONE)
