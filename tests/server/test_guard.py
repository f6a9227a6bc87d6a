"""What the guard refuses, and the log of requests."""

import asyncio
import base64
import contextlib
import gc
import http.client
import json
import logging
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request

import openai
import pytest

from tilewright.server.http import bodies
from tilewright.server.http.settings import ServerSettings
from tilewright.types import EngineUnavailable

BODY = {"messages": [{"role": "user", "content": "hi"}]}


def send(url, body=None, method=None, **headers):
    """(status, headers, text) of a plain request."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    request = urllib.request.Request(url, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, dict(response.headers), response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), error.read().decode()


def error_of(text):
    error = json.loads(text)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def wait_until(is_true):
    deadline = time.monotonic() + 20
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_key_is_required(scripted):
    running, _ = scripted(settings=ServerSettings(api_keys=("first", "second")))
    for key in ("first", "second"):
        client = running.client(api_key=key)
        assert client.chat.completions.create(model="", **BODY).choices
    for key in ("", "firs", "firstly", "first second"):
        status, headers, text = send(f"{running.url}/v1/models", authorization=f"Bearer {key}")
        assert status == 401 and error_of(text)["code"] == "invalid_api_key"
        assert headers["www-authenticate"] == "Bearer"
    assert send(f"{running.url}/v1/models", authorization="Basic first")[0] == 401
    assert send(f"{running.url}/metrics")[0] == 401
    assert send(f"{running.url}/health")[0] == 200 and send(f"{running.url}/version")[0] == 200


def test_names_it_does_not_answer_to(scripted):
    running, _ = scripted()
    for host in ("rebound.example:8000", "localhost.rebound.example", "localhost@rebound.example", "10.0.0.7", ""):
        status, _, text = send(f"{running.url}/v1/models", host=host)
        assert status == 403 and error_of(text)["code"] == "host_not_allowed" and host.split(":")[0] in text
    anywhere, _ = scripted(settings=ServerSettings(allowed_hosts=()))
    assert send(f"{anywhere.url}/v1/models", host="tiles.example")[0] == 200


def test_names_it_answers_to(scripted):
    """Those of loopback always: with --allowed-host too, health checks and Prometheus come by 127.0.0.1."""
    own = ["localhost", "localhost.", "LOCALHOST:1", "127.0.0.1", "127.0.0.1:8000", "127.0.1.1", "[::1]", "[::1]:8000"]
    for settings in (ServerSettings(), ServerSettings(allowed_hosts=("tiles.example",))):
        running, _ = scripted(settings=settings)
        named = [
            f"{name}{end}" for name in settings.allowed_hosts if name == "tiles.example" for end in ("", ".", ":443")
        ]
        assert {host: send(f"{running.url}/health", host=host)[0] for host in own + named} == dict.fromkeys(
            own + named, 200
        )
        assert send(f"{running.url}/health", host="else.example")[0] == 403


FORM = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\n\r\n--x--\r\n'
FORM_TYPE = "multipart/form-data; boundary=x"


@pytest.mark.parametrize(
    ("headers", "is_refused"),
    [
        ({}, False),
        ({"origin": "https://else.example"}, True),
        ({"origin": "null"}, True),
        ({"origin": "null", "sec_fetch_site": "same-origin"}, True),
        ({"origin": "https://tiles.example"}, False),  # TLS ends at a proxy in front
        ({"origin": "http://tiles.example"}, False),
        (
            {"origin": "http://tiles.example", "sec_fetch_site": "cross-site"},
            True,
        ),  # a page without TLS beside one with
        ({"origin": "https://tiles.example:8443"}, True),
        ({"origin": "https://tiles.example:8443", "sec_fetch_site": "same-origin"}, False),  # the proxy drops the port
        ({"origin": "https://tiles.example.else.example"}, True),
        ({"origin": "https://else.example", "sec_fetch_site": "none"}, True),
        ({"origin": "chrome-extension://tiles.example"}, True),
        ({"sec_fetch_site": "same-origin"}, False),
        ({"sec_fetch_site": "none"}, False),
        ({"sec_fetch_site": "same-site"}, True),
        ({"sec_fetch_site": "cross-site"}, True),
        ({"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate", "sec_fetch_dest": "document"}, True),
    ],
)
def test_pages_of_other_origins_are_refused(scripted, headers, is_refused):
    """A form is sent without asking first: what the page cannot read would be computed all the same."""
    running, _ = scripted(settings=ServerSettings(allowed_hosts=("tiles.example",)))
    for path, body, content_type in (
        ("/v1/chat/completions", BODY, "application/json"),
        ("/v1/audio/transcriptions", FORM, FORM_TYPE),
        ("/nothing/here", b"", "text/plain"),
    ):
        sent = {"host": "tiles.example", "content_type": content_type, **headers}
        status, _, text = send(running.url + path, body, **sent)
        assert (status == 403 and error_of(text)["code"] == "origin_not_allowed") == is_refused, (path, status)


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/", {"sec_fetch_mode": "navigate", "sec_fetch_dest": "document"}, 200),  # a link to the page
        ("/", {"sec_fetch_mode": "navigate", "sec_fetch_dest": "iframe"}, 403),
        ("/page/sample.png", {"sec_fetch_mode": "no-cors", "sec_fetch_dest": "image"}, 403),
        ("/v1/models", {"sec_fetch_mode": "no-cors", "sec_fetch_dest": "script"}, 403),
        (
            "/made/unknown.png",
            {"sec_fetch_mode": "no-cors", "sec_fetch_dest": "image"},
            404,
        ),  # its name is the permission
    ],
)
def test_what_pages_of_other_origins_may_get_without_asking(scripted, path, headers, status):
    running, _ = scripted()
    assert send(running.url + path, sec_fetch_site="cross-site", **headers)[0] == status


def test_cors_is_off_by_default(scripted):
    running, _ = scripted()
    origin = {"origin": "https://tiles.example", "access_control_request_method": "POST"}
    assert "access-control-allow-origin" not in send(f"{running.url}/v1/models", **origin)[1]
    assert send(f"{running.url}/v1/chat/completions", method="OPTIONS", **origin)[0] == 403
    allowing, _ = scripted(settings=ServerSettings(cors_origins=("https://tiles.example",), api_keys=("key",)))
    status, headers, _ = send(f"{allowing.url}/v1/chat/completions", method="OPTIONS", **origin)
    assert status == 200 and headers["access-control-allow-origin"] == "https://tiles.example"
    status, headers, _ = send(f"{allowing.url}/v1/models", origin="https://tiles.example")
    assert status == 401 and headers["access-control-allow-origin"] == "https://tiles.example"  # the page sees why
    names = "authorization, content-type, x-stainless-os, x-stainless-lang"
    preflight = {**origin, "access_control_request_headers": names}
    assert send(f"{allowing.url}/v1/chat/completions", method="OPTIONS", **preflight)[0] == 200
    other = {**origin, "origin": "https://else.example"}
    for method in ("GET", "OPTIONS"):
        status, headers, _ = send(f"{allowing.url}/v1/models", method=method, authorization="Bearer key", **other)
        assert status == 403 and "access-control-allow-origin" not in headers
    for settings in (ServerSettings(cors_origins=("*",)), ServerSettings(cors_origins=("https://else.example",))):
        open_to_all, _ = scripted(settings=settings)
        headers = {"origin": "https://else.example", "sec_fetch_site": "cross-site"}
        assert send(f"{open_to_all.url}/v1/chat/completions", BODY, **headers)[0] == 200


def test_bodies_are_bounded(scripted):
    running, _ = scripted(settings=ServerSettings(max_body_bytes=1000))
    status, _, text = send(f"{running.url}/v1/chat/completions", {**BODY, "user": "x" * 2000})
    assert status == 413 and "the limit is 1000" in error_of(text)["message"]
    # Without a declared length, it is counted as it comes.
    connection = http.client.HTTPConnection(running.url.removeprefix("http://"), timeout=30)
    connection.request(
        "POST",
        "/v1/chat/completions",
        iter([b"x" * 600] * 3),
        {"content-type": "application/json"},
        encode_chunked=True,
    )
    response = connection.getresponse()
    assert response.status == 413 and "the limit is 1000" in error_of(response.read())["message"]
    connection.close()


@pytest.mark.parametrize("values", [b"[]," * 2_000_001, b"1," * 2_000_001, b'{"":' * 2_000_001])
def test_values_of_a_body_are_bounded(scripted, values, monkeypatch):
    """Before they are made: of 128 MiB they would take 4 GB."""
    monkeypatch.setattr(bodies, "parse_json", lambda *args: pytest.fail("it was parsed"))
    running, _ = scripted()
    status, _, text = send(f"{running.url}/v1/completions", b'{"prompt": [' + values + b"1]}")
    monkeypatch.undo()
    assert status == 413 and error_of(text)["code"] == "body_has_too_many_values"
    assert "the limit is 2000000" in error_of(text)["message"]


def test_all_bodies_together_are_bounded(scripted):
    running, backend = scripted(settings=ServerSettings(max_held_bytes=5000), holds_back=True)
    client = running.client()
    long = {"messages": [{"role": "user", "content": "x" * 3000}]}
    stream = client.chat.completions.create(model="", stream=True, **long)
    next(iter(stream))
    with pytest.raises(openai.RateLimitError, match="the limit is 5000"):
        client.chat.completions.create(model="", **long)
    stream.close()
    wait_until(lambda: backend.num_aborted == 1)
    client.chat.completions.create(model="", stream=True, **long).close()


def test_a_body_that_does_not_come(scripted):
    running, _ = scripted(settings=ServerSettings(body_timeout_s=0.1))
    host, port = running.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        connection.sendall(f'{head}content-length: 50\r\n\r\n{{"prompt"'.encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/nothing/here", None, 404),
        ("/v1/chat/completions", None, 405),
        ("/v1/chat/completions", b"{", 400),
        ("/v1/chat/completions", b"\xff\xfe", 400),
        ("/v1/chat/completions", [], 400),
        ("/v1/chat/completions", {}, 400),
        ("/v1/chat/completions", b"[" * 100_000, 400),
        ("/v1/chat/completions", {**BODY, "temperature": "warm"}, 400),
        ("/v1/models/../../etc/passwd", None, 404),
    ],
)
def test_errors_have_one_shape(scripted, path, body, status):
    running, _ = scripted()
    found, _, text = send(running.url + path, body)
    assert found == status and error_of(text)["message"]


AMBIGUOUS = [
    (b'{"model": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "the body has lists and objects in more than"),
    (b'{"seed": ' + b"1" * 5000 + b"}", "the body has an integer of 5000 digits, the limit is 4300"),
    (b'{"seed": 1, "model": "", "seed": 2}', "the body has the key 'seed' twice in an object"),
]


@pytest.mark.parametrize(
    ("path", "least"),
    [
        ("/v1/chat/completions", BODY),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/audio/speech", {"input": "hi"}),
        ("/v1/images/generations", {"prompt": "hi"}),
    ],
)
def test_bodies_that_no_parser_should_guess_at(scripted, path, least):
    """One rule for all endpoints: limits are named, keys are there once, and values are of the field's type."""
    running, backend = scripted()
    for body, words in AMBIGUOUS:
        status, _, text = send(running.url + path, body)
        assert status == 400 and error_of(text)["message"].startswith(words)
    for wrong in ("7", True, 7.5):
        status, _, text = send(running.url + path, {**least, "seed": wrong})
        error = error_of(text)
        assert status == 400 and error["param"] == "seed" and error["code"] == "invalid_type"
        assert error["message"].startswith(f"seed is {wrong!r}: Input should be a valid integer; ")
    status, _, text = send(running.url + path, {**least, "seed": 7.0})  # is the number 7
    assert status == 200 or "seed" not in error_of(text)["message"]
    assert all(request.sampling["seed"] == 7 for request in backend.requests)


def test_echoed_fields_are_valid_json(scripted):
    running, _ = scripted()
    for odd in (b'"\\ud800"', b"NaN"):
        status, _, text = send(f"{running.url}/v1/responses", b'{"input": "hi", "user": %s}' % odd)
        assert status == 200
        json.loads(text, parse_constant=pytest.fail)


def test_only_json_is_read_as_json(scripted):
    """A page elsewhere can send text/plain without asking; it must not be taken for a request."""
    running, backend = scripted()
    address = urllib.parse.urlsplit(running.url)
    for headers in ({"content-type": "text/plain"}, {"content-type": "application/x-www-form-urlencoded"}, {}):
        connection = http.client.HTTPConnection(address.hostname, address.port, timeout=10)
        connection.request("POST", "/v1/chat/completions", json.dumps(BODY).encode(), headers)
        assert connection.getresponse().status == 400
        connection.close()
    assert not backend.requests


def test_a_body_that_trickles(scripted):
    running, _ = scripted(settings=ServerSettings(body_timeout_s=0.3))
    host, port = running.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        connection.sendall(f"{head}content-length: 5000\r\n\r\n{{".encode())
        connection.settimeout(0.05)
        answer = b""
        while not answer:
            with contextlib.suppress(TimeoutError):
                connection.sendall(b" ")
                answer = connection.recv(4096)
        assert answer.startswith(b"HTTP/1.1 408")


def test_a_client_that_leaves_during_a_fetch_frees_its_place(scripted, monkeypatch):
    running, _ = scripted()
    is_cancelled = threading.Event()

    async def resolve(messages, hold):
        try:
            await asyncio.sleep(60)
        finally:
            is_cancelled.set()

    monkeypatch.setattr(running.handler.gate, "resolve", resolve)
    with pytest.raises(openai.APITimeoutError):
        running.client(timeout=0.3).chat.completions.create(model="", **BODY)
    assert is_cancelled.wait(20)
    wait_until(lambda: running.handler.served.text_models[0].admission.num_answers == 0)


def test_what_is_fetched_counts_as_held(scripted, monkeypatch):
    running, _ = scripted(settings=ServerSettings(max_held_bytes=5000))

    async def resolve(messages, hold):
        hold(6000)

    monkeypatch.setattr(running.handler.gate, "resolve", resolve)
    with pytest.raises(openai.RateLimitError, match="the limit is 5000"):
        running.client().chat.completions.create(model="", **BODY)


def image_request(num_bytes):
    """(a data: URL of so many bytes, the messages that have it)"""
    url = "data:image/png;base64," + base64.b64encode(bytes(num_bytes)).decode()
    return url, [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]


def test_a_decoded_image_is_counted_instead_of_its_text(scripted):
    """A body of 9,100 bytes and its image of 6,750 are counted until it is decoded, then 6,850 bytes."""
    running, _ = scripted(settings=ServerSettings(max_held_bytes=25_000), holds_back=True, accepts=("image",))
    _, messages = image_request(6750)
    client = running.client()
    streams = [client.chat.completions.create(model="", stream=True, messages=messages) for _ in range(2)]
    with pytest.raises(openai.RateLimitError, match="the limit is 25000"):
        client.chat.completions.create(model="", messages=messages)
    for stream in streams:
        stream.close()


@pytest.mark.parametrize("num_bytes", [100, 2 << 20])
def test_a_data_url_is_dropped_once_it_is_decoded(scripted, num_bytes):
    running, backend = scripted(holds_back=True, accepts=("image",))
    url, messages = image_request(num_bytes)
    stream = running.client().chat.completions.create(model="", stream=True, messages=messages)
    next(iter(stream))
    assert backend.requests[0].messages[0]["content"] == [{"type": "image", "image": bytes(num_bytes)}]
    gc.collect()
    # {"url": ...} is not tracked itself: a dict of strings cannot be part of a cycle. The dict of the part is.
    parts = [holder for holder in gc.get_objects() if type(holder) is dict and type(holder.get("image_url")) is dict]
    # The client's own is `url`; what the server parsed is equal to it.
    urls = [part["image_url"].get("url") for part in parts]
    assert not [other for other in urls if other == url and other is not url]
    stream.close()


def test_request_ids(scripted):
    running, _ = scripted()
    assert send(f"{running.url}/version", x_request_id="tile-7")[1]["x-request-id"] == "tile-7"
    assert send(f"{running.url}/version", x_request_id="bad id\t")[1]["x-request-id"] not in ("", "bad id\t")


def test_too_many(scripted):
    running, backend = scripted(settings=ServerSettings(max_queue=1), holds_back=True)
    client = running.client()
    streams = [client.chat.completions.create(model="", stream=True, **BODY) for _ in range(9)]
    with pytest.raises(openai.RateLimitError) as caught:
        client.chat.completions.create(model="", **BODY)
    assert "9 answers are in progress, the limit is 9" in caught.value.message
    assert int(caught.value.response.headers["retry-after"]) >= 1
    assert "tilewright_requests_refused_total 1.0" in send(f"{running.url}/metrics")[2]
    with pytest.raises(openai.BadRequestError, match="at most 9 at once"):
        client.chat.completions.create(model="", n=10, **BODY)
    streams[0].close()
    wait_until(lambda: backend.num_aborted == 1)
    streams[0] = client.chat.completions.create(model="", stream=True, **BODY)
    for stream in streams:
        stream.close()
    wait_until(lambda: backend.num_aborted == 10)


def test_a_client_that_leaves_frees_its_place(chat_server, chat_engine):
    client = chat_server.client()
    options = {"model": "", "max_tokens": 8000, "extra_body": {"ignore_eos": True}, **BODY}
    stream = client.chat.completions.create(stream=True, **options)
    next(iter(stream))
    assert chat_engine.stats().num_running == 1
    stream.close()
    wait_until(lambda: chat_engine.stats().num_running == 0 and chat_engine.stats().num_pages_used == 0)
    with pytest.raises(openai.APITimeoutError):  # without a stream it is seen as well
        client.with_options(timeout=0.3).chat.completions.create(**options)
    wait_until(lambda: chat_engine.stats().num_running == 0 and chat_engine.stats().num_pages_used == 0)


@pytest.mark.parametrize("is_stream", [False, True])
def test_what_takes_too_long(scripted, is_stream):
    running, backend = scripted(settings=ServerSettings(request_timeout_s=0.2), holds_back=True)
    client = running.client()
    with pytest.raises(openai.APIError, match=r"longer than 0\.2 s"):
        answer = client.chat.completions.create(model="", stream=is_stream, **BODY)
        list(answer)
    wait_until(lambda: backend.num_aborted == 1)


def test_while_there_is_no_engine(scripted):
    running, backend = scripted()
    assert json.loads(send(f"{running.url}/health")[2]) == {"status": "ok", "replicas": 1}
    backend.error = EngineUnavailable("it is being started")
    assert send(f"{running.url}/health")[0] == 503
    with pytest.raises(openai.InternalServerError) as caught:
        running.client().chat.completions.create(model="", **BODY)
    assert caught.value.status_code == 503 and "being started" in caught.value.message
    assert caught.value.response.headers["retry-after"]
    assert "tilewright_engine_ready 0.0" in send(f"{running.url}/metrics")[2]


@pytest.mark.parametrize("logs_content", [False, True])
def test_content_is_logged_only_with_log_content(scripted, caplog, logs_content):
    running, _ = scripted(settings=ServerSettings(logs_content=logs_content))
    with caplog.at_level(logging.DEBUG):
        secret = {"messages": [{"role": "user", "content": "my secret tile"}], "stop": "my secret stop"}
        running.client().chat.completions.create(model="", **secret)
        with pytest.raises(openai.BadRequestError):
            running.client().chat.completions.create(model="", temperature=9, **secret)
        with pytest.raises(openai.BadRequestError):
            running.client().chat.completions.create(model="", messages=[{"role": "my secret role", "content": ""}])
        wait_until(lambda: len([r for r in caplog.records if r.name == "tilewright.access"]) == 3)
    lines = [record.fields for record in caplog.records if record.name == "tilewright.access"]
    assert [line["status"] for line in lines] == [200, 400, 400]
    assert lines[0]["prompt_tokens"] == 3 and lines[0]["output_tokens"] == 3 and lines[0]["ttft_s"] >= 0
    logged = json.dumps(lines) + caplog.text
    assert all((secret in logged) == logs_content for secret in ("my secret tile", "my secret stop", "my secret role"))


def test_metrics(chat_server):
    client = chat_server.client()
    client.chat.completions.create(model="", max_tokens=5, **BODY)
    text = send(f"{chat_server.url}/metrics")[2]
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values['tilewright_requests_total{path="/v1/chat/completions",status="200"}']) >= 1
    assert float(values["tilewright_time_to_first_token_seconds_count"]) >= 1
    assert float(values["tilewright_inter_token_seconds_count"]) >= 1
    assert float(values["tilewright_kv_pages"]) > 0 and float(values["tilewright_steps_total"]) >= 5
    assert float(values["tilewright_step_seconds_total"]) > 0
    send(f"{chat_server.url}/secret/path")
    assert "secret" not in send(f"{chat_server.url}/metrics")[2]


def test_head_is_answered_as_get_is(scripted):
    running, _ = scripted(settings=ServerSettings(api_keys=("key",)))
    for path in ("/health", "/version", "/"):
        connection = http.client.HTTPConnection(running.url.removeprefix("http://"), timeout=30)
        with contextlib.closing(connection):
            connection.request("HEAD", path)
            response = connection.getresponse()
            assert response.status == 200 and int(response.headers["content-length"]) > 0 and response.read() == b""
            connection.request("GET", path)  # nothing of a body was left in between
            assert connection.getresponse().status == 200
    assert send(f"{running.url}/v1/models", method="HEAD")[0] == 401
    assert send(f"{running.url}/v1/chat/completions", method="HEAD", authorization="Bearer key")[0] == 405


def test_lines_tell_the_method_and_addresses_that_do_not_exist(scripted, caplog):
    running, _ = scripted()
    with caplog.at_level(logging.INFO, "tilewright.access"):
        send(f"{running.url}/v1/modles?secret=1")
        send(f"{running.url}/wp-login.php", b"x", method="PUT")
        send(f"{running.url}/{'x' * 1000}")
        wait_until(lambda: len(caplog.records) == 3)
    logged = [(record.fields["method"], record.fields["path"]) for record in caplog.records]
    assert logged == [("GET", "/v1/modles"), ("PUT", "/wp-login.php"), ("GET", "/" + "x" * 199)]
    figures = running.handler.metrics.text(None, 0).decode()
    assert 'path="other",status="404"' in figures and "modles" not in figures
