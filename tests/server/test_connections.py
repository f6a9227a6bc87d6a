"""Connections are bounded before there is a request: in number, in the length of heads, and in time."""

import contextlib
import http.client
import json
import logging
import resource
import socket

import pytest
from test_guard import BODY, error_of, send, wait_until

from tilewright.server.http import connections
from tilewright.server.http.connections import MAX_HEAD_BYTES, MAX_HEADERS, MAX_LINE_BYTES, default_max_connections
from tilewright.server.http.settings import ServerSettings

GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"


def connect(running):
    host, port = running.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def answer(connection):
    """(status, error) of what comes until the server closes; (0, None) if nothing does."""
    received = b""
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        while data := connection.recv(1 << 16):
            received += data
    if not received:
        return 0, None
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split()[1]), error_of(body) if b"error" in body else body


def exchange(running, data):
    with connect(running) as connection:
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            connection.sendall(data)
        return answer(connection)


@pytest.mark.parametrize(
    ("head", "status", "words"),
    [
        (b"x-long: " + b"x" * MAX_LINE_BYTES + b"\r\n\r\n", 431, f"the limit is {MAX_LINE_BYTES}"),
        (b"x-a: b\r\n" * (MAX_HEADERS + 1) + b"\r\n", 431, f"more than {MAX_HEADERS} headers"),
        ((b"x: " + b"x" * 1000 + b"\r\n") * 80 + b"\r\n", 431, f"the limit is {MAX_HEAD_BYTES}"),
        (b"x-endless: " + b"x" * 3_000_000, 431, f"the limit is {MAX_HEAD_BYTES}"),
        (b"x-endless: x\r\n" * 200_000, 431, f"more than {MAX_HEADERS} headers"),
        (b"no colon\r\n\r\n", 400, "not HTTP"),
    ],
)
def test_heads_are_bounded(scripted, caplog, head, status, words):
    caplog.set_level(logging.INFO, "tilewright.access")
    running, _ = scripted(settings=ServerSettings(api_keys=("secret",)))  # before the key is checked
    found, error = exchange(running, GET + head)
    assert found == status and words in error["message"]
    assert send(f"{running.url}/health")[0] == 200
    assert {"client": "127.0.0.1", "status": status, "outcome": error["code"]} in [
        record.fields for record in caplog.records if hasattr(record, "fields")
    ]


def test_long_addresses(scripted):
    running, _ = scripted()
    status, error = exchange(running, b"GET /" + b"x" * MAX_LINE_BYTES + b" HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert status == 414 and f"the limit is {MAX_LINE_BYTES}" in error["message"]


def test_the_longest_head_is_taken_in_any_pieces_with_a_long_body_behind_it(scripted):
    running, _ = scripted()
    body = json.dumps({**BODY, "user": "x" * 300_000}).encode()
    lines = [b"x-%d: " % index + b"x" * 16_000 for index in range(4)]
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += b"\r\n".join([b"connection: close", b"content-length: %d" % len(body), *lines]) + b"\r\n\r\n"
    assert MAX_HEAD_BYTES - 2000 < len(head) <= MAX_HEAD_BYTES
    for size in (len(head) + len(body), 1000, len(head) - 1):
        with connect(running) as connection:
            message = head + body
            for start in range(0, len(message), size):
                connection.sendall(message[start : start + size])
            assert answer(connection)[0] == 200


def test_every_request_of_a_connection_has_its_own_count(scripted):
    running, _ = scripted()
    connection = http.client.HTTPConnection(running.url.removeprefix("http://"), timeout=30)
    with contextlib.closing(connection):
        for _ in range(10):
            connection.request("GET", "/health", headers={"x": "x" * 10_000})
            response = connection.getresponse()
            assert response.status == 200 and response.read()


def test_heads_that_do_not_come(scripted):
    running, _ = scripted(settings=ServerSettings(head_timeout_s=0.2))
    with connect(running) as silent, connect(running) as half, connect(running) as empty:
        half.sendall(GET)
        empty.sendall(b"\r\n")
        assert answer(silent) == (0, None)
        status, error = answer(half)
        assert status == 408 and error["code"] == "head_timeout" and f"{len(GET)} bytes in 0.2 s" in error["message"]
        assert answer(empty)[0] == 408
    with connect(running) as second:  # also of the next request on a connection
        second.sendall(GET + b"\r\n")
        received = b""
        while not received.endswith(b"}"):
            received += second.recv(1 << 16)
        second.sendall(GET)
        assert answer(second)[0] == 408


def test_an_empty_line_behind_a_request_cuts_no_answer_off(scripted):
    running, _ = scripted(settings=ServerSettings(head_timeout_s=0.1, request_timeout_s=1.0), holds_back=True)
    body = json.dumps(BODY).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with connect(running) as connection:
        connection.sendall(head + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body + b"\r\n")
        assert answer(connection)[0] == 504  # by the time of the whole request, not of the head


def test_idle_connections_are_closed(scripted):
    running, _ = scripted(settings=ServerSettings(idle_timeout_s=0.1))
    with connect(running) as connection:
        connection.sendall(GET + b"\r\n")
        assert answer(connection)[0] == 200


def test_an_unread_body_keeps_no_connection_open(scripted):
    running, _ = scripted(settings=ServerSettings(idle_timeout_s=1000.0, body_timeout_s=0.1))
    with connect(running) as connection:
        connection.sendall(GET + b"content-length: 1000000\r\n\r\n")
        assert answer(connection)[0] == 200


def read_answer(connection):
    """(status, whether the server says that it closes) of one answer, which is read whole and no further."""
    response = http.client.HTTPResponse(connection)
    response.begin()
    response.read()
    return response.status, response.will_close


EARLY = [
    (b"POST /nothing/here", b"", 404),
    (b"PUT /v1/models", b"", 405),
    (b"POST /v1/completions", b"authorization: Bearer wrong\r\n", 401),
    (b"POST /v1/completions", b"origin: https://else.example\r\n", 403),
]


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize(("request_line", "header", "status"), EARLY)
def test_an_answer_before_the_body_leaves_the_connection_usable(scripted, request_line, header, status, is_chunked):
    running, _ = scripted(settings=ServerSettings(api_keys=("key",)))
    size = b"transfer-encoding: chunked\r\n" if is_chunked else b"content-length: 300\r\n"
    body = b"12c\r\n" + b"x" * 300 + b"\r\n0\r\n\r\n" if is_chunked else b"x" * 300
    head = request_line + b" HTTP/1.1\r\nhost: localhost\r\n" + size + (header or b"authorization: Bearer key\r\n")
    with connect(running) as connection:
        for _ in range(3):
            connection.sendall(head + b"\r\n")
            assert read_answer(connection) == (status, False)
            connection.sendall(body + GET + b"\r\n")
            assert read_answer(connection) == (200, False)


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize(
    ("path", "size", "status"), [(b"/nothing", 20_000_000, 404), (b"/v1/completions", 60_000_000, 413)]
)
def test_a_long_body_that_is_not_wanted_cuts_no_answer_off(scripted, path, size, status, is_chunked):
    running, _ = scripted(settings=ServerSettings(max_body_bytes=30_000_000))
    length = b"transfer-encoding: chunked" if is_chunked else b"content-length: %d" % size
    body = b"%x\r\n" % size + b"x" * size + b"\r\n0\r\n\r\n" if is_chunked else b"x" * size
    head = b"POST " + path + b" HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n" + length
    with connect(running) as connection:
        connection.sendall(head + b"\r\n\r\n" + body)  # as clients do that read when all is sent
        found, closes = read_answer(connection)
        assert found == status
        if status == 404:
            assert not closes
            connection.sendall(GET + b"\r\n")
            assert read_answer(connection) == (200, False)


def test_a_client_that_asks_before_it_sends_is_told_that_the_connection_ends(scripted):
    """After the refusal it may send the body or leave it out: what follows could be either."""
    running, _ = scripted(settings=ServerSettings(body_timeout_s=0.1))
    for path, closes in ((b"/nothing", True), (b"/v1/completions", False)):
        with connect(running) as connection:
            connection.sendall(
                b"POST " + path + b" HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
                b"content-length: 16\r\nexpect: 100-continue\r\n\r\n"
            )
            if not closes:
                assert connection.recv(1 << 16) == b"HTTP/1.1 100 Continue\r\n\r\n"
                connection.sendall(b'{"prompt": "hi"}')
            assert read_answer(connection) == (404 if closes else 200, closes)


def test_a_request_that_follows_at_once_keeps_its_body(scripted):
    """The first answer ends while the second body is on its way."""
    running, _ = scripted()
    body = json.dumps(BODY).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += b"content-length: %d\r\n\r\n" % len(body)
    with connect(running) as connection:
        connection.sendall(head + body + head + body[:5])
        assert read_answer(connection)[0] == 200
        connection.sendall(body[5:])
        assert read_answer(connection)[0] == 200


def test_what_follows_a_request_and_is_none_does_not_cut_its_answer_off(scripted):
    running, _ = scripted()
    body = json.dumps(BODY).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with connect(running) as connection:
        connection.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body + b"left over\r\n\r\n")
        assert answer(connection)[0] == 200


POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n"


@pytest.mark.parametrize(
    ("request_bytes", "words"),
    [
        (GET + b"host: evil.example\r\n\r\n", "has 2 Host headers"),
        (b"GET /health HTTP/1.1\r\n\r\n", "has 0 Host headers"),
        (b"GET http://evil.example/ HTTP/1.1\r\nhost: localhost\r\n\r\n", "is 'http://evil.example/'"),
        (b"GET ftp://localhost/ HTTP/1.1\r\nhost: localhost\r\n\r\n", "is 'ftp://localhost/'"),
        (b"CONNECT evil.example:443 HTTP/1.1\r\nhost: localhost\r\n\r\n", "is 'evil.example:443'"),
        (b"GET /health HTTP/2.0\r\nhost: localhost\r\n\r\n", "HTTP/2.0"),
        (POST + b"transfer-encoding: gzip\r\n\r\n", "Transfer-Encoding is 'gzip'"),
        (POST + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", "Transfer-Encoding is 'gzip, chunked'"),
        (CHUNKED.replace(b"1.1", b"1.0") + b"\r\n0\r\n\r\n", "in HTTP/1.0"),
        (CHUNKED + b"content-length: 5\r\n\r\n0\r\n\r\n", "Content-Length can't be present"),
        (POST + b"content-length: 5\r\ncontent-length: 5\r\n\r\nhello", "Duplicate Content-Length"),
        (CHUNKED + b"\r\nfffffffffffffffff\r\nhello\r\n0\r\n\r\n", "Chunk size overflow"),
        (CHUNKED + b"\r\n-5\r\nhello\r\n0\r\n\r\n", "chunk size"),
    ],
)
def test_what_could_be_read_as_two_requests_is_refused(scripted, request_bytes, words):
    running, backend = scripted()
    status, error = exchange(running, request_bytes)
    assert status == 400 and error["code"] == "invalid_http" and words in error["message"]
    assert not backend.requests


def test_a_malformed_chunk_ends_a_request_that_is_being_read(scripted):
    running, _ = scripted()
    with connect(running) as connection:
        connection.sendall(CHUNKED + b"\r\n5\r\nhello\r\n")
        connection.sendall(b"oh\r\n")
        status, error = answer(connection)
    assert status == 400 and "chunk size" in error["message"]


def test_requests_of_simple_clients(scripted):
    """Health checks by HTTP/1.0 send no Host; an address may be absolute if it is this server's."""
    running, _ = scripted()
    assert exchange(running, b"GET /health HTTP/1.0\r\n\r\n")[0] == 200
    absolute = b"GET http://localhost/health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    assert exchange(running, absolute)[0] == 200


def test_clients_that_do_not_read_are_cut_off(scripted):
    pieces = ["x" * 100_000] * 200
    running, backend = scripted(pieces, settings=ServerSettings(write_timeout_s=0.2))
    body = json.dumps({**BODY, "stream": True}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with connect(running) as connection:
        connection.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        wait_until(lambda: backend.num_aborted == 1)


def test_connections_are_bounded_in_all(scripted, caplog, monkeypatch):
    monkeypatch.setattr(connections, "LOG_EVERY_S", 0.5)
    running, _ = scripted(settings=ServerSettings(max_connections=4, max_connections_per_address=4))
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connect(running)) for _ in range(4)]
        for _ in range(3):
            status, error = exchange(running, GET + b"\r\n")
            assert status == 503 and error["code"] == "too_many_connections" and "the limit is 4" in error["message"]
        silent.pop().close()
        wait_until(lambda: any("more connections" in record.getMessage() for record in caplog.records))
        assert send(f"{running.url}/health")[0] == 200
    lines = [record.getMessage() for record in caplog.records if record.name == connections.__name__]
    assert lines[0].startswith("a connection from 127.0.0.1 was refused: 4 connections are open, the limit is 4")
    assert len(lines) == 2 and "more connections were refused in 0.5 s" in lines[1]  # not one for each
    assert b"connections_refused_total 0.0" not in running.handler.metrics.text(None, 0)


def test_connections_are_bounded_per_address(scripted, caplog):
    running, _ = scripted(settings=ServerSettings(max_connections=4))
    port = int(running.url.rsplit(":", 1)[1])
    with connect(running), connect(running):
        status, error = exchange(running, GET + b"\r\n")
        assert status == 429 and error["code"] == "too_many_connections" and "the limit is 2" in error["message"]
        other = socket.create_connection(("127.0.0.1", port), timeout=30, source_address=("127.0.0.2", 0))
        with other:
            other.sendall(GET + b"connection: close\r\n\r\n")
            assert answer(other)[0] == 200
    assert any("127.0.0.1" in record.getMessage() for record in caplog.records)
    wait_until(lambda: send(f"{running.url}/health")[0] == 200)  # who left is counted no more


def test_the_default_follows_the_limit_on_open_files(monkeypatch):
    for num_files, expected in ((1024, 832), (256, 128), (2, 1), (1 << 20, 4096), (resource.RLIM_INFINITY, 4096)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, num_files=num_files: (num_files, num_files))
        assert default_max_connections() == expected


def test_a_websocket_is_answered_as_a_plain_request(scripted, caplog):
    running, _ = scripted()
    upgrade = b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n\r\n"
    assert exchange(running, GET + upgrade)[0] == 200
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
