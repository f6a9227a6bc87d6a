"""An engine whose other ranks are processes: it answers as one rank does, and a rank that is lost ends it, cleanly."""

import gc
import os
import signal
import time
from pathlib import Path

import pytest
from asking import about, picture

from tilewright import Engine
from tilewright.engine.ranks.ranks import RankLostError
from tilewright.host.files import CheckpointError
from tilewright.ops.native import kernels
from tilewright.types import RequestError
from tilewright.weights import embedded

pytestmark = pytest.mark.alone  # engines of two processes, which wait for each other
MODEL = embedded.path()
OPTIONS = {"dtype": "float32", "kv_memory": "64MB", "max_context": 1024}
QUESTION = about(picture(1, 64, 96), "What is in the picture?")
SAMPLING = {"max_tokens": 24, "temperature": 0.0}


def children():
    """The processes that this one has started and that still run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid() and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def open_files():
    """The shared memory that this process has open."""
    gc.collect()  # what earlier tests have left
    found = []
    for fd in Path("/proc/self/fd").iterdir():
        try:
            found.append(os.readlink(fd))
        except OSError:
            continue
    return sorted(name for name in found if "memfd" in name or "tilewright" in name)


@pytest.fixture(scope="module")
def of_one_rank():
    with Engine(MODEL, **OPTIONS) as engine:
        return engine.chat(QUESTION, **SAMPLING).text, engine.chat([QUESTION, QUESTION], n=2, **SAMPLING)


@pytest.mark.parametrize("how", ["shared memory", "gloo"])
def test_answers_are_those_of_one_rank(how, of_one_rank, monkeypatch, caplog):
    def refused(*arguments):
        raise OSError("not permitted")

    if how == "gloo":
        monkeypatch.setattr(kernels, "create_segment", refused)
    files, processes = open_files(), children()
    with Engine(MODEL, tp=2, **OPTIONS) as engine:
        assert len(children()) == len(processes) + 1
        text, together = of_one_rank
        assert engine.chat(QUESTION, **SAMPLING).text == text
        again = engine.chat([QUESTION, QUESTION], n=2, **SAMPLING)
        assert [[item.text for item in items] for items in again] == [
            [item.text for item in items] for items in together
        ]
    assert ("gloo" in caplog.text) == (how == "gloo")
    del engine
    assert children() == processes and open_files() == files


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # it ends the server's engine
def test_a_rank_that_dies_ends_the_requests_with_its_name():
    processes = children()
    with Engine(MODEL, tp=2, **OPTIONS) as engine:
        (worker,) = set(children()) - set(processes)
        handle = engine.submit_chat([{"role": "user", "content": "Hello"}], max_tokens=900, ignore_eos=True)
        next(iter(handle))
        os.kill(worker, signal.SIGKILL)
        began_s = time.monotonic()
        with pytest.raises(RankLostError, match="rank 1 died of SIGKILL"):
            handle.result(timeout_s=30)
        assert time.monotonic() - began_s < 20, "told by the watcher, not by the time-out of a collective"
        with pytest.raises(RankLostError, match="rank 1 died"):
            engine.chat(QUESTION, **SAMPLING)
    assert children() == processes


def test_a_model_that_cannot_be_loaded_leaves_no_process(tmp_path):
    processes = children()
    (tmp_path / "config.json").write_text('{"model_type": "unheard_of"}')
    with pytest.raises((CheckpointError, RequestError, ValueError)):
        Engine(tmp_path, tp=2)
    assert children() == processes


@pytest.mark.parametrize("tp", [0, -1, 1000, "two", 2.0, True])
def test_tp_is_a_number_of_ranks(tp):
    with pytest.raises(RequestError, match="tp is"):
        Engine(MODEL, tp=tp)


def test_cpu_binding_needs_a_list_per_rank():
    with pytest.raises(RequestError, match="--cpu-binding is '0', which has 1 list of CPUs for 2 ranks"):
        Engine(MODEL, tp=2, cpu_binding="0")
