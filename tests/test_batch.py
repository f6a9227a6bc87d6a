"""`tilewright batch` as people run it, on tiny checkpoints."""

import collections
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest
from PIL import Image
from tiny_checkpoint import write_text_model, write_vision_model

from tilewright import Engine, cli
from tilewright.batch.results import ResultFile
from tilewright.batch.work import ENGINE_LOST
from tilewright.engine.loop import EngineLoop
from tilewright.inputs.precomputed_values import as_json
from tilewright.ops.native import kernels

FLAGS = ["--no-pack-cache", "--max-context", "256", "--kv-memory", "20MB"]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """So little is computed that a second thread would only be waited for."""
    kernels.set_num_threads(1)
    yield
    kernels.set_num_threads(0)


@pytest.fixture(scope="module")
def text_model(tmp_path_factory):
    return str(write_text_model(tmp_path_factory.mktemp("tiny") / "text"))


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory):
    return str(write_vision_model(tmp_path_factory.mktemp("tiny") / "vision"))


def request(custom_id, url, **body):
    body = {"max_tokens": 8, "temperature": 0, **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def chat(custom_id, content, **body):
    return request(custom_id, CHAT, messages=[{"role": "user", "content": content}], **body)


def write(path, requests):
    path.write_text("".join(json.dumps(one) + "\n" for one in requests))
    return path


def read(path):
    """The lines of an output, by custom_id; each id once."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert collections.Counter(line["custom_id"] for line in lines).most_common(1)[0][1] == 1
    return {line["custom_id"]: line for line in lines}


def comparable(lines):
    """What does not depend on when it was answered, nor on what was in the cache then."""
    for line in lines.values():
        line["response"].pop("request_id")
        for name in ("id", "created"):
            line["response"]["body"].pop(name, None)
        line["response"]["body"].get("usage", {}).pop("prompt_tokens_details", None)
    return lines


def run(requests, output, model, *flags):
    return cli.main(["batch", str(requests), str(output), "-m", str(model), *FLAGS, *flags])


def many(num_requests):
    """Requests of both kinds and several lengths, one in ten of which fails."""
    for number in range(num_requests):
        more = {"temperature": 3} if number % 10 == 7 else {"max_tokens": 5 + number % 40}
        if number % 2:
            yield request(f"number {number}", COMPLETIONS, prompt=f"Count from {number}", **more)
        else:
            yield chat(f"number {number}", f"Count from {number}", **more)


@pytest.fixture
def source(tmp_path):
    return write(tmp_path / "in.jsonl", many(40))


@pytest.fixture
def output(tmp_path):
    return tmp_path / "out.jsonl"


def test_answers_are_the_engines_and_failures_say_why(text_model, tmp_path, output, capsys):
    source = write(
        tmp_path / "in.jsonl",
        [
            chat("one", "Hello"),
            chat("model named", "Hello there", model="text"),
            chat("three answers", "Hello", n=3, temperature=1, seed=5),
            request("texts", COMPLETIONS, prompt=["abc", "de"]),
            request("ids", COMPLETIONS, prompt=[65, 66, 67]),
            chat("too hot", "Hello", temperature=3),
            chat("too long", "x" * 300),
            chat("a picture", [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]),
            request("no prompt", COMPLETIONS),
            chat("streamed", "Hello", stream=True),
        ],
    )
    assert run(source, output, text_model) == 1
    lines = read(output)
    with Engine(text_model, pack_cache=False, max_context=256) as engine:
        greedy = {"max_tokens": 8, "temperature": 0.0}
        for name, text in (("one", "Hello"), ("model named", "Hello there"), ("streamed", "Hello")):
            expected = engine.chat([{"role": "user", "content": text}], **greedy)
            body = lines[name]["response"]["body"]
            assert body["choices"][0]["message"] == {"role": "assistant", "content": expected.text}
            assert body["usage"]["prompt_tokens"] == expected.num_prompt_tokens
            assert body["usage"]["completion_tokens"] == len(expected.token_ids)
        drawn = engine.chat([{"role": "user", "content": "Hello"}], max_tokens=8, temperature=1.0, seed=5, n=3)
        texts = [choice["message"]["content"] for choice in lines["three answers"]["response"]["body"]["choices"]]
        assert texts == [answer.text for answer in drawn]
        for name, prompts in (("texts", {"prompt": ["abc", "de"]}), ("ids", {"prompt_token_ids": [[65, 66, 67]]})):
            expected = [answer.text for answer in engine.generate(**prompts, **greedy)]
            assert [choice["text"] for choice in lines[name]["response"]["body"]["choices"]] == expected
    for name, line in lines.items():
        assert set(line) == {"id", "custom_id", "response", "error"} and line["error"] is None
        assert line["id"].startswith("batch_req_") and line["response"]["request_id"].startswith("req_")
        is_error = "error" in line["response"]["body"]
        assert line["response"]["status_code"] == (400 if is_error else 200), name
    errors = {
        name: line["response"]["body"]["error"] for name, line in lines.items() if "error" in line["response"]["body"]
    }
    assert set(errors) == {"too hot", "too long", "a picture", "no prompt"}
    assert errors["too hot"]["param"] == "temperature" and errors["too hot"]["type"] == "invalid_request_error"
    assert "256" in errors["too long"]["message"] and "accepts text only" in errors["a picture"]["message"]
    assert errors["no prompt"]["param"] == "prompt"
    printed = capsys.readouterr()
    assert "10 of 10 done, 4 failed" in printed.err and not printed.out


def test_failures_in_a_file_of_their_own(text_model, source, output, tmp_path):
    errors = tmp_path / "errors.jsonl"
    assert run(source, output, text_model, "--errors", str(errors)) == 1
    failed = {f"number {number}" for number in range(7, 40, 10)}
    assert set(read(errors)) == failed
    assert set(read(output)) == {f"number {number}" for number in range(40)} - failed
    before = output.read_bytes(), errors.read_bytes()
    assert run(source, output, text_model, "--errors", str(errors)) == 1  # and nothing is sent again
    assert (output.read_bytes(), errors.read_bytes()) == before


def test_images_by_path_and_retry_failed(vision_model, tmp_path, output):
    (tmp_path / "pictures").mkdir()
    here, later = tmp_path / "pictures" / "one 1.png", tmp_path / "pictures" / "two.png"
    Image.effect_noise((32, 24), 90).convert("RGB").save(here)
    text = {"type": "text", "text": "What is it?"}
    ways = {
        "relative": {"type": "image_url", "image_url": {"url": "pictures/one 1.png"}},
        "absolute": {"type": "image", "image": str(here)},
        "url": {"type": "image_url", "image_url": {"url": here.as_uri()}},
        "missing": {"type": "image_url", "image_url": {"url": "pictures/two.png"}},
    }
    source = write(tmp_path / "in.jsonl", [chat(name, [part, text]) for name, part in ways.items()])
    assert run(source, output, vision_model) == 1
    first = read(output)
    assert first["missing"]["response"]["status_code"] == 400
    Image.effect_noise((32, 24), 90).convert("RGB").save(later)
    assert run(source, output, vision_model) == 1  # the failure counts as done
    assert run(source, output, vision_model, "--retry-failed") == 0
    lines = read(output)
    assert {name: line for name, line in lines.items() if name != "missing"} == {
        name: line for name, line in first.items() if name != "missing"
    }
    with Engine(vision_model, pack_cache=False, max_context=256) as engine:
        for name, line in lines.items():
            part = {"type": "image", "image": str(later if name == "missing" else here)}
            answer = engine.chat([{"role": "user", "content": [part, text]}], max_tokens=8, temperature=0.0)
            assert line["response"]["body"]["choices"][0]["message"]["content"] == answer.text, name


def test_features_are_taken_where_they_are_allowed(vision_model, tmp_path, output):
    text = {"type": "text", "text": "What is it?"}
    image = {"type": "image", "image": Image.effect_noise((32, 24), 90).convert("RGB")}
    with Engine(vision_model, pack_cache=False, max_context=256) as engine:
        part = engine.features(image)
        answer = engine.chat([{"role": "user", "content": [image, text]}], max_tokens=8, temperature=0.0)
    source = write(tmp_path / "in.jsonl", [chat("one", [as_json(part), text])])
    assert run(source, output, vision_model) == 1
    refused = "image 1: image_features are accepted with --allow-precomputed only"
    assert refused in read(output)["one"]["response"]["body"]["error"]["message"]
    assert run(source, output, vision_model, "--retry-failed", "--allow-precomputed") == 0
    assert read(output)["one"]["response"]["body"]["choices"][0]["message"]["content"] == answer.text


def test_a_batch_is_resumed(text_model, source, output, capsys):
    assert run(source, output, text_model) == 1
    whole = output.read_bytes()
    lines = whole.splitlines(keepends=True)
    kept = b"".join(lines[:15])
    output.write_bytes(kept + lines[15][:-20])  # as a process that is killed leaves it
    assert run(source, output, text_model) == 1
    assert output.read_bytes().startswith(kept)
    again = read(output)
    output.write_bytes(whole)
    assert comparable(again) == comparable(read(output))
    assert "15 done already" in capsys.readouterr().err


def test_requests_added_later_are_answered(text_model, tmp_path, output):
    assert run(write(tmp_path / "in.jsonl", [chat("a", "Hello")]), output, text_model) == 0
    first = output.read_bytes()
    # Spaces and the order of names do not make another request of the first.
    (tmp_path / "in.jsonl").write_text(
        json.dumps(chat("a", "Hello"), sort_keys=True, indent=None, separators=(",", ":"))
    )
    with (tmp_path / "in.jsonl").open("a") as file:
        file.write("\n\n" + json.dumps(chat("b", "Hello")))
    assert run(tmp_path / "in.jsonl", output, text_model) == 0
    assert output.read_bytes().startswith(first) and list(read(output)) == ["a", "b"]


@pytest.mark.parametrize(
    ("requests", "words"),
    [
        ([chat("a", "Hello"), chat("c", "Hello")], "line 2: custom_id 'b' is not in"),
        ([chat("a", "Hello"), chat("b", "Goodbye")], "line 2: custom_id 'b' is another request"),
        ([chat("a", "Hello"), request("b", COMPLETIONS, prompt="Hello")], "line 2: custom_id 'b' is another request"),
    ],
)
def test_an_output_of_other_requests_is_refused(requests, words, text_model, tmp_path, output, capsys):
    source = write(tmp_path / "in.jsonl", [chat("a", "Hello"), chat("b", "Hello")])
    assert run(source, output, text_model, "--concurrency", "1") == 0
    before = output.read_bytes()
    write(source, requests)
    assert run(source, output, text_model) == 2
    assert output.read_bytes() == before
    printed = capsys.readouterr().err
    assert words in printed and "--restart" in printed
    assert run(source, output, text_model, "--restart") == 0
    assert set(read(output)) == {one["custom_id"] for one in requests}


@pytest.mark.parametrize("content", [b"my notes\n", b"my notes", b"\0\1\n\0\2\n", b'{"custom_id": "a"}\n'])
def test_a_file_that_is_no_output_is_left_alone(content, text_model, source, output, capsys):
    output.write_bytes(content)
    assert run(source, output, text_model) == 2
    assert output.read_bytes() == content
    assert "line 1: it is not a line of a batch's output" in capsys.readouterr().err


def test_an_id_twice_in_the_output(text_model, source, output, capsys):
    run(source, output, text_model)
    with output.open("ab") as file:
        file.write(output.read_bytes().splitlines(keepends=True)[0])
    assert run(source, output, text_model) == 2
    assert "line 41: custom_id" in (printed := capsys.readouterr().err) and "is answered twice" in printed


def test_models_by_other_names(text_model, tmp_path, output, capsys):
    source = write(tmp_path / "in.jsonl", [chat("a", "Hello"), chat("b", "Hello", model="gpt-4o-mini")])
    assert run(source, output, text_model) == 2
    assert "line 2: model is 'gpt-4o-mini', this one is 'text'; --name" in capsys.readouterr().err
    assert run(source, output, text_model, "--name", "gpt-4o-mini") == 0
    assert {line["response"]["body"]["model"] for line in read(output).values()} == {"gpt-4o-mini"}


def test_answers_of_another_model_are_not_gone_on_with(text_model, tmp_path, output, capsys):
    source = write(tmp_path / "in.jsonl", [chat("a", "Hello")])
    assert run(source, output, text_model) == 0
    write(source, [chat("a", "Hello"), chat("b", "Hello")])
    assert run(source, output, text_model, "--name", "other") == 2
    assert "OUT has answers of 'text', this model is 'other'" in capsys.readouterr().err
    assert run(source, output, text_model) == 0


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([chat("a", "Hello"), "not json"], "line 2: it is not JSON"),
        ([chat("a", "Hello"), "[1]"], "line 2: it is not an object"),
        (["", "", {**chat("a", "Hello"), "custom_id": ""}], "line 3: custom_id is ''"),
        ([{**chat("a", "Hello"), "custom_id": 7}], "line 1: custom_id is 7"),
        ([{**chat("a", "Hello"), "method": "GET"}], "line 1: method is 'GET', expected POST"),
        ([{**chat("a", "Hello"), "url": "/v1/embeddings"}], "line 1: url is '/v1/embeddings', expected /v1/chat"),
        ([{**chat("a", "Hello"), "url": ["/v1/completions"]}], "line 1: url is ['/v1/completions']"),
        ([{**chat("a", "Hello"), "body": "Hello"}], "line 1: body is 'Hello'"),
        (
            ["", chat("a", "Hello"), "", chat("b", "Hello"), chat("a", "Bye")],
            "line 5: custom_id 'a' is also in line 2",
        ),
        (["[" * 100_000], "line 1: it has lists and objects in more than 201 levels, the limit"),
        (['{"body": ' + "1" * 5000 + "}"], "line 1: it has an integer of 5000 digits, the limit is 4300"),
        (['{"body": {}, "body": {}}'], "line 1: it has the key 'body' twice in an object"),
        ([chat("a", "Hello"), chat("b", "x" * 2000)], "line 2: more than 2000 bytes"),
    ],
)
def test_an_input_that_is_refused_before_anything_runs(lines, words, tmp_path, output, capsys):
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    flags = ["--max-line", "2000"] if "bytes" in words else []
    (model := tmp_path / "no model is loaded").mkdir()
    assert run(source, output, model, *flags) == 2
    printed = capsys.readouterr().err
    assert words in printed and printed.count("\n") == 1
    assert not output.exists()


def test_nothing_to_do(tmp_path, output, capsys):
    (tmp_path / "in.jsonl").touch()
    (model := tmp_path / "no model is loaded").mkdir()
    assert run(tmp_path / "in.jsonl", output, model) == 0
    assert output.read_bytes() == b""
    assert "0 requests" in capsys.readouterr().err


def test_files_that_cannot_be(text_model, tmp_path, source, output, capsys):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link.jsonl").symlink_to(source)
    for input_path, output_path, words in (
        (tmp_path / "nothing.jsonl", output, "No such file"),
        (tmp_path / "pipe", output, "expected a regular file"),
        (tmp_path, output, "expected a regular file"),
        (source, tmp_path, "cannot be written: it is a directory, expected a regular file"),
        (source, tmp_path / "nowhere" / "out.jsonl", "cannot be written: No such file"),
        (source, tmp_path / "link.jsonl", "must be different files"),
    ):
        assert run(input_path, output_path, text_model) == 2
        assert words in capsys.readouterr().err


def test_one_process_at_a_time(text_model, source, output, capsys):
    other = ResultFile(output)
    assert run(source, output, text_model) == 2
    assert "is being written by another batch" in capsys.readouterr().err
    other.close()
    assert run(source, output, text_model) == 1


def when_lines(output, num_lines, act):
    """Calls `act` once the output has so many lines, from a thread."""

    def watch():
        deadline_s = time.monotonic() + 60
        while not output.exists() or output.read_bytes().count(b"\n") < num_lines:
            if time.monotonic() > deadline_s:
                return
            time.sleep(0.002)
        act()

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_what_can_be_gone_on_with(number, status, text_model, tmp_path, output, capsys):
    source = write(
        tmp_path / "in.jsonl", [chat(str(i), f"Count {i}", max_tokens=200, ignore_eos=True) for i in range(40)]
    )
    watcher = when_lines(output, 3, lambda: os.kill(os.getpid(), number))
    assert run(source, output, text_model, "--max-sequences", "1", "--concurrency", "2") == status
    watcher.join()
    assert "run the same command again to continue" in capsys.readouterr().err
    stopped = output.read_bytes()
    assert 3 <= stopped.count(b"\n") < 40 and stopped.endswith(b"\n")
    assert run(source, output, text_model) == 0
    assert output.read_bytes().startswith(stopped)
    assert set(read(output)) == {str(i) for i in range(40)}
    finished = {line["response"]["body"]["choices"][0]["finish_reason"] for line in read(output).values()}
    assert finished == {"length"}  # none of those that were dropped was written


def test_an_engine_that_is_lost_is_not_waited_for(text_model, source, output, monkeypatch, capsys, caplog):
    deliver = EngineLoop._deliver

    def fail_late(self, results):
        if output.read_bytes().count(b"\n") > 8:
            raise MemoryError("no more")
        deliver(self, results)

    with monkeypatch.context() as patch:
        patch.setattr(EngineLoop, "_deliver", fail_late)
        assert run(source, output, text_model, "--concurrency", "2") == ENGINE_LOST
    assert "run the same command again" in capsys.readouterr().err
    assert "a thread failed" in caplog.text
    assert run(source, output, text_model) == 1
    assert len(read(output)) == 40


def test_an_input_that_changes_meanwhile(text_model, tmp_path, output, capsys):
    source = write(tmp_path / "in.jsonl", [chat(f"{i:03}", "Hello", max_tokens=50) for i in range(60)])
    write(tmp_path / "other.jsonl", [chat(f"{i:03}", "Bye..", max_tokens=50) for i in range(60)])

    def change():
        with source.open("r+b") as file:
            file.write((tmp_path / "other.jsonl").read_bytes())

    watcher = when_lines(output, 1, change)
    assert run(source, output, text_model, "--max-sequences", "1", "--concurrency", "1") == 2
    watcher.join()
    assert "has changed since it was checked" in capsys.readouterr().err


def test_killed_twice_nothing_is_lost_or_doubled(text_model, tmp_path):
    source = write(tmp_path / "in.jsonl", many(150))
    unkilled, output = tmp_path / "unkilled.jsonl", tmp_path / "out.jsonl"
    assert run(source, unkilled, text_model) == 1
    command = [sys.executable, "-m", "tilewright", "batch", str(source), str(output), "-m", text_model, *FLAGS]
    environment = {**os.environ, "TILEWRIGHT_NUM_THREADS": "1"}
    choose = random.Random(7)
    num_lines = 0
    for _ in range(2):
        process = subprocess.Popen([*command, "--max-sequences", "2"], env=environment, stderr=subprocess.DEVNULL)
        watcher = when_lines(output, num_lines + choose.randint(1, 50), process.kill)
        assert process.wait(timeout=120) == -signal.SIGKILL
        watcher.join()
        before, num_lines = num_lines, output.read_bytes().count(b"\n")
        assert before < num_lines < 150
    assert run(source, output, text_model) == 1
    assert comparable(read(output)) == comparable(read(unkilled))
    assert len(read(output)) == 150
