"""What one answer's events come to, and what many samples do; clocks are virtual."""

import asyncio
import contextlib
import json
import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from odd_server import DONE, event, finish, token, usage

from tilewright.bench.serve import run
from tilewright.bench.serve.run import ClosedLoop, OpenLoop, arrivals
from tilewright.bench.serve.sample import MeasuredAnswer, RequestFailure, Sample, StreamError, error_message
from tilewright.bench.serve.summary import Distribution, is_good, parse_goodput, percentile, summarise
from tilewright.bench.serve.workload import WorkloadRequest
from tilewright.types import RequestError


def data(event: bytes) -> bytes:
    return event.removeprefix(b"data: ").removesuffix(b"\n\n")


def sample_of(*timed: tuple[float, bytes], sent_s: float = 10.0, end_s: float = 20.0) -> Sample:
    answer = MeasuredAnswer()
    for at_s, one in timed:
        answer.add(data(one), at_s)
    answer.end()
    return answer.sample(WorkloadRequest(3, b"", 5), sent_s, end_s, None)


def test_one_answer():
    role = event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
    counted = usage(7, 5, prompt_tokens_details={"cached_tokens": 4})
    sample = sample_of(
        (11, role), (12, token("a")), (14, token("b")), (14, token("")), (15, token("c")), (16, finish()), (17, counted)
    )
    assert (sample.number, sample.sent_s, sample.first_token_s, sample.total_s) == (3, 10, 2, 10)
    assert sample.gaps_s == (2, 1) and sample.num_chunks == 3
    assert (sample.prompt_tokens, sample.cached_tokens, sample.output_tokens) == (7, 4, 5)
    assert not sample.is_counted_by_chunks and sample.finish_reasons == ("length",)
    assert sample.token_s == (10 - 2) / 4


def test_without_usage_chunks_are_counted():
    sample = sample_of((11, token("a")), (12, token("b")), (12, DONE))
    assert (sample.output_tokens, sample.is_counted_by_chunks, sample.prompt_tokens) == (2, True, None)


@pytest.mark.parametrize(
    "delta",
    [
        {"reasoning_content": "hm"},
        {"reasoning": "hm"},
        {"content": None, "tool_calls": [{"index": 0, "function": {"name": "f", "arguments": ""}}]},
    ],
)
def test_reasoning_and_calls_are_tokens_too(delta):
    sample = sample_of((12, event(choices=[{"index": 0, "delta": delta}])), (13, finish(reason="stop")))
    assert sample.first_token_s == 2 and sample.num_chunks == 1


def test_gaps_are_within_a_choice():
    sample = sample_of((11, token("a")), (12, token("x", 1)), (14, token("b")), (18, token("y", 1)), (19, DONE))
    assert sample.first_token_s == 1 and sample.gaps_s == (3, 6) and sample.num_choices == 2
    assert sample.token_s == 9 / 1


def test_usage_in_every_chunk():
    chunks = [event(choices=[{"index": 0, "text": "a"}], usage={"completion_tokens": n}) for n in (1, 2, 3)]
    assert sample_of(*((11, chunk) for chunk in chunks), (12, DONE)).output_tokens == 3


def test_an_answer_without_a_token():
    sample = sample_of((11, finish(reason="stop")), (11, usage(3, 0)))
    assert sample.first_token_s is None and sample.token_s is None and sample.output_tokens == 0


@pytest.mark.parametrize(
    "event,kind,message",
    [
        (b"{not json", "malformed", "an event is '{not json'"),
        (b'{"error": {"message": "out of pages", "code": 500}}', "error in stream", "out of pages"),
        (b'{"object": "error", "message": "out of pages"}', "error in stream", "out of pages"),
        (b"[1]", "error in stream", "[1]"),
        (b'{"choices": [null]}', "malformed", "expected choices like OpenAI's"),
        (b'{"choices": [{"index": [1], "delta": {}}]}', "malformed", "expected choices"),
        (b'{"choices": [{"delta": "text"}]}', "malformed", "expected choices"),
    ],
)
def test_streams_that_go_wrong(event, kind, message):
    with pytest.raises(StreamError) as raised:
        MeasuredAnswer().add(event, 1.0)
    assert raised.value.kind == kind and message in str(raised.value)


def json_like(leaves):
    names = st.sampled_from(["choices", "index", "delta", "text", "content", "finish_reason", "usage", "error"])
    return st.lists(leaves, max_size=3) | st.dictionaries(names | st.just("completion_tokens"), leaves, max_size=4)


@given(st.recursive(st.none() | st.booleans() | st.integers(-2, 2) | st.text(max_size=2), json_like, max_leaves=12))
def test_whatever_a_server_sends_is_an_answer_or_a_failure(value):
    answer = MeasuredAnswer()
    with contextlib.suppress(StreamError):
        answer.add(json.dumps(value).encode(), 1.0)
    sample = answer.sample(WorkloadRequest(0, b"", 1), 0.0, 2.0, None)
    assert summarise([sample]).num_answered == 1


def test_a_stream_that_just_ends():
    answer = MeasuredAnswer()
    answer.add(data(token("a")), 1.0)
    with pytest.raises(StreamError, match="without a finish_reason and without"):
        answer.end()


@pytest.mark.parametrize(
    "body,message",
    [
        (b'{"error": {"message": "no such model", "type": "x"}}', "no such model"),
        (b'{"error": "no such model"}', "no such model"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b'{"detail": [{"loc": ["body"]}]}', '[{"loc": ["body"]}]'),
        (b'{"object": "error", "message": "no such model"}', "no such model"),
        (b'{"code": 3}', '{"code": 3}'),
        (b"<html>\n  Bad  Gateway</html>", "<html> Bad Gateway</html>"),
        (b"\xff", "\ufffd"),
        (b"a" * 1000, "a" * 297 + "..."),
        (b"", ""),
    ],
)
def test_the_servers_own_words(body, message):
    assert error_message(body) == message


numbers = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50)


@given(numbers, st.floats(0, 100))
def test_percentiles_are_numpys(values, percent):
    assert percentile(sorted(values), percent) == pytest.approx(np.percentile(values, percent), rel=1e-9, abs=1e-6)


@given(numbers)
def test_distributions(values):
    distribution = Distribution.of(values)
    expected = [np.mean(values), *np.percentile(values, [50, 90, 95, 99]), max(values)]
    found = [
        distribution.mean,
        distribution.p50,
        distribution.p90,
        distribution.p95,
        distribution.p99,
        distribution.max,
    ]
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-6) and distribution.count == len(values)
    assert Distribution.of([]) is None


def made(number: int, **fields) -> Sample:
    times = {"sent_s": number, "total_s": 2.0, "first_token_s": 0.5, "gaps_s": (0.5, 0.5, 0.5)}
    counts = {"wanted_tokens": 4, "num_chunks": 4, "output_tokens": 4, "prompt_tokens": 10}
    return Sample(number, **times | counts | fields)


def failed(number: int, kind: str, message: str) -> Sample:
    return made(number, output_tokens=2, failure=RequestFailure(kind, message))


def test_a_run_by_hand():
    late = made(3, total_s=7.0, first_token_s=4.0, gaps_s=(1.0,), output_tokens=2, is_counted_by_chunks=True)
    samples = [made(0), made(1), failed(2, "HTTP 503", "busy"), late, failed(4, "HTTP 503", "busy")]
    summary = summarise(samples, {"ttft": 1.0})
    assert (summary.num_answered, summary.num_failed, summary.num_shorter, summary.num_counted_by_chunks) == (
        3,
        2,
        1,
        1,
    )
    assert summary.wall_s == 10  # from 0 to the late one's end
    assert (summary.requests_per_s, summary.output_tokens_per_s, summary.total_tokens_per_s) == (0.3, 1.0, 4.0)
    assert summary.mean_concurrency == pytest.approx((4 * 2 + 7) / 10)
    assert summary.distributions["ttft"].mean == pytest.approx(5 / 3) and summary.distributions["ttft"].p50 == 0.5
    assert summary.distributions["itl"].count == 7 and "cached_tokens" not in summary.distributions
    assert summary.failures == {"HTTP 503": {"busy": 2}}
    assert (summary.goodput.share, summary.goodput.requests_per_s) == (0.4, 0.2)


def test_runs_of_which_little_is_known():
    summary = summarise([made(0, prompt_tokens=None), made(1)])
    assert summary.total_tokens_per_s is None and summary.goodput is None
    summary = summarise([failed(0, "connect", "refused")])
    assert summary.distributions == {} and summary.requests_per_s == 0 and math.isfinite(summary.wall_s)


def test_goodput():
    assert parse_goodput("ttft:2.0, itl:.1") == {"ttft": 2.0, "itl": 0.1}
    for text in ("", "ttft", "ttft:-1", "speed:3", "ttft=2"):
        with pytest.raises(RequestError, match=r"expected such as ttft:2\.0"):
            parse_goodput(text)
    assert is_good(made(0), {"ttft": 0.5, "itl": 0.5, "tpot": 0.5, "e2e": 2.0})
    for name, limit_s in (("ttft", 0.4), ("itl", 0.4), ("tpot", 0.4), ("e2e", 1.9)):
        assert not is_good(made(0), {name: limit_s})
    assert not is_good(made(0, gaps_s=(0.1, 0.1, 1.3)), {"itl": 1.0})  # the longest counts
    assert not is_good(failed(0, "a", "b"), {"ttft": 9.0})
    silent = made(0, first_token_s=None, gaps_s=(), output_tokens=0)
    assert not is_good(silent, {"ttft": 9.0}) and is_good(silent, {"itl": 0.1, "tpot": 0.1})


class VirtualTime:
    """A clock that stands still until all that can be done is done; then it is the first sleeper's time to wake up."""

    def __init__(self):
        self.now_s = 100.0
        self._sleepers: list[tuple[float, asyncio.Future]] = []

    def __call__(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        if not self._sleepers:
            loop.call_later(0.001, self._wake, loop)
        self._sleepers.append((self.now_s + seconds, loop.create_future()))
        await self._sleepers[-1][1]

    def _wake(self, loop: asyncio.AbstractEventLoop) -> None:
        first = min(self._sleepers, key=lambda sleeper: sleeper[0])
        self._sleepers.remove(first)
        self.now_s = max(self.now_s, first[0])
        first[1].set_result(None)
        if self._sleepers:
            loop.call_later(0.001, self._wake, loop)


def sent(pace, count: int, monkeypatch, answer_s=lambda number: 1.0) -> tuple[list[float], int, list[Sample]]:
    """When each request was sent by the virtual clock, how many were under way at most, and the samples."""
    time = VirtualTime()
    times_s: list[float] = []
    under_way = most = 0

    async def send_one(request):
        nonlocal under_way, most
        times_s.append(time() - 100.0)
        under_way += 1
        most = max(most, under_way)
        await time.sleep(answer_s(request.number))
        under_way -= 1
        return made(request.number)

    async def main():
        requests = [WorkloadRequest(number, b"", 4) for number in range(count)]
        return await pace.send(requests, send_one, time)

    with monkeypatch.context() as patch:
        patch.setattr(run.asyncio, "sleep", time.sleep)
        samples = asyncio.run(main())
    return times_s, most, samples


def test_closed_loop(monkeypatch):
    times_s, most, samples = sent(ClosedLoop(3), 10, monkeypatch)
    assert most == 3 and sorted(sample.number for sample in samples) == list(range(10))
    assert times_s == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3]
    assert sent(ClosedLoop(8), 2, monkeypatch)[1] == 2


def test_closed_loop_by_time(monkeypatch):
    times_s, _, samples = sent(ClosedLoop(2, seconds=2.5), 100, monkeypatch)
    assert times_s == [0, 0, 1, 1, 2, 2] and len(samples) == 6  # those under way are waited for


def test_open_loop_does_not_wait_for_answers(monkeypatch):
    times_s, most, samples = sent(OpenLoop((0.0, 1.0, 1.5, 4.0)), 4, monkeypatch, lambda number: 10.0)
    assert times_s == [0, 1, 1.5, 4] and most == 4 and len(samples) == 4


@given(st.floats(0.1, 50), st.floats(0.2, 5), st.integers(0, 99))
def test_arrivals(rate, burstiness, seed):
    times_s = arrivals(rate, burstiness, seed, count=200)
    assert len(times_s) == 200 and list(times_s) == sorted(times_s) and times_s[0] == 0
    assert times_s == arrivals(rate, burstiness, seed, count=200)
    assert times_s != arrivals(rate, burstiness, seed + 1, count=200)
    within = arrivals(rate, burstiness, seed, seconds=times_s[100])
    assert within == tuple(at_s for at_s in times_s if at_s < times_s[100])


def test_arrivals_come_at_the_rate_and_in_bursts():
    def gaps(burstiness: float) -> np.ndarray:
        return np.diff(arrivals(4.0, burstiness, 0, count=20000))

    for burstiness in (0.25, 1.0, 4.0):
        assert statistics.mean(gaps(burstiness)) == pytest.approx(0.25, rel=0.06)
        # A gamma distribution's spread is its mean over the root of its shape.
        assert statistics.stdev(gaps(burstiness)) == pytest.approx(0.25 / math.sqrt(burstiness), rel=0.06)
