"""The HTTP client and the events of streams, with bytes cut anywhere and servers that do as they like."""

import asyncio
import shutil
import ssl
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st
from odd_server import OddServer, chunked, plain

from tilewright.bench import http_client
from tilewright.bench.http_client import (
    ChunkDecoder,
    Client,
    ConnectError,
    ConnectionLost,
    HttpError,
    MalformedAnswer,
    ServerAddress,
)
from tilewright.bench.serve.sample import EventDecoder
from tilewright.types import RequestError


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """The data in pieces, cut at the places modulo its length."""
    ends = sorted({place % (len(data) + 1) for place in places} | {len(data)})
    return [data[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


cuts = st.lists(st.integers(0, 1 << 16), max_size=30)


@given(
    chunks=st.lists(st.binary(min_size=1, max_size=40), max_size=8),
    places=cuts,
    extension=st.sampled_from([b"", b";name=value", b" ; a"]),
    trailer=st.sampled_from([b"", b"X-Sum: 1\r\n"]),
    newline=st.sampled_from([b"\r\n", b"\n"]),
    after=st.binary(max_size=5),
)
def test_chunks_cut_anywhere(chunks, places, extension, trailer, newline, after):
    data = b"".join(b"%X%s%s%s%s" % (len(one), extension, newline, one, newline) for one in chunks)
    data += b"0" + newline + trailer + newline
    decoder = ChunkDecoder()
    found = b"".join(decoder.feed(piece) for piece in cut(data, places))
    assert found == b"".join(chunks) and decoder.is_complete and decoder.rest == b""
    assert decoder.feed(after) == b"" and decoder.rest == after


@pytest.mark.parametrize(
    "data,message",
    [
        (b"zz\r\n", "the size of a chunk is b'zz'"),
        (b"-1\r\n", "the size of a chunk"),
        (b"0x5\r\n", "the size of a chunk"),
        (b"\r\n", "the size of a chunk"),
        (b"2\r\nabc\r\n", "longer than its size"),
        (b"1" * 5000, "over 4096 bytes"),
        (b"f" * 16 + b"\r\n", "the size of a chunk"),
    ],
)
def test_chunks_that_are_none(data, message):
    with pytest.raises(MalformedAnswer, match=message):
        ChunkDecoder().feed(data)


lines = st.text(st.characters(blacklist_characters="\r\n", blacklist_categories=["Cs"]), max_size=12)


@given(
    events=st.lists(st.lists(lines, min_size=1, max_size=3), max_size=6),
    noise=st.lists(
        st.sampled_from([": a comment", "event: message", "id: 7", "retry: 10", "nonsense", ":"]), max_size=6
    ),
    newline=st.sampled_from(["\n", "\r\n", "\r"]),
    space=st.sampled_from(["", " "]),
    is_ended=st.booleans(),
    places=cuts,
)
def test_events_cut_anywhere(events, noise, newline, space, is_ended, places):
    text = ""
    for number, event in enumerate(events):
        text += "".join(line + newline for line in noise[number:])
        # Without the space a line that begins with one would lose it.
        text += "".join(f"data:{space or ' ' * line.startswith(' ')}{line}{newline}" for line in event) + newline
    if not is_ended and text:
        text = text[: -len(newline)]  # the empty line after the last event did not come
    decoder = EventDecoder()
    found = [event for piece in cut(text.encode(), places) for event in decoder.feed(piece)]
    assert (found + decoder.end()) == ["\n".join(event).encode() for event in events]


@pytest.mark.parametrize(
    "url,expected",
    [
        ("http://127.0.0.1:8000", ("127.0.0.1", 8000, "", False)),
        ("http://127.0.0.1:8000/v1/", ("127.0.0.1", 8000, "", False)),
        ("https://example.org", ("example.org", 443, "", True)),
        ("http://[::1]:80/model/v1", ("::1", 80, "/model", False)),
    ],
)
def test_urls(url, expected):
    server = ServerAddress.parse(url)
    assert (server.host, server.port, server.path, server.is_tls) == expected
    assert ServerAddress.parse(server.url) == server
    assert (":" in server.authority.rpartition("]")[2]) == (server.port == 8000)


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "ftp://a", "http://", "http://a:99999", "http://a?b=c", "http://u:p@a", "http://[::1"]
)
def test_urls_that_are_none(url):
    with pytest.raises(RequestError, match="the URL"):
        ServerAddress.parse(url)


def get(server: OddServer, *paths: str, **options):
    """(status, body) or the HttpError of each path, requested one after the other by one client."""

    async def main():
        client = Client(ServerAddress.parse(server.url), **options)
        found = []
        for path in paths:
            try:
                async with client.request("GET", path) as response:
                    found.append((response.status, await response.read(1 << 20)))
            except HttpError as error:
                found.append(error)
        client.close()
        return found

    return asyncio.run(asyncio.wait_for(main(), 20))


def test_a_connection_is_used_again():
    with OddServer(lambda request: plain(b"one") if request.path == "/1" else chunked(b"t", b"wo")) as server:
        assert get(server, "/1", "/2", "/1", headers={"X-Key": "k"}) == [(200, b"one"), (200, b"two"), (200, b"one")]
    assert server.num_connections == 1 and {request.headers["x-key"] for request in server.requests} == {"k"}


@pytest.mark.parametrize(
    "answer",
    [
        plain(b"one", more="Connection: close\r\n"),
        [b"HTTP/1.0 200 OK\r\nContent-Length: 3\r\n\r\none"],
        [b"HTTP/1.1 200 OK\r\n\r\none", None],  # until it is closed
        [b"".join(chunked(b"one")) + b"more than was announced"],
    ],
)
def test_or_not_where_the_server_does_not_keep_it(answer):
    with OddServer(lambda request: answer) as server:
        assert get(server, "/", "/") == [(200, b"one")] * 2
    assert server.num_connections == 2


def test_a_connection_that_was_closed_meanwhile_is_not_used():
    with OddServer(lambda request: [*plain(b"one"), None]) as server:

        async def main():
            client = Client(ServerAddress.parse(server.url))
            for _ in range(2):
                async with client.request("GET", "/") as response:
                    assert await response.read(9) == b"one"
                while not client._idle[0][1].reader.at_eof():
                    await asyncio.sleep(0.001)

        asyncio.run(asyncio.wait_for(main(), 20))
    assert server.num_connections == 2


def test_old_connections_are_left(monkeypatch):
    monkeypatch.setattr(http_client, "MAX_IDLE_S", 0.0)
    with OddServer(lambda request: plain(b"one")) as server:
        get(server, "/", "/")
    assert server.num_connections == 2


def test_what_comes_before_the_answer():
    hints = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
    answers = {"/": [hints, *plain(b"one")], "/none": [b"HTTP/1.1 204 No Content\r\n\r\n"]}
    with OddServer(lambda request: answers[request.path]) as server:
        assert get(server, "/", "/none", "/") == [(200, b"one"), (204, b""), (200, b"one")]
    assert server.num_connections == 1


@pytest.mark.parametrize(
    "answer,kind,message",
    [
        ([None], ConnectionLost, "before the answer began"),
        ([b"HTTP/1.1 200", None], ConnectionLost, "within the head"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\none", None], ConnectionLost, "expected 6 more bytes"),
        ([*chunked(b"one")[:-1], None], ConnectionLost, "expected a chunk"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: nine\r\n\r\none", None], MalformedAnswer, "Content-Length is 'nine'"),
        ([b"SSH-2.0-OpenSSH\r\n\r\n", None], MalformedAnswer, "begins with 'SSH-2.0-OpenSSH'"),
        ([b"HTTP/1.1 200 OK\r\nA: " + b"a" * (1 << 17) + b"\r\n\r\n", None], MalformedAnswer, "over 65536 bytes"),
    ],
)
def test_answers_that_are_none(answer, kind, message):
    with OddServer(lambda request: answer) as server:
        (error,) = get(server, "/")
    assert isinstance(error, kind) and message in str(error)


def test_a_refusal_before_the_whole_body_was_read():
    """The server answers and hangs up while megabytes are still to come: its words are heard all the same."""

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(plain(b"too large", status="413 Too Large", more="Connection: close\r\n")[0])
        await writer.drain()
        await reader.read(1 << 20)
        writer.write_eof()
        await reader.read()
        writer.close()

    async def main():
        listening = await asyncio.start_server(serve, "127.0.0.1", 0)
        client = Client(ServerAddress.parse(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"))
        async with client.request("POST", "/", b"a" * (1 << 23)) as response:
            assert (response.status, await response.read(99)) == (413, b"too large")
        listening.close()

    asyncio.run(asyncio.wait_for(main(), 20))


def test_no_server():
    with OddServer(lambda request: plain(b"one")) as server:
        pass
    (error,) = get(server, "/")
    assert isinstance(error, ConnectError) and f"localhost:{server.port} cannot be reached" in str(error)


@pytest.mark.skipif(not shutil.which("openssl"), reason="no openssl to make a certificate")
def test_tls(tmp_path, monkeypatch):
    key, certificate = str(tmp_path / "key"), str(tmp_path / "certificate")
    shape = "-x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", certificate]
    subprocess.run(["openssl", "req", *shape.split(), *names], check=True, capture_output=True)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    with OddServer(lambda request: chunked(b"sec", b"ret"), tls) as server:
        (error,) = get(server, "/")
        assert isinstance(error, ConnectError) and "CERTIFICATE_VERIFY_FAILED" in str(error)
        monkeypatch.setenv("SSL_CERT_FILE", certificate)
        assert get(server, "/", "/") == [(200, b"secret")] * 2
