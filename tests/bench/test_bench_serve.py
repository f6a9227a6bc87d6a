"""`tilewright bench serve` against servers of all kinds, from its flags to the table, the JSON and the exit status."""

import json
import subprocess
import sys

import pytest
from odd_server import DONE, OddServer, chunked, event, finish, models, plain, token, usage, well_behaved
from oracle import require

from tilewright import cli, config
from tilewright.bench import timing
from tilewright.bench.serve import run as sending
from tilewright.engine.measure import machine
from tilewright.types import RequestError

PROBE = {"read_gb_s": 20.0, "read_gb_s_median": 18.0, "gemm_tflops": 1.5, "peak_tflops": 2.0, "gemm_dtype": "float32"}


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    """Runs the command: (exit status, JSON, standard output, standard error)."""
    monkeypatch.setattr(sending, "measure_limits", lambda: {"machine": {"cpu_model": "a machine"}, "probe": PROBE})

    def run_command(server, *arguments, count=6):
        path = tmp_path / "serve.json"
        url = server if isinstance(server, str) else server.url
        flags = ["--requests", str(count), "--warmup", "2", "--concurrency", "3", "--output-tokens", "4"]
        if "--rate" in arguments:
            flags = flags[:4]
        status = cli.main(["bench", "serve", url, *flags, "--json", str(path), *arguments])
        captured = capsys.readouterr()
        document = json.loads(path.read_text()) if path.exists() else None
        return status, document, captured.out, captured.err

    return run_command


def answering(*pieces: bytes, head=chunked):
    """A server with a model that answers every chat the same."""
    return OddServer(lambda request: models("m") if request.path == "/v1/models" else head(*pieces))


def test_a_good_server(run):
    with OddServer(well_behaved) as server:
        status, document, text, _ = run(server)
    assert status == 0 and "6 answered, 0 failed" in text
    chats = [request for request in server.requests if request.path == "/v1/chat/completions"]
    assert len(chats) == 8 and {request.json()["model"] for request in chats} == {"first"}
    assert len({request.body for request in chats}) == 8  # nothing twice: caches do not help
    assert server.most_under_way <= 3
    assert document["totals"]["num_answered"] == 6 and document["totals"]["num_shorter"] == 0
    assert [sample["number"] for sample in document["samples"]] == list(range(6))
    assert {(s["prompt_tokens"], s["output_tokens"], len(s["gaps_s"])) for s in document["samples"]} == {(100, 4, 3)}
    assert set(document["figures"]) == {"ttft", "itl", "tpot", "e2e", "prompt_tokens", "output_tokens"}
    assert document["figures"]["itl"]["count"] == 18
    for sample in document["samples"]:
        assert 0 < sample["first_token_s"] <= sample["total_s"]
    assert document["limits"] == PROBE and document["machine"]["cpu_model"] == "a machine"
    assert "read 20.0 GB/s at best" in text and "first token (TTFT)" in text and "the client used" in text


def test_a_model_by_name_a_key_and_another_interface(run, monkeypatch):
    with OddServer(well_behaved) as server:
        arguments = ["--model", "mine", "--api-key", "secret", "--endpoint", "completions", "--no-limits"]
        status, document, text, _ = run(server.url + "/v1", *arguments)
    assert status == 0 and {request.path for request in server.requests} == {"/v1/completions"}
    assert {request.json()["model"] for request in server.requests} == {"mine"}
    assert {request.headers["authorization"] for request in server.requests} == {"Bearer secret"}
    assert "secret" not in json.dumps(document) and "limits" not in document and "GB/s" not in text


def test_the_key_of_the_environment(run, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "from-the-environment")
    config.from_environment.cache_clear()
    try:
        with OddServer(well_behaved) as server:
            assert run(server)[0] == 0
    finally:
        monkeypatch.undo()
        config.from_environment.cache_clear()
    assert {request.headers["authorization"] for request in server.requests} == {"Bearer from-the-environment"}


def test_images_and_extra_fields(run):
    with OddServer(well_behaved) as server:
        extra = '{"chat_template_kwargs": {"enable_thinking": false}}'
        status, document, _, _ = run(server, "--pictures", "1", "--picture-size", "32x16", "--extra", extra, "--plain")
    assert status == 0 and document["workload"]["picture_size"] == [32, 16]
    for request in server.requests[1:]:
        assert (
            request.json()["chat_template_kwargs"] == {"enable_thinking": False} and "ignore_eos" not in request.json()
        )
        assert request.json()["messages"][0]["content"][0]["type"] == "image_url"


def test_open_loop(run):
    with OddServer(well_behaved) as server:
        status, document, _, _ = run(server, "--rate", "200", "--burstiness", "0.5", "--goodput", "ttft:60,e2e:60")
    assert status == 0 and document["totals"]["num_answered"] == 6
    sent = [sample["sent_s"] for sample in document["samples"]]
    assert sent == sorted(sent)
    assert document["totals"]["goodput"]["share"] == 1.0


def test_by_time(run):
    with OddServer(well_behaved) as server:
        status, document, _, errors = run(server, "--seconds", "60")
        assert status == 0 and document["totals"]["num_answered"] == 6 and "raise --requests" in errors
        status, document, _, errors = run(server, "--seconds", "0.000001")
        assert status == 0 and document["totals"]["num_answered"] == 3 and "raise --requests" not in errors


def test_usage_absent_done_missing_comments_and_crlf(run):
    tokens = [token(text).replace(b"\n", b"\r\n") for text in "abcd"]
    with answering(b": hello\r\n\r\n", *tokens, b": ping\r\n\r\n", finish()) as server:
        status, document, text, _ = run(server)
    assert status == 0 and "6 answers' tokens were counted by chunks" in text and "reports no prompt tokens" in text
    assert {(s["output_tokens"], s["is_counted_by_chunks"]) for s in document["samples"]} == {(4, True)}


def test_data_split_anywhere(run):
    body = b"".join([token("ä"), token("b"), finish(), usage(9, 2), DONE])
    chunks = b"".join(chunked(*(body[at : at + 7] for at in range(0, len(body), 7))))
    with answering(head=lambda: [chunks[at : at + 11] for at in range(0, len(chunks), 11)]) as server:
        status, document, text, _ = run(server)
    assert status == 0 and "6 answers had fewer tokens than requested" in text
    assert {(s["output_tokens"], s["num_chunks"], len(s["gaps_s"])) for s in document["samples"]} == {(2, 2, 1)}


def test_several_choices(run):
    chunks = [token("a", index) for index in (0, 1, 0, 1)]
    with answering(*chunks, finish(0), finish(1), usage(9, 4), DONE) as server:
        status, document, _, _ = run(server, "--extra", '{"n": 2}')
    assert status == 0
    assert {(s["num_choices"], len(s["gaps_s"]), tuple(s["finish_reasons"])) for s in document["samples"]} == {
        (2, 2, ("length", "length"))
    }


@pytest.mark.parametrize(
    "answer,kind,message",
    [
        (plain(b'{"error": {"message": "too long"}}', "400 Bad Request"), "HTTP 400", "too long"),
        (plain(b"busy", "503 Service Unavailable", "text/plain"), "HTTP 503", "busy"),
        (plain(b"", "502 Bad Gateway", "text/plain"), "HTTP 502", "Bad Gateway"),
        ([b"HTTP/1.1 307 T\r\nLocation: /x\r\nContent-Length: 0\r\n\r\n"], "HTTP 307", "T (Location: /x)"),
        ([*chunked(token("a"))[:-1], None], "closed", "closed within the answer"),
        ([b"HTTP/1.1 200 OK\r\n\r\n" + token("a"), None], "closed", "without a finish_reason"),
        ([None], "closed", "before the answer began"),
        (chunked(token("a"), event(error={"message": "out of memory"})), "error in stream", "out of memory"),
        (chunked(b"data: {broken\n\n"), "malformed", "expected JSON"),
        (plain(b'{"choices": []}'), "no stream", "expected text/event-stream"),
    ],
)
def test_failures_are_counted_by_kind(run, answer, kind, message):
    """One request fails, then all do."""

    def some_fail(request):
        return (
            models("m")
            if request.path == "/v1/models"
            else well_behaved(request)
            if len(server.requests) > 4
            else answer
        )

    with OddServer(some_fail) as server:
        status, document, text, _ = run(server)
    assert status == 0 and document["totals"]["num_failed"] == 1 and kind in text and message in text
    assert document["totals"]["num_answered"] == 5 and document["totals"]["output_tokens_per_s"] > 0
    with OddServer(lambda request: models("m") if request.path == "/v1/models" else answer) as server:
        status, document, text, _ = run(server)
    assert status == 1 and document["totals"]["num_failed"] == 6 and document["figures"] == {}
    ((found_kind, messages),) = document["totals"]["failures"].items()
    ((found_message, count),) = messages.items()
    assert found_kind == kind and message in found_message and count == 6
    assert f"6 failed, {kind}:" in text and f"6 x {found_message}" in text


def test_a_server_that_hangs(run):
    with OddServer(lambda request: models("m") if request.path == "/v1/models" else [b"HTTP/1.1 200 OK\r\n"]) as server:
        status, document, _, _ = run(server, "--timeout-s", "0.05", "--warmup", "0", count=2)
    assert status == 1 and document["totals"]["failures"] == {"timeout": {"no whole answer within 0.05 s": 2}}


def test_no_server(run):
    with OddServer(well_behaved) as server:
        pass
    status, document, _, errors = run(server)
    assert status == 2 and document is None and "cannot be reached" in errors
    status, document, text, _ = run(server, "--model", "m")
    assert status == 1 and "6 failed, connect:" in text


@pytest.mark.parametrize(
    "answer,message",
    [
        (plain(b'{"error": {"message": "no key"}}', "401 Unauthorized"), "/v1/models answers HTTP 401: no key"),
        (models(), "names no model: use --model"),
        (plain(b"hello"), "names no model: use --model"),
        (plain(b"[]"), "names no model: use --model"),
    ],
)
def test_no_models(run, answer, message):
    with OddServer(lambda request: answer) as server:
        status, _, _, errors = run(server)
    assert status == 2 and message in errors


def test_plot(run, tmp_path):
    require("matplotlib")
    path = tmp_path / "serve.png"
    with OddServer(lambda request: well_behaved(request) if len(server.requests) != 5 else [None]) as server:
        assert run(server, "--plot", str(path))[0] == 0
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["--rate", "0"], "'0' is not a number above 0"),
        (["--rate", "nan"], "'nan' is not a number of 0 or more"),
        (["--concurrency", "2", "--rate", "1"], "not allowed with argument"),
        (["--prompt-tokens", "ten"], "expected 128 or 64-256"),
        (["--extra", "[1]"], "it is not a JSON object"),
        (["--extra", "{"], "it is not JSON:"),
        (["--picture-size", "0x5"], "expected one such as 1024x768"),
    ],
)
def test_flags_that_are_none(arguments, message, capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", "serve", *arguments])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["--goodput", "speed:1"], "--goodput is 'speed:1'"),
        (["--api-key", "a\r\nX: y"], "the API key has characters"),
        (["--model", "m", "--prompt-tokens", "9-3"], "--prompt-tokens is 9-3"),
        (["--model", "m", "--endpoint", "completions", "--pictures", "1"], "expected chat"),
    ],
)
def test_users_errors(arguments, message, capsys):
    assert cli.main(["bench", "serve", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_the_client_is_free_of_torch():
    """Not a module of it is loaded by a whole run: what shares the machine with the server stays small."""
    program = (
        "import sys; from tilewright import cli; status = cli.main(sys.argv[1:]); "
        "sys.exit(status or any(name.split('.')[0] == 'torch' for name in sys.modules))"
    )
    with OddServer(well_behaved) as server:
        arguments = ["bench", "serve", server.url, "--no-limits", "--pictures", "1", "--requests", "4"]
        result = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, timeout=60)
    assert result.returncode == 0, result.stderr


def test_where_the_server_runs():
    assert sending.is_here("127.0.0.1", 80) and sending.is_here("localhost", 80)
    # An address that is set aside for examples in books: no machine has it.
    assert not sending.is_here("192.0.2.1", 80) and not sending.is_here("..", 80)


def test_a_machine_that_cannot_be_measured(monkeypatch):
    monkeypatch.setattr(sending.sys, "executable", "/bin/false")
    with pytest.raises(RequestError, match="--no-limits skips that"):
        sending.measure_limits()


def test_the_process_that_measures_the_machine(monkeypatch, capsys):
    monkeypatch.setattr(timing, "probe", lambda: timing.Probe(**PROBE))
    sending._main()
    document = json.loads(capsys.readouterr().out)
    assert document["probe"] == PROBE and document["machine"]["cpu_model"] == machine.describe().cpu_model
