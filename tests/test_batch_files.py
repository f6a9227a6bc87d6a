"""The files of a batch: reading, writing and repairing them."""

import asyncio
import errno
import json
import os
import stat
import threading
from pathlib import Path

import pytest
from fuzzing import num_cases
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tilewright.batch import requests as requests_module
from tilewright.batch.requests import BatchRequest, IdIndex, PathGate, RequestFile, parse
from tilewright.batch.results import ResultFile, Results, record
from tilewright.batch.work import BatchWorkers, Totals
from tilewright.server.link.backend import AnswerDelta, Ended, ModelInfo, Started
from tilewright.types import RequestError, Timings

URLS = ["/v1/chat/completions", "/v1/completions"]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


def line(custom_id, **body):
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": URLS[1], "body": body})


# Ids of the input.


@settings(max_examples=num_cases(40))
@given(st.lists(st.text(max_size=3), unique=True, max_size=40), st.text(max_size=3))
def test_index_finds_what_was_added(ids, other):
    index = IdIndex()
    for one in ids:
        index.add(one)
    assert index.sort() is None
    assert [index.find(one) for one in ids] == list(range(len(ids)))
    assert (index.find(other) is not None) == (other in ids)


@given(st.lists(st.sampled_from(["a", "b", "\ud800", "é"]), min_size=5, max_size=9))
def test_index_finds_twins(ids):
    index = IdIndex()
    for one in ids:
        index.add(one)
    first, second = index.sort()
    assert first < second and ids[first] == ids[second]


# Lines of the input.


@given(st.binary() | st.text().map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes_are_a_request_or_a_clear_no(data):
    try:
        parse(data, URLS)
    except RequestError as error:
        assert str(error)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "custom_id": st.text() | json_values,
            "method": st.just("POST") | json_values,
            "url": st.sampled_from(URLS) | json_values,
            "body": json_values,
        },
    )
)
def test_any_object_is_a_request_or_a_clear_no(fields):
    try:
        request = parse(json.dumps(fields).encode(), URLS)
    except RequestError:
        return
    assert (request.custom_id, request.url, request.body) == (fields["custom_id"], fields["url"], fields["body"])


@given(st.dictionaries(st.text(), json_values, max_size=4), st.dictionaries(st.text(), json_values, max_size=4))
def test_the_same_request_has_the_same_id_however_it_is_written(body, other):
    written = parse(line("a", **{"prompt": "x"}).replace('{"prompt": "x"}', json.dumps(body)).encode(), URLS)
    fields = {"body": dict(reversed(body.items())), "url": URLS[1], "method": "POST", "custom_id": "a"}
    assert parse(json.dumps(fields, ensure_ascii=True, indent=3).encode(), URLS).id == written.id
    changed = parse(json.dumps({**fields, "body": other}).encode(), URLS)
    assert (changed.id == written.id) == (json.dumps(other, sort_keys=True) == json.dumps(body, sort_keys=True))


def request_file(path, text, max_line_bytes=1000):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return RequestFile(path, URLS, max_line_bytes)


def test_byte_order_marks_blank_lines_and_windows_line_ends(tmp_path):
    text = f"\ufeff{line('a')}\r\n\r\n  \n{line('b')}\r\n{line('c')}"
    with request_file(tmp_path / "in", text) as requests:
        assert [request.custom_id for request in requests.left()] == ["a", "b", "c"]


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_the_longest_line(tmp_path, end):
    text = line("a", prompt="x" * 100)
    with request_file(tmp_path / "in", text + end, len(text)) as requests:
        assert len(list(requests.left())) == 1
    with pytest.raises(RequestError, match=f"line 1: more than {len(text) - 1} bytes; --max-line"):
        request_file(tmp_path / "in", text + end, len(text) - 1)


def test_a_huge_line_is_not_read_whole(tmp_path, monkeypatch):
    parsed = []
    monkeypatch.setattr(requests_module, "parse", lambda line, urls: parsed.append(line) or parse(line, urls))
    with pytest.raises(RequestError, match="line 2: more than 1000 bytes"):
        request_file(tmp_path / "in", f"{line('a')}\n{line('b', prompt='x' * 10**7)}\n")
    assert len(parsed) == 1


def test_lines_are_read_when_they_are_wanted(tmp_path, monkeypatch):
    parsed = []
    with request_file(tmp_path / "in", "\n".join(line(str(number)) for number in range(50))) as requests:
        monkeypatch.setattr(requests_module, "parse", lambda line, urls: parsed.append(line) or parse(line, urls))
        left = requests.left()
        assert [next(left).custom_id for _ in range(3)] == ["0", "1", "2"]
    assert len(parsed) == 3


def test_too_many_models(tmp_path):
    with pytest.raises(RequestError, match="line 101: model is '100'"):
        request_file(tmp_path / "in", "\n".join(line(str(number), model=str(number)) for number in range(101)))


# Lines of the output.


def result(custom_id, status=200, text="fine"):
    body = {"model": "m", "text": text} if status == 200 else {"error": {"message": text}}
    return record(custom_id, f"batch_req_{custom_id}", "req_1", status, body)


def write_results(path, lines):
    path.unlink(missing_ok=True)
    file = ResultFile(path)
    for one in lines:
        file.append(one)
    file.close()
    return path.read_bytes()


def read_results(path):
    file = ResultFile(path)
    entries = list(file.entries())
    file.close()
    return entries


awkward_text = st.text() | st.text(alphabet="\x85\u2028\u2029\x00\x1c\n\ud800é", max_size=5)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(awkward_text, min_size=1, max_size=4), st.data())
def test_cut_anywhere_whole_lines_stay(tmp_path, texts, data):
    path = tmp_path / "out"
    whole = write_results(path, [result(str(number), text=text) for number, text in enumerate(texts)])
    assert len(whole.decode().splitlines()) == len(texts)
    size_bytes = data.draw(st.integers(0, len(whole)))
    num_zeros = data.draw(st.sampled_from([0, 0, 1, 5000]))
    path.write_bytes(whole[:size_bytes] + b"\0" * num_zeros)
    num_whole = whole[:size_bytes].count(b"\n")
    assert [entry.custom_id for entry in read_results(path)] == [str(number) for number in range(num_whole)]
    assert path.read_bytes() == whole[: sum(map(len, whole.splitlines(keepends=True)[:num_whole]))]
    file = ResultFile(path)
    file.append(result("more"))
    file.close()
    assert len(read_results(path)) == num_whole + 1


def test_what_is_written_is_read_back(tmp_path):
    write_results(tmp_path / "out", [result("a", text="\ud800"), result("b", 400)])
    first, second = read_results(tmp_path / "out")
    assert (first.custom_id, first.id, first.status, first.model) == ("a", "batch_req_a", 200, "m")
    assert (second.status, second.model, second.line_number) == (400, None, 2)
    lines = [json.loads(one) for one in (tmp_path / "out").read_text().splitlines()]
    assert lines[0]["response"]["body"]["text"] == "\ud800"


def test_lines_that_a_power_cut_blanked_are_taken_out(tmp_path):
    path = tmp_path / "out"
    lines = write_results(path, [result(name) for name in "abcd"]).splitlines(keepends=True)
    path.write_bytes(
        lines[0] + lines[1][:20] + b"\0" * (len(lines[1]) + len(lines[2]) - 30) + lines[2][-10:] + lines[3]
    )
    with Results(path, None) as results:
        assert [entry.custom_id for _, entry in results.entries(drops_failed=False)] == ["a", "d"]
    assert path.read_bytes() == lines[0] + lines[3]


def test_failures_are_taken_out_of_both_files(tmp_path):
    answers, failures = tmp_path / "out", tmp_path / "errors"
    write_results(answers, [result("a", 500), result("b"), result("c", 400), result("d")])
    write_results(failures, [result("e", 400)])
    answers.chmod(0o640)
    with Results(answers, failures) as results:
        assert [entry.custom_id for _, entry in results.entries(drops_failed=True)] == ["b", "d"]
        with pytest.raises(RequestError, match="another batch"):
            ResultFile(answers)  # what replaced it is locked as well
        results.append(result("a"))
        results.append(result("c", 400))
    assert [entry.custom_id for entry in read_results(answers)] == ["b", "d", "a"]
    assert [entry.custom_id for entry in read_results(failures)] == ["c"]
    assert stat.S_IMODE(answers.stat().st_mode) == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == ["errors", "out"]


def test_a_full_disk_leaves_whole_lines(tmp_path, monkeypatch):
    path = tmp_path / "out"
    file = ResultFile(path)
    file.append(result("a"))
    before, write = path.read_bytes(), os.write

    def write_some(descriptor, data):
        if len(data) < 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[: len(data) // 2])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write_some)
        with pytest.raises(RequestError, match="cannot be written: No space left"):
            file.append(result("b"))
    assert path.read_bytes() == before
    file.append(result("c"))  # another worker's, before all have stopped
    file.close()
    assert [entry.custom_id for entry in read_results(path)] == ["a", "c"]


def test_a_lock_on_a_file_that_was_replaced_is_no_lock(tmp_path, monkeypatch):
    """Another process opens the file, and gets its lock only when the first has put a copy in its place."""
    path = tmp_path / "out"
    write_results(path, [result("a", 400), result("b")])
    first = Results(path, None)
    open_file, is_replaced = os.open, threading.Event()

    def open_then_replace(name, *arguments):
        descriptor = open_file(name, *arguments)
        if name == path and not is_replaced.is_set():
            is_replaced.set()
            list(first.entries(drops_failed=True))
        return descriptor

    monkeypatch.setattr(os, "open", open_then_replace)
    with pytest.raises(RequestError, match="another batch"):
        ResultFile(path)
    first.__exit__()


def test_it_is_synced_now_and_then(tmp_path, monkeypatch):
    synced = []
    file = ResultFile(tmp_path / "out")
    monkeypatch.setattr(os, "fsync", synced.append)
    file.append(result("a"))
    assert not synced
    file._synced_s -= 6
    file.append(result("b"))
    file.append(result("c"))
    assert len(synced) == 1
    file.close()


# Media by path.


class KeepingGate:
    async def resolve(self, messages, hold):
        return messages


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"type": "image_url", "image_url": {"url": "a b/c.png"}}, "file:///in/a%20b/c.png"),
        ({"type": "image_url", "image_url": "c.png"}, "file:///in/c.png"),
        ({"image_url": {"url": "c.png"}}, "file:///in/c.png"),
        ({"type": "video", "video": "/clips/é.mp4", "fps": 2}, "file:///clips/%C3%A9.mp4"),
        ({"type": "image_url", "image_url": {"url": "#1?.png"}}, "file:///in/%231%3F.png"),
    ],
)
def test_paths_become_urls(part, expected):
    message = {"role": "user", "content": [{"type": "text", "text": "c.png"}, part]}
    (resolved,) = asyncio.run(PathGate(KeepingGate(), Path("/in")).resolve([message], hold=print))
    kind = "video" if "video" in part else "image"
    rest = {"fps": 2} if "fps" in part else {}
    assert resolved["content"] == [
        message["content"][0],
        {**rest, "type": f"{kind}_url", f"{kind}_url": {"url": expected}},
    ]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "https://example.org/c.png"}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "image_url", "image_url": {"url": "file:///c.png"}},
        {"type": "image_url", "image_url": {"url": "A" * 10_000}},  # bytes that lack their "data:"
        {"type": "image_url", "image_url": {"url": ""}},
        {"type": "image_url", "image_url": None},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "text", "text": "c.png", "image": "c.png"},
        "c.png",
    ],
)
def test_what_is_no_path_is_left_as_it_is(part):
    message = {"role": "user", "content": [part]}
    assert asyncio.run(PathGate(KeepingGate(), Path("/in")).resolve([message], hold=print)) == [message]


# Work.


class SlowBackend:
    """Answers each request a moment later, and knows how many it had at once."""

    num_restarts = 0
    model = ModelInfo("m", 100, 4, None)

    def __init__(self):
        self.running = set()
        self.most_running = 0

    def submit(self, request, listener):
        request = object()
        self.running.add(request)
        self.most_running = max(self.most_running, len(self.running))

        def answer():
            self.running.discard(request)
            for event in (Started(3, False), AnswerDelta(0, "fine", 2, "stop"), Ended(3, 0, 2, Timings(0, 0, 0))):
                listener(event)

        timer = asyncio.get_running_loop().call_later(0.001, answer)
        return lambda: (timer.cancel(), self.running.discard(request))


def wanted(number):
    return BatchRequest(
        str(number), URLS[1], {"prompt": "x", **({"temperature": 3} if number % 5 == 1 else {})}, number
    )


def test_as_many_as_wanted_are_under_way():
    async def main():
        backend, totals, lines = SlowBackend(), Totals(), []
        workers = BatchWorkers(backend, backend.model, KeepingGate(), lines.append, totals)
        await workers.work((wanted(number) for number in range(40)), 7)
        return backend, totals, lines

    backend, totals, lines = asyncio.run(main())
    assert backend.most_running == 7
    assert (totals.num_answered, totals.num_failed) == (32, 8)
    assert (totals.num_prompt_tokens, totals.num_output_tokens) == (32 * 3, 32 * 2)
    assert sorted(int(one["custom_id"]) for one in lines) == list(range(40))


def test_where_it_cannot_write_it_stops_and_frees_what_is_under_way():
    def fail(line):
        if line["custom_id"] == "12":
            raise RequestError("the disk is full")

    async def main():
        backend, totals = SlowBackend(), Totals()
        workers = BatchWorkers(backend, backend.model, KeepingGate(), fail, totals)
        with pytest.raises(RequestError, match="the disk is full"):
            await workers.work((wanted(number) for number in range(1000)), 7)
        return backend, totals, asyncio.all_tasks()

    backend, totals, tasks = asyncio.run(main())
    assert totals.num_done < 40
    assert not backend.running and len(tasks) == 1


def test_requests_that_fail_at_once_let_others_run():
    async def main():
        backend, seen = SlowBackend(), []
        workers = BatchWorkers(
            backend, backend.model, KeepingGate(), lambda line: seen.append(asyncio.current_task()), Totals()
        )
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(workers.work((wanted(1) for _ in range(10**5)), 2), 0.02)
        return seen

    assert len(set(asyncio.run(main()))) == 2
