"""Workers are started, watched and ended, and nothing of them is left."""

import contextlib
import json
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tilewright.host.binding import RankBinding
from tilewright.process import child
from tilewright.process.frames import Channel
from tilewright.process.workers import Workers, WorkerSpec

TIMEOUT_S = 60.0  # of what takes a tenth of a second on a machine with nothing else to do
SOURCES = Path(child.__file__).parents[2]


def specs(*ranks, payload=None, fds=()):
    return [WorkerSpec(rank, payload or {}, fds) for rank in ranks]


@contextlib.contextmanager
def pipe():
    """The reading end as a file of lines, and the writing end, for a worker."""
    reading, writing = os.pipe()
    with open(reading, "rb", buffering=0) as file:
        try:
            yield file, writing
        finally:
            os.close(writing)


def next_line(file):
    assert select.select([file], [], [], TIMEOUT_S)[0], "no line in time"
    return file.readline().decode()


def is_alive(pid):
    """Whether a process runs; one that is dead and that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def children():
    """The processes that this one has started and not waited for."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if int(stat.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.add(int(stat.parent.name))
    return found


def wait_for(condition):
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s, "not in time"
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Neither files nor threads nor processes of ours."""
    fds, processes = set(os.listdir("/proc/self/fd")), children()
    yield
    assert set(os.listdir("/proc/self/fd")) == fds
    assert not [thread for thread in threading.enumerate() if thread.name == "workers"]
    assert children() == processes


def test_a_worker_gets_its_rank_payload_files_and_cpus():
    cpu = max(os.sched_getaffinity(0))
    payload = {"text": "ü|\n", "nested": {"list": [1, 2.5, None]}, "long": "x" * 200_000}
    binding = RankBinding(1, (cpu,), (), 1)
    with pipe() as (told, end), Workers("worker_entries:tell", [WorkerSpec(1, payload, (end,), binding)], 2) as workers:
        seen = json.loads(next_line(told))
        assert (seen["rank"], seen["size"], seen["payload"]) == (1, 2, payload)
        assert seen["cpus"] == [cpu]
        assert seen["pid"] == seen["session"] == workers.pids[1]
        assert seen["stdin"] == "" and seen["ignores_interrupt"]
        assert not seen["has_torch"], "it would have counted the CPUs before they were claimed"
        # Standard ones, its own, the channel, and that of the folder that it lists: nothing else of the parent's.
        assert len(seen["open_files"]) == 6 and end in seen["open_files"]
    assert not is_alive(seen["pid"])


def test_a_pinned_parent_does_not_pin_its_workers():
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("one CPU")
    os.sched_setaffinity(0, {min(before)})
    try:
        with pipe() as (told, end), Workers("worker_entries:tell", specs(1, fds=(end,)), 2):
            assert set(json.loads(next_line(told))["cpus"]) == before
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize(
    ("how", "reason", "last_line"),
    [
        ("signal", "died of SIGSEGV", None),
        ("exception", "ended with status 1", "ValueError: no such tile"),
        ("thread", "ended with status 70", "KeyError: 'no such tile'"),
        ("exit", "ended with status 3", "leaving"),
        ("return", "ended with status 0", None),
    ],
)
def test_a_death_is_told_once_and_ends_the_others(how, reason, last_line):
    deaths, started = queue.Queue(), threading.Event()

    def note(*death):
        assert started.wait(TIMEOUT_S)  # a worker may die before all are there
        deaths.put((*death, [is_alive(workers.pids[rank]) for rank in (1, 3)]))

    entry = "worker_entries:die_if_told"
    workers = Workers(entry, specs(1, 2, 3, payload={"rank": 2, "how": how}), 4, on_death=note)
    started.set()
    try:
        rank, told, others_live = deaths.get(timeout=TIMEOUT_S)
        assert rank == 2 and others_live == [True, True]
        assert told.splitlines()[0] == reason + ("" if last_line is None else "; its last output:")
        assert last_line is None or told.splitlines()[-1] == last_line
        assert workers.wait(TIMEOUT_S)
        assert not any(map(is_alive, workers.pids.values()))
        assert deaths.empty()
    finally:
        workers.close()


def test_a_worker_that_was_killed_by_someone_else():
    deaths = queue.Queue()
    with pipe() as (told, end):
        workers = Workers("worker_entries:tell", specs(1, fds=(end,)), 2, on_death=lambda *death: deaths.put(death))
        next_line(told)
        os.kill(workers.pids[1], signal.SIGKILL)
        assert deaths.get(timeout=TIMEOUT_S) == (1, "died of SIGKILL")
        workers.close()


def test_a_death_is_seen_though_a_grandchild_has_the_files():
    deaths = queue.Queue()
    entry = "worker_entries:leave_a_grandchild"
    with pipe() as (told, end):
        workers = Workers(entry, specs(1, fds=(end,)), 2, on_death=lambda *death: deaths.put(death))
        grandchild = int(next_line(told))
        try:
            assert deaths.get(timeout=TIMEOUT_S) == (1, "died of SIGKILL")
        finally:
            os.kill(grandchild, signal.SIGKILL)
            workers.close()


def test_a_failing_listener_does_not_keep_workers_alive(caplog):
    payload = {"rank": 1, "how": "exit"}

    def fail(rank, reason):
        raise RuntimeError("the listener's fault")

    with Workers("worker_entries:die_if_told", specs(1, 2, payload=payload), 3, on_death=fail) as workers:
        assert workers.wait(TIMEOUT_S)
    assert "on_death for rank 1 failed" in caplog.text


def test_close_within_the_listener():
    closed = threading.Event()

    def close(rank, reason):
        workers.close()
        closed.set()

    payload = {"rank": 1, "how": "exit"}
    workers = Workers("worker_entries:die_if_told", specs(1, 2, payload=payload), 3, on_death=close)
    assert closed.wait(TIMEOUT_S) and workers.wait(TIMEOUT_S)
    workers.close()


def test_close_is_no_death_and_can_be_repeated():
    deaths = []
    workers = Workers("worker_entries:wait", specs(1, 2), 3, on_death=lambda *death: deaths.append(death))
    closers = [threading.Thread(target=workers.close) for _ in range(3)]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join()
    workers.close()
    assert not deaths and not any(map(is_alive, workers.pids.values()))


def test_a_worker_that_hangs_at_close_is_killed():
    with pipe() as (told, end):
        workers = Workers("worker_entries:hang", specs(1, fds=(end,)), 2, grace_s=0.2)
        next_line(told)
        start_s = time.monotonic()
        workers.close()
        assert 0.2 <= time.monotonic() - start_s < TIMEOUT_S
        assert not is_alive(workers.pids[1])


def test_two_at_once():
    deaths = queue.Queue()
    payload = {"rank": 1, "how": "exit"}
    with pipe() as (told, end), Workers("worker_entries:tell", specs(1, fds=(end,)), 2) as steady:
        with Workers("worker_entries:die_if_told", specs(1, payload=payload), 2, on_death=lambda *d: deaths.put(d)):
            assert deaths.get(timeout=TIMEOUT_S)[0] == 1
        next_line(told)
        assert is_alive(steady.pids[1])


def test_workers_that_may_finish(capfd):
    with Workers("worker_entries:finish", specs(1, 2), 3, may_finish=True, on_death=pytest.fail) as workers:
        assert workers.wait(TIMEOUT_S)
    assert sorted(capfd.readouterr().err.splitlines()) == ["rank 1: done", "rank 2: done"]


def test_what_a_worker_writes_is_passed_on(capfd):
    with Workers("worker_entries:print_much", specs(7), 8, may_finish=True) as workers:
        assert workers.wait(TIMEOUT_S)
    captured = capfd.readouterr()
    lines = captured.err.splitlines()
    assert captured.out == "" and lines[:2000] == [f"rank 7: line {line} " + "x" * 100 for line in range(2000)]
    assert "".join(line.removeprefix("rank 7: ") for line in lines[2000:]) == "y" * 20000


@pytest.mark.parametrize("level", ["WARNING", "INFO"])
def test_logs_of_workers_are_warnings_unless_more_is_asked_for(capfd, level):
    with Workers("worker_entries:log", specs(1), 2, may_finish=True, log_level=level) as workers:
        assert workers.wait(TIMEOUT_S)
    expected = [
        "rank 1: WARNING tilewright.test: warning of tilewright.test",
        "rank 1: WARNING other: warning of other",
    ]
    if level == "INFO":
        expected.insert(0, "rank 1: INFO tilewright.test: info of tilewright.test")
    assert capfd.readouterr().err.splitlines() == expected


PARENT = """
import os, signal, sys, threading
from tilewright.process import child
from tilewright.process.frames import Channel
from tilewright.process.workers import Workers, WorkerSpec
workers = []
def start():
    workers.append(Workers("worker_entries:tell", [WorkerSpec(rank, {}, (int(sys.argv[1]),)) for rank in (1, 2)], 3))
starter = threading.Thread(target=start)  # which ends before they do
starter.start(); starter.join()
sys.stdin.readline()
if sys.argv[2] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("how", ["kill", "end"])
def test_a_parent_that_ends_leaves_no_worker_behind(how):
    path = os.pathsep.join([str(SOURCES), str(Path(__file__).parent)])
    with pipe() as (told, end):
        parent = subprocess.Popen(
            [sys.executable, "-c", PARENT, str(end), how],
            pass_fds=[end],
            stdin=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path},
        )
        with parent:
            pids = [json.loads(next_line(told))["pid"] for _ in range(2)]
            assert all(map(is_alive, pids)), "they live on when the thread that asked for them has ended"
            parent.stdin.write(b"\n")
            parent.stdin.close()
            parent.wait(TIMEOUT_S)
        wait_for(lambda: not any(map(is_alive, pids)))


def test_a_parent_that_ended_before_the_worker_could_ask():
    """The worker sees another parent than the one that it was started for, and ends without a word."""
    ours, theirs = socket.socketpair()
    with ours, theirs, pipe() as (told, end):
        arguments = {"rank": 1, "size": 2, "payload": {}, "fds": [end]}
        task = {"entry": "worker_entries:tell", "arguments": arguments, "fds": [end], "ignores_sigterm": False}
        others = {"parent": os.getppid(), "binding": None, "log": {"form": "plain", "level": 30}}
        Channel(ours).send(task | others)
        fds = [theirs.fileno(), end]
        command = [sys.executable, "-c", child.BOOT, str(theirs.fileno()), *sys.path]
        done = subprocess.run(command, pass_fds=fds, capture_output=True, timeout=TIMEOUT_S)
        assert (done.returncode, done.stdout, done.stderr) == (1, b"", b"")
        assert not select.select([told], [], [], 0)[0], "it must not have come to its entry point"


def test_processes_that_cannot_be_started(monkeypatch):
    monkeypatch.setattr(child.sys, "executable", "/no/such/python")
    with pytest.raises(FileNotFoundError, match="/no/such/python"):
        Workers("worker_entries:wait", specs(1, 2), 3)


def test_what_cannot_be_sent():
    with pytest.raises(TypeError, match="not JSON serializable"):
        Workers("worker_entries:wait", specs(1, payload={"object": object()}), 2)
    with pytest.raises(ValueError, match="entry is 'worker_entries', expected"):
        Workers("worker_entries", specs(1), 2)


def test_an_entry_point_that_is_not_there():
    deaths = queue.Queue()
    with Workers("worker_entries:none", specs(1), 2, on_death=lambda *death: deaths.put(death)):
        assert "has no attribute 'none'" in deaths.get(timeout=TIMEOUT_S)[1]
