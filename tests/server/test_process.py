"""The whole server as users start it: two processes, faults, and a clean end."""

import asyncio
import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from serve_process import ServerProcess
from tiny_checkpoint import write_chat_model

from tilewright import cli
from tilewright.process.supervisor import ProcessRefused, SupervisedProcess
from tilewright.server.link.remote import RemoteBackend

QUESTION = [{"role": "user", "content": "What is a tile?"}]
LONG = {"model": "", "messages": QUESTION, "max_tokens": 3000, "temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def serve(model):
    started = []

    def start(*flags, **environment):
        started.append(ServerProcess(model, *flags, **environment))
        return started[-1]

    yield start
    for process in started:
        process.end()


@pytest.fixture(scope="module")
def lasting(model, tmp_path_factory):
    """One server for the tests that leave it as it was: with a key, a name, and no room for its pack cache."""
    cache = tmp_path_factory.mktemp("cache")
    flags = ["--name", "tiler", "--max-sequences", "4", "--max-context", "4000"]
    environment = {"TILEWRIGHT_CACHE_DIR": str(cache), "max_file_bytes": 1 << 16}
    server = ServerProcess(model, *flags, api_key="secret", **environment)
    server.cache = cache
    yield server
    server.end()


def test_flags_are_obeyed(lasting):
    assert lasting.status("/v1/models") == 401
    (found,) = lasting.client().models.list().data
    assert found.id == "tiler" and found.model_extra["max_model_len"] == 4000
    assert any(f"the web page is at {lasting.url}/" in line for line in lasting.lines)


def test_no_room_for_the_pack_cache(lasting):
    """A disk that takes 64 KB of a file and no more: warned of, and served all the same."""
    assert lasting.client().chat.completions.create(**{**LONG, "max_tokens": 2}).usage.completion_tokens == 2
    lasting.wait_for(lambda: any("packed weights are not cached" in line for line in lasting.lines))
    assert not [path for path in lasting.cache.rglob("*") if path.is_file()]


def test_a_stopped_engine_is_told_of_and_loses_nothing(lasting):
    client = lasting.client()
    options = {**LONG, "max_tokens": 400}
    expected = client.chat.completions.create(**options).choices[0].message.content
    stream = client.chat.completions.create(stream=True, **options)
    first = next(iter(stream))
    engine = lasting.engine_pid()
    with ThreadPoolExecutor(1) as pool:
        os.kill(engine, signal.SIGSTOP)
        try:
            # What comes while nothing is known of it waits.
            early = pool.submit(lambda: client.chat.completions.create(**options))
            began_s = time.monotonic()
            assert lasting.status() == 503
            assert time.monotonic() - began_s < 4  # 1.5 s, and this machine is busy
            with pytest.raises(openai.InternalServerError, match="is stopped; try again later") as caught:
                client.chat.completions.create(**options)
            assert caught.value.status_code == 503 and caught.value.response.headers["Retry-After"]
        finally:
            os.kill(engine, signal.SIGCONT)
        assert early.result().choices[0].message.content == expected
    text = "".join(chunk.choices[0].delta.content or "" for chunk in [first, *stream])
    assert text == expected
    assert lasting.status() == 200
    assert lasting.engine_pid() == engine


def test_a_lost_engine_is_replaced(lasting):
    client = lasting.client()
    bandwidth = lasting.metric("tilewright_bandwidth_bytes_per_second")
    first = client.chat.completions.create(**{**LONG, "max_tokens": 10})
    before = first.choices[0].message.content
    assert first.timings["bandwidth_share"] > 0  # of the machine's, as the engine's process measured it
    with ThreadPoolExecutor(4) as pool:
        streams = [client.chat.completions.create(stream=True, **LONG) for _ in range(3)]
        for stream in streams:
            next(iter(stream))
        waiting = pool.submit(lambda: client.chat.completions.create(**LONG))
        time.sleep(0.2)
        os.kill(lasting.engine_pid(), signal.SIGKILL)
        for stream in streams:
            with pytest.raises(openai.APIError, match=r"SIGKILL.*being restarted"):
                list(stream)
        with pytest.raises(openai.InternalServerError, match="SIGKILL") as caught:
            waiting.result()
        assert caught.value.status_code == 503
    # Until the new one is there, the server says so itself.
    lasting.wait_until_ready()
    after = client.chat.completions.create(**{**LONG, "max_tokens": 10}).choices[0].message.content
    assert after == before
    assert lasting.metric("tilewright_engine_restarts_total") == 1
    assert lasting.metric("tilewright_bandwidth_bytes_per_second") == bandwidth  # which was not measured again


def test_a_server_that_is_killed_leaves_no_engine_behind(lasting):
    """The last test of this server."""
    engine = lasting.engine_pid()
    lasting.process.kill()
    deadline = time.monotonic() + 30
    while os.path.exists(f"/proc/{engine}"):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_lost_rank_ends_its_engine_which_is_replaced(serve):
    server = serve("--tp", "2")
    client = server.client()
    before = client.chat.completions.create(**{**LONG, "max_tokens": 10}).choices[0].message.content
    stream = client.chat.completions.create(stream=True, **LONG)
    next(iter(stream))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: client.chat.completions.create(**LONG))
        time.sleep(0.2)
        (rank,) = server.rank_pids()
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(openai.APIError, match="restarted"):
            list(stream)
        with pytest.raises(openai.InternalServerError, match="restarted") as caught:
            waiting.result()
        assert caught.value.status_code == 503
    server.wait_until_ready()
    assert client.chat.completions.create(**{**LONG, "max_tokens": 10}).choices[0].message.content == before
    assert len(server.rank_pids()) == 1


def test_shutdown_finishes_the_answers_under_way(serve):
    server = serve()
    client = server.client()
    options = {**LONG, "max_tokens": 400}
    stream = client.chat.completions.create(stream=True, **options)
    next(iter(stream))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: client.chat.completions.create(**options))
        time.sleep(0.1)
        engine = server.engine_pid()
        # As a terminal or a service manager does: the signal goes to both processes.
        os.kill(server.process.pid, signal.SIGTERM)
        os.kill(engine, signal.SIGTERM)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert waiting.result().choices[0].message.content == text
        assert waiting.result().usage.completion_tokens == 400
    assert server.process.wait(30) == 0
    with pytest.raises(ProcessLookupError):
        os.kill(engine, 0)


def test_answers_beyond_the_drain_timeout_end_with_an_error(serve):
    server = serve("--drain-timeout", "1")
    client = server.client()
    options = {**LONG, "max_tokens": 8000}
    streams = [client.chat.completions.create(stream=True, **options) for _ in range(8)]
    for stream in streams:
        next(iter(stream))
    response = client.responses.create(model="", input="hi", stream=True, extra_body={"ignore_eos": True})
    next(iter(response))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: client.chat.completions.create(**options))
        time.sleep(0.1)
        os.kill(server.process.pid, signal.SIGTERM)
        for stream in streams:
            with pytest.raises(openai.APIError, match="the server is shutting down"):
                list(stream)
        assert list(response)[-1].type == "response.failed"
        with pytest.raises(openai.InternalServerError, match="the server is shutting down") as caught:
            waiting.result()
        assert caught.value.status_code == 503 and caught.value.code == "server_ending"
    assert server.process.wait(30) == 0
    server.end()
    lines = [json.loads(line) for line in server.lines]
    assert not [line for line in lines if "trace" in line or line["level"] == "error"], lines
    assert [line["outcome"] for line in lines if line.get("path") == "/v1/chat/completions"] == ["server_ending"] * 9


def test_a_second_signal_ends_the_answers_with_an_error_that_says_so(serve):
    server = serve()
    client = server.client()
    streams = [client.chat.completions.create(stream=True, **LONG) for _ in range(3)]
    for stream in streams:
        next(iter(stream))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: client.chat.completions.create(**LONG))
        server.wait_for(lambda: True)
        os.kill(server.process.pid, signal.SIGTERM)
        server.wait_for(lambda: any("finishing the running answers" in line for line in server.lines))
        os.kill(server.process.pid, signal.SIGTERM)
        for stream in streams:
            with pytest.raises(openai.APIError) as caught:
                list(stream)
            assert caught.value.message == "the server is shutting down before the answer is complete"
        with pytest.raises(openai.InternalServerError, match="the server is shutting down") as caught:
            waiting.result()
        assert caught.value.status_code == 503 and caught.value.code == "server_ending"
    assert server.process.wait(30) == 0
    assert not [line for line in server.lines if "Traceback" in line or '"error"' in line], server.lines


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["/no/such/model"], "/no/such/model"),
        (["MODEL", "--allow-files", "/no/such/folder"], "not a folder"),
        (["MODEL", "--kv-memory", "1"], "kv_memory"),
        (["MODEL", "--max-body", "much"], "much"),
        (["MODEL", "--api-key", "clé"], "ASCII"),
        (["MODEL", "--host", "256.0.0.1"], "cannot listen"),
        (["MODEL", "--cors-origin", "not a url"], "--cors-origin is 'not a url'"),
        (["MODEL", "--cors-origin", "https://tiles.example/page"], "--cors-origin"),
        (["MODEL", "--max-connections", "0"], "--max-connections"),
    ],
)
def test_wrong_flags_are_refused_at_once(model, flags, message, capsys, monkeypatch):
    arguments = ["serve", *[str(model) if flag == "MODEL" else flag for flag in flags], "--port", "0"]
    try:
        status = cli.main(arguments)
    except SystemExit as ended:  # by the parser of flags
        status = ended.code
    assert status == 2
    errors = capsys.readouterr().err
    assert message in errors and "the engine ended" not in errors


@pytest.mark.parametrize("model", ["/no/such/model", "./nowhere", "~/nowhere", "nowhere", "a/b/c", "x.gguf"])
def test_a_model_that_is_not_there_starts_no_engine(model, capsys, monkeypatch):
    monkeypatch.setattr(RemoteBackend, "start", lambda self: pytest.fail("an engine was started"))
    assert cli.main(["serve", model, "--port", "0"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"tilewright: {model} does not exist")


def test_an_engine_that_is_killed_as_it_starts_says_so_and_how_much_memory_there_is(tmp_path, monkeypatch):
    """As a system does that has no memory left: the server ends, with the reason."""
    (tmp_path / "killed_engine.py").write_text("import os\nos.kill(os.getpid(), 9)\n")
    monkeypatch.syspath_prepend(tmp_path)
    process = SupervisedProcess("engine", "killed_engine:serve", {})
    process.on_end = lambda how: None

    async def start():
        try:
            await process.start()
        finally:
            await process.close()

    pattern = r"ended before it was ready \(signal SIGKILL\), as the system does .* may have [\d.]+ GB \(.*\) here$"
    with pytest.raises(ProcessRefused, match=pattern):
        asyncio.run(start())
