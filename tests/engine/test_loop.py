import dataclasses
import threading
import time
import weakref

import pytest
from mock_model import answer, make_core, media_inputs, read_by, text_inputs

from tilewright.engine.handle import EngineError
from tilewright.engine.loop import EngineLoop
from tilewright.types import RequestError, SamplingParams

TIMEOUT_S = 60.0


def params(max_tokens=10, **changes):
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **changes)


@pytest.fixture
def loop():
    loop = EngineLoop(make_core(num_drafts=3))
    yield loop
    loop.close(drain=False)


def prompt(number):
    return text_inputs([1 + number % 7, 2 + number % 5, 3, 4, 3, 4])


def test_answers_to_requests_of_many_threads():
    loop = EngineLoop(make_core(num_pages=20, num_drafts=3, max_sequences=6))
    failures = []

    def client(number):
        try:
            for turn in range(4):
                inputs = prompt(number + turn)
                handle = loop.submit(lambda inputs=inputs: inputs, params(n=2))
                deltas = list(handle)
                for completion in handle.result(TIMEOUT_S):
                    assert list(completion.token_ids) == answer(inputs, params())
                for index in range(2):
                    mine = [delta for delta in deltas if delta.index == index]
                    assert [item for delta in mine for item in delta.token_ids] == answer(inputs, params())
                    assert "".join(delta.text for delta in mine) == handle.result()[index].text
                    assert [delta.finish_reason for delta in mine][-1] == "length"
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert not failures and not any(thread.is_alive() for thread in threads)
    stats = loop.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_preparing, stats.num_pages_used) == (0, 0, 0, 0)
    assert stats.num_output_tokens == 8 * 4 * 2 * 10 and stats.output_tokens_per_s > 0
    assert 0 < stats.prefix_hit_rate < 1 and 0 < stats.draft_acceptance < 1
    loop.close()


def test_an_error_in_preparing_is_its_caller_s_alone(loop):
    def broken():
        raise RequestError("picture 2 is not a picture")

    failing = loop.submit(broken, params())
    fine = loop.submit(lambda: prompt(1), params())
    refused = loop.submit(lambda: text_inputs([1] * 1000), params())
    with pytest.raises(RequestError, match="picture 2"):
        failing.result(TIMEOUT_S)
    with pytest.raises(RequestError, match="picture 2"):
        list(failing)
    with pytest.raises(RequestError, match="1000 tokens"):
        refused.result(TIMEOUT_S)
    assert list(fine.result(TIMEOUT_S)[0].token_ids) == answer(prompt(1), params())


def test_a_failed_step_fails_its_requests_and_no_others():
    loop = EngineLoop(make_core(max_sequences=1, max_tokens_per_step=100), threaded=False)
    runner = loop.core.runner
    run = runner.run
    first = loop.submit(lambda: media_inputs([1, (b"k" * 16, [5]), 2]), params())
    second = loop.submit(lambda: prompt(2), params())
    loop.step()

    def broken(step):
        run(step)
        raise ArithmeticError("the kernel said no")

    runner.run = broken
    assert loop.step()
    runner.run = run
    with pytest.raises(EngineError, match="the kernel said no") as caught:
        first.result(TIMEOUT_S)
    assert isinstance(caught.value.__cause__, ArithmeticError)
    while loop.step():
        pass
    assert list(second.result()[0].token_ids) == answer(prompt(2), params())
    # What the failed step wrote is not found by a later request.
    again = loop.submit(lambda: media_inputs([1, (b"k" * 16, [5]), 2]), params())
    while loop.step():
        pass
    assert list(again.result()[0].token_ids) == answer(media_inputs([1, (b"k" * 16, [5]), 2]), params())
    assert loop.stats().num_pages_used == 0 and not loop.core.resources.media.features._pins


def test_a_medium_that_cannot_be_read_any_more_fails_its_request_alone():
    loop = EngineLoop(make_core(max_tokens_per_step=100), threaded=False)
    inputs = media_inputs([1, (b"k" * 16, [5]), 2])

    def gone():
        raise OSError("the file is gone")

    broken = read_by(loop.core, inputs, gone)
    other = media_inputs([3, (b"m" * 16, [4]), 2])
    handles = [loop.submit(lambda ready=ready: ready, params()) for ready in (prompt(2), broken, other)]
    while loop.step():
        pass
    with pytest.raises(EngineError, match="the file is gone"):
        handles[1].result(TIMEOUT_S)
    assert list(handles[0].result()[0].token_ids) == answer(prompt(2), params())
    assert list(handles[2].result()[0].token_ids) == answer(other, params())
    assert loop.stats().num_pages_used == 0 and not loop.core.resources.media.features._pins


def test_a_group_that_cannot_be_filled_gives_its_pages_back():
    loop = EngineLoop(make_core(max_tokens_per_step=100), threaded=False)
    inputs = media_inputs([1, (b"k" * 16, 5), 2])

    def gone():
        raise OSError("the file is gone")

    broken = read_by(loop.core, inputs, gone)
    other = media_inputs([3, (b"m" * 16, 9), 2])
    handles = [loop.submit(lambda ready=ready: ready, params()) for ready in (broken, other)]
    while loop.step():
        pass
    with pytest.raises(EngineError, match="the file is gone"):
        handles[0].result(TIMEOUT_S)
    assert list(handles[1].result()[0].token_ids) == answer(other, params())
    cross_cache = loop.core.resources.media.cross_cache
    assert loop.stats().num_cross_pages_used == 0 and not loop.core.resources.media.features._pins
    assert len(cross_cache._free) == cross_cache.num_pages - 3  # what is still kept of the other


def test_a_step_that_cannot_be_scheduled_fails_all():
    loop = EngineLoop(make_core(), threaded=False)
    handles = [loop.submit(lambda: prompt(1), params()) for _ in range(2)]
    loop.step()
    schedule = loop.core.scheduler.schedule
    loop.core.scheduler.schedule = lambda: 1 / 0
    loop.step()
    loop.core.scheduler.schedule = schedule
    for handle in handles:
        with pytest.raises(EngineError, match="division"):
            handle.result(TIMEOUT_S)
    assert not loop.step() and loop.stats().num_pages_used == 0


def test_abort_in_every_stage(loop):
    release = threading.Event()

    def slow():
        release.wait(TIMEOUT_S)
        return prompt(1)

    preparing, queued = [loop.submit(slow, params(n=2)) for _ in range(2)], loop.submit(slow, params())
    running = loop.submit(lambda: prompt(3), params(max_tokens=None))
    for handle in (*preparing, queued):
        handle.abort()
    release.set()
    for handle in (*preparing, queued):
        completions = handle.result(TIMEOUT_S)
        assert [item.finish_reason for item in completions] == ["abort"] * handle.params.n
        assert {delta.index for delta in handle} == set(range(handle.params.n))
    got = next(iter(running))
    running.abort()
    (completion,) = running.result(TIMEOUT_S)
    assert completion.finish_reason in ("abort", "length") and completion.token_ids[:1] == got.token_ids[:1]
    assert list(completion.token_ids) == answer(prompt(3), params(None), max_context=256)[: len(completion.token_ids)]
    running.abort()  # once more does nothing


def test_subscribers_get_all_of_it_whenever_they_come(loop):
    handle = loop.submit(lambda: prompt(1), params())
    handle.result(TIMEOUT_S)
    for _ in range(2):
        deltas, ends = [], []
        handle.subscribe(deltas.append, ends.append)
        assert deltas == list(handle) and ends == [None]
    ended = threading.Event()
    live, errors = [], []

    def broken(delta):
        raise ValueError("a broken reader")

    release = threading.Event()

    def prepare():
        release.wait(TIMEOUT_S)
        return prompt(2)

    handle = loop.submit(prepare, params())
    handle.subscribe(broken, errors.append)
    handle.subscribe(live.append, lambda error: ended.set())
    release.set()
    assert ended.wait(TIMEOUT_S)
    assert live == list(handle) and errors == [None]


def test_a_reader_that_never_reads_holds_nobody_up(loop):
    unread = loop.submit(lambda: prompt(1), params(100))
    iterator = iter(unread)
    next(iterator)
    assert loop.submit(lambda: prompt(2), params()).result(TIMEOUT_S)
    assert len(unread.result(TIMEOUT_S)[0].token_ids) == 100


def test_text_does_not_wait_behind_what_takes_long():
    loop = EngineLoop(make_core(), num_prepare_threads=1)
    is_told = threading.Event()

    def prepare():
        assert is_told.wait(TIMEOUT_S)
        return prompt(1)

    try:
        slow = [loop.submit(prepare, params()) for _ in range(2)]
        loop.submit(lambda: prompt(1), params(), has_media=False).result(TIMEOUT_S)
        assert not any(handle.is_done for handle in slow)
        is_told.set()
        for handle in slow:
            handle.result(TIMEOUT_S)
    finally:
        is_told.set()
        loop.close()


def test_threads_that_prepare_are_set_up_and_are_not_the_caller_s():
    names = []
    started = threading.local()
    loop = EngineLoop(
        make_core(), num_prepare_threads=1, start_preparing=lambda: setattr(started, "by", threading.get_ident())
    )

    def prepare():
        names.append((started.by, threading.get_ident()))
        return prompt(1)

    for _ in range(2):
        loop.submit(prepare, params()).result(TIMEOUT_S)
    loop.close()
    assert len(set(names)) == 1 and len(set(names[0])) == 1 and names[0][0] != threading.get_ident()


def test_a_finished_request_is_forgotten(loop):
    class Picture:
        pass

    picture = Picture()
    gone = weakref.ref(picture)
    inputs = media_inputs([1, (b"k" * 16, [5]), 2])
    inputs = [dataclasses.replace(inputs, allocation=picture)]
    handle = loop.submit(inputs.pop, params())
    handle.result(TIMEOUT_S)
    loop.core.runner.steps.clear()
    del picture
    loop.submit(lambda: prompt(1), params()).result(TIMEOUT_S)  # the thread has let go of the last step
    loop.core.runner.steps.clear()
    assert gone() is None and handle.result()


def test_result_may_time_out(loop):
    release = threading.Event()
    handle = loop.submit(lambda: release.wait(TIMEOUT_S) and prompt(1), params())
    with pytest.raises(TimeoutError, match="not finished after"):
        handle.result(0.01)
    assert loop.stats().num_preparing == 1
    release.set()
    assert handle.result(TIMEOUT_S)


def test_close_drains():
    loop = EngineLoop(make_core())
    handles = [loop.submit(lambda: prompt(1), params()) for _ in range(5)]
    loop.close()
    assert all(handle.is_done for handle in handles)
    assert [handle.result()[0].finish_reason for handle in handles] == ["length"] * 5
    with pytest.raises(EngineError, match="closed"):
        loop.submit(lambda: prompt(1), params())
    loop.close()


@pytest.mark.parametrize("threaded", [True, False])
def test_close_aborts(threaded):
    loop = EngineLoop(make_core(num_pages=200), threaded=threaded)
    handles = [loop.submit(lambda: prompt(1), params(None)) for _ in range(3)]
    loop.close(drain=False)
    assert {handle.result(TIMEOUT_S)[0].finish_reason for handle in handles} <= {"abort", "length"}
    assert loop.stats().num_pages_used == 0


def test_timings_are_in_order(loop):
    def prepare():
        time.sleep(0.05)
        return prompt(1)

    (completion,) = loop.submit(prepare, params()).result(TIMEOUT_S)
    timings = completion.timings
    assert 0.05 <= timings.queued_s <= timings.first_token_s <= timings.total_s
    assert (completion.num_prompt_tokens, completion.num_cached_tokens) == (6, 0)


@pytest.mark.parametrize("threaded", [True, False])
def test_a_failure_of_all_ends_what_runs_and_refuses_what_comes(threaded):
    loop = EngineLoop(make_core(), threaded=threaded)
    running = loop.submit(lambda: prompt(1), params(100_000))
    loop.fail(EngineError("the weights are damaged"))
    with pytest.raises(EngineError, match="the weights are damaged"):
        running.result(TIMEOUT_S)
    with pytest.raises(EngineError, match="the weights are damaged"):
        loop.submit(lambda: prompt(2), params())
    loop.close(drain=True)
    assert loop.stats().num_running == 0


@pytest.mark.parametrize("stage", ["run", "schedule"])
def test_whoever_holds_an_error_holds_nothing_of_the_step(stage, caplog):
    """Frames of a traceback would: the sequences of the step, and with them pictures of others."""
    loop = EngineLoop(make_core(max_tokens_per_step=100), threaded=False)
    handles = [loop.submit(lambda number=number: prompt(number), params()) for number in range(2)]
    loop.step()
    sequences = [weakref.ref(sequence) for sequence in loop.core.scheduler.running]
    loop.core.runner.steps.clear()

    def broken(*arguments):
        held = list(loop.core.scheduler.running)
        raise ArithmeticError(f"the kernel said no to {len(held)}") from KeyError(held[0].index)

    owner = loop.core.runner if stage == "run" else loop.core.scheduler
    setattr(owner, stage, broken)
    while loop.step():
        pass
    errors = []
    for handle in handles:
        with pytest.raises(EngineError, match="the kernel said no") as caught:
            handle.result(TIMEOUT_S)
        errors.append(caught.value)
    assert all(isinstance(error.__cause__.__cause__, KeyError) for error in errors)
    assert [sequence() for sequence in sequences] == [None, None]
    assert "in broken" in caplog.text  # where it happened is in the log


def test_a_call_runs_on_the_engines_thread(loop):
    handle = loop.submit(lambda: prompt(1), params())
    assert loop.call(lambda: threading.current_thread().name) == "engine"
    with pytest.raises(ZeroDivisionError):
        loop.call(lambda: 1 // 0)
    assert list(handle.result(TIMEOUT_S)[0].token_ids) == answer(prompt(1), params())
    loop.close()
    with pytest.raises(EngineError, match="closed"):
        loop.call(lambda: None)


def test_a_call_without_threads():
    loop = EngineLoop(make_core(), threaded=False)
    assert loop.call(lambda: 7) == 7
    loop.close()
