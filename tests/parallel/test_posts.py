"""Ranks that wait for work: posts, signals, lost ranks and closed groups, in both kinds of group that wait."""

import os
import signal
import threading
import time

import pytest
import torch
from rank_processes import run_ranks, started_ranks
from test_collectives import refuse

from tilewright.ops.plan import Arena, Plan
from tilewright.parallel.group import SingleGroup
from tilewright.parallel.rendezvous import make_group

pytestmark = pytest.mark.alone  # ranks that wait for each other

SOON_S = 15.0  # a tenth of a second on an idle machine; without a signal or an abort it would be a time-out of 60
PATIENCE_S = 60.0  # for a machine with other things to do
GROUPS = {"shared_memory": {}, "gloo": {"host": "127.0.0.1"}}
each_kind = pytest.mark.parametrize("options", GROUPS.values(), ids=GROUPS)


def post_and_compute(rendezvous, rank):
    """Posts far apart, close together and ahead of those who wait, with collectives between."""
    group = make_group(rendezvous, rank)
    sums = []
    for delays_s in ([0.0] * 30, [0.3], [0.0, 0.002] * 5):
        if rank == 0:
            group.post()  # two at once: the work of a round, and its end
        for delay_s in delays_s:
            if rank == 0:
                time.sleep(delay_s)
                group.post()
            else:
                group.wait_for_post(spin_us=500)
            sums.append(group.all_reduce(torch.full((3,), 1.0 + rank + len(sums)))[0].item())
        if rank != 0:
            group.wait_for_post()
    return sums


@each_kind
def test_posts_are_seen_once_each(options):
    expected = [3 * i + 6.0 for i in range(41)]
    assert run_ranks(3, post_and_compute, **options) == [expected] * 3


def wait_longer_than_the_time_out(rendezvous, rank):
    group = make_group(rendezvous, rank)
    group.barrier()
    began_s, used_s = time.monotonic(), time.process_time()
    if rank == 0:
        time.sleep(3.5)
        group.post()
    else:
        group.wait_for_post()
    return time.monotonic() - began_s, time.process_time() - used_s


@each_kind
def test_a_wait_has_no_time_out_and_sleeps(options):
    waited_s, used_s = run_ranks(2, wait_longer_than_the_time_out, timeout_s=3.0, **options)[1]
    assert 3.25 < waited_s < PATIENCE_S
    assert used_s < 0.5


def count_while_waiting(rendezvous, rank, operation):
    """How far another thread counts while this one is in the operation; rank 0 comes late."""
    group = make_group(rendezvous, rank)
    group.barrier()
    if rank == 0:
        time.sleep(1.0)
        group.post() if operation == "wait_for_post" else group.barrier()
        return None
    count, done = 0, threading.Event()

    def work():
        nonlocal count
        while not done.wait(0.001):
            count += 1

    thread = threading.Thread(target=work)
    thread.start()
    getattr(group, operation)()
    done.set()
    thread.join()
    return count


@each_kind
@pytest.mark.parametrize("operation", ["barrier", "wait_for_post"])
def test_other_threads_of_python_go_on(options, operation):
    assert run_ranks(2, count_while_waiting, operation, **options)[1] > 2  # none, if the interpreter's lock was held


class Told(Exception):
    pass


def wait_with_handlers(rendezvous, rank, operation, same_thread, told):
    """Rank 1 is sent two signals in the operation, which rank 0 comes to late. The first handler returns, and the wait
    goes on; the second raises, and ends it. How long each took to run, and what the group says afterwards."""
    group = make_group(rendezvous, rank)
    group.barrier()
    if rank == 0:
        deadline_s = time.monotonic() + PATIENCE_S
        while not told.exists() and time.monotonic() < deadline_s:
            time.sleep(0.01)
        return error_of(group.post if operation == "wait_for_post" else group.barrier)
    took_s, sent_s = [], 0.0

    def handle(number, frame):
        took_s.append(time.monotonic() - sent_s)
        if number == signal.SIGTERM:
            told.touch()
            raise Told

    def send_signals():
        nonlocal sent_s
        target = threading.main_thread() if same_thread else threading.current_thread()
        for number in (signal.SIGUSR1, signal.SIGTERM):
            time.sleep(0.3)
            sent_s = time.monotonic()
            signal.pthread_kill(target.ident, number)
            time.sleep(0.3)

    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, handle)
    threading.Thread(target=send_signals).start()
    with pytest.raises(Told):
        getattr(group, operation)()
    return took_s, error_of(getattr(group, operation))


def error_of(call):
    try:
        call()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return None


@each_kind
@pytest.mark.parametrize("same_thread", [True, False])
def test_handlers_run_while_a_rank_waits_and_end_the_wait(options, same_thread, tmp_path):
    rank_0, (took_s, again) = run_ranks(
        2, wait_with_handlers, "wait_for_post", same_thread, tmp_path / "told", **options
    )
    assert len(took_s) == 2 and max(took_s) < SOON_S
    assert rank_0 is None and again is None, "the group goes on: the post that comes later is seen"


@pytest.mark.parametrize("same_thread", [True, False])
def test_a_collective_that_a_handler_ends_breaks_the_group(same_thread, tmp_path):
    rank_0, (took_s, again) = run_ranks(2, wait_with_handlers, "barrier", same_thread, tmp_path / "told")
    assert len(took_s) == 2 and max(took_s) < SOON_S
    error = "rank 1 was interrupted at operation 2; the group is broken"
    assert again == f"CollectiveError: group 'tp', barrier, operation 3: {error}"
    assert rank_0 == f"CollectiveError: group 'tp', barrier, operation 2: {error.replace(' at operation 2', '')}"


def test_gloo_runs_handlers_in_a_collective_too(tmp_path):
    _, (took_s, again) = run_ranks(2, wait_with_handlers, "barrier", True, tmp_path / "told", **GROUPS["gloo"])
    assert len(took_s) == 2 and max(took_s) < SOON_S
    error = "rank 1 was interrupted at operation 2; the group is broken"
    assert again == f"CollectiveError: group 'tp', barrier, operation 3: {error}"


def wait_without_handlers(rendezvous, rank):
    group = make_group(rendezvous, rank)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored
    group.barrier()
    if rank == 0:
        return "ready"
    group.wait_for_post()


@each_kind
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_a_process_that_waits(options, number):
    with started_ranks(2, wait_without_handlers, **options) as (_, ranks):
        assert ranks[0].result() == "ready"
        time.sleep(0.2)
        os.kill(ranks[1].process.pid, number)
        if number == signal.SIGINT:
            with pytest.raises(AssertionError, match="KeyboardInterrupt"):
                ranks[1].result(PATIENCE_S)
        ranks[1].process.join(PATIENCE_S)
        assert ranks[1].process.exitcode == (-number if number == signal.SIGTERM else 0)


def wait_until_told(rendezvous, rank):
    group = make_group(rendezvous, rank)
    group.barrier()
    if rank == 0:
        return "ready"
    return error_of(group.wait_for_post), time.monotonic(), error_of(group.wait_for_post)


@each_kind
def test_an_abort_wakes_those_who_wait(options):
    with started_ranks(3, wait_until_told, **options) as (host, ranks):
        assert ranks[0].result() == "ready"
        time.sleep(0.3)
        aborted_s = time.monotonic()
        host.abort(0)
        for rank in (1, 2):
            first, ended_s, second = ranks[rank].result(PATIENCE_S)
            assert ended_s - aborted_s < SOON_S
            assert first == "CollectiveError: group 'tp', wait_for_post: rank 0 was lost; the group is broken"
            assert second == first


def close_after_a_post(rendezvous, rank):
    group = make_group(rendezvous, rank)
    group.barrier()
    if rank == 0:
        time.sleep(0.2)
        group.post()
        group.close()
        return error_of(group.post)
    group.wait_for_post()
    return error_of(group.wait_for_post)


@each_kind
def test_those_who_wait_hear_that_rank_0_has_closed_the_group(options):
    rank_0, *others = run_ranks(3, close_after_a_post, **options)
    assert rank_0 == "CollectiveError: group 'tp': post after close"
    assert others == ["CollectiveError: group 'tp', wait_for_post: rank 0 has closed the group"] * 2


def look_before_a_post_and_after_a_close(rendezvous, rank):
    group = make_group(rendezvous, rank)
    group.barrier()
    if rank == 0:
        group.post()
        group.close()
        return None
    look, asked = group._appears, []

    def late(key):
        asked.append(key)
        if len(asked) > 1:
            return look(key)
        group._store.wait(["broken"])  # a look that found nothing, and then this process did not run for a while
        return False

    group._appears = late
    group.wait_for_post()
    return error_of(group.wait_for_post)


def test_a_post_is_seen_though_the_group_was_closed_before_the_next_look():
    told = run_ranks(2, look_before_a_post_and_after_a_close, **GROUPS["gloo"])[1]
    assert told == "CollectiveError: group 'tp', wait_for_post: rank 0 has closed the group"


def close_from_another_thread(rendezvous, rank):
    group = make_group(rendezvous, rank)
    group.barrier()
    if rank == 0:
        return None
    closer = threading.Timer(0.3, group.close)
    closer.start()
    first = error_of(group.wait_for_post)
    closer.join()
    return first, error_of(group.wait_for_post)


def test_a_thread_may_close_the_group_that_another_waits_in():
    assert run_ranks(2, close_from_another_thread)[1] == (
        "CollectiveError: group 'tp', wait_for_post: rank 1 has closed the group",
        "CollectiveError: group 'tp': wait_for_post after close",
    )


def misuse(rendezvous, rank):
    group = make_group(rendezvous, rank)
    wrong = group.wait_for_post if rank == 0 else group.post
    texts = [refuse(wrong)]
    with Plan(Arena()).record():
        texts.append(refuse(group.post if rank == 0 else group.wait_for_post))
    group.barrier()
    return texts


@each_kind
def test_ranks_keep_to_their_parts(options):
    (first, recorded), (second, _) = run_ranks(2, misuse, **options)
    assert first == "wait_for_post: this is rank 0, which posts"
    assert second == "post: this is rank 1, only rank 0 posts"
    assert recorded.endswith("cannot be part of a recorded plan")


def test_a_single_rank_posts_to_nobody():
    SingleGroup().post()
    assert refuse(SingleGroup().wait_for_post) == "wait_for_post: this is rank 0, which posts"
