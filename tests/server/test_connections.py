"""Connections are bounded before there is a request: in number, in the length of heads, and in time."""

import contextlib
import http.client
import json
import logging
import resource
import socket

import pytest
from test_guard import BODY, error_of, send, wait_until

from tilewright.server import connection_limit
from tilewright.server.connection_limit import default_max_connections
from tilewright.server.connections import MAX_HEAD_BYTES, MAX_HEADERS, MAX_LINE_BYTES
from tilewright.server.settings import ServerSettings

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
    running, _ = scripted(settings=ServerSettings(idle_timeout_s=1000.0))
    with connect(running) as connection:
        connection.sendall(GET + b"content-length: 1000000\r\n\r\n")
        assert answer(connection)[0] == 200


def test_clients_that_do_not_read_are_cut_off(scripted):
    pieces = ["x" * 100_000] * 200
    running, backend = scripted(pieces, settings=ServerSettings(write_timeout_s=0.2))
    body = json.dumps({**BODY, "stream": True}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with connect(running) as connection:
        connection.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        wait_until(lambda: backend.num_aborted == 1)


def test_connections_are_bounded_in_all(scripted, caplog, monkeypatch):
    monkeypatch.setattr(connection_limit, "LOG_EVERY_S", 0.5)
    running, _ = scripted(settings=ServerSettings(max_connections=4, max_connections_per_address=4))
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connect(running)) for _ in range(4)]
        for _ in range(3):
            status, error = exchange(running, GET + b"\r\n")
            assert status == 503 and error["code"] == "too_many_connections" and "the limit is 4" in error["message"]
        silent.pop().close()
        wait_until(lambda: any("more connections" in record.getMessage() for record in caplog.records))
        assert send(f"{running.url}/health")[0] == 200
    lines = [record.getMessage() for record in caplog.records if record.name == connection_limit.__name__]
    assert lines[0].startswith("a connection of 127.0.0.1 was refused: 4 connections are open, the limit is 4")
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
