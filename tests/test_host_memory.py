"""Sizes of memory."""

import contextlib
import errno
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tilewright.host import memory, topology
from tilewright.host.files import CheckpointError
from tilewright.types import RequestError
from tilewright.weights import embedded
from tilewright.weights.checkpoint import open_checkpoint
from tilewright.weights.linear import LinearWeight
from tilewright.weights.load import load


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Writes the files of control groups: groups(own, {folder: (limit, used)})."""
    monkeypatch.setattr(topology, "GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(topology, "OWN_GROUP", tmp_path / "own")

    def write(own, limits, names=("memory.max", "memory.current")):
        (tmp_path / "own").write_text(own)
        for folder, values in limits.items():
            path = tmp_path / "cgroup" / folder
            path.mkdir(parents=True, exist_ok=True)
            for name, value in zip(names, values, strict=True):
                (path / name).write_text(f"{value}\n")

    return write


def test_a_service_has_the_limit_of_its_own_group(groups):
    free = memory.available_bytes()
    groups("0::/system.slice/tiles.service\n", {"system.slice/tiles.service": (1 << 20, 1 << 18), ".": ("max", 5)})
    assert memory.total_bytes() == 1 << 20
    assert memory.available_bytes() == (1 << 20) - (1 << 18) < free


def test_groups_around_it_count_too(groups):
    groups("0::/outer/inner\n", {"outer/inner": ("max", 0), "outer": (1 << 21, 0)})
    assert memory.total_bytes() == 1 << 21


def test_the_older_form(groups):
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    groups("5:cpu:/x\n4:memory:/tiles\n0::/\n", {"memory/tiles": (1 << 22, 1 << 10)}, names)
    assert memory.available_bytes() == (1 << 22) - (1 << 10)


def test_no_groups(groups, tmp_path):
    assert memory.total_bytes() > 1 << 28


@pytest.mark.parametrize(("text", "size_bytes"), [("2GB", 2 * 10**9), ("1.5 GiB", 3 << 29), ("64k", 64_000), (7, 7)])
def test_sizes(text, size_bytes):
    assert memory.parse_bytes(text) == size_bytes


@pytest.mark.parametrize("text", ["much", "1i", "-5", "3TB"])
def test_what_is_no_size(text):
    with pytest.raises(RequestError, match="expected bytes or a size"):
        memory.parse_bytes(text)


# Limits that are too small.

CHAT = ["chat", "Hello", "-q", "--max-tokens", "2", "--max-context", "256"]


@pytest.mark.parametrize(
    ("flag", "limit", "size_bytes", "needed"),
    [("-v", resource.RLIMIT_AS, 600_000_000, r"1\.5 GB"), ("-d", resource.RLIMIT_DATA, 300_000_000, r"3\d\d MB")],
)
@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (CHAT, embedded.MODEL_NAME),
        (["image", "a cat", "-q", "-o", "cat.png"], embedded.DRAWING_NAME),
        (["serve", "--port", "0", "-q"], "tilewright serve"),
    ],
)
def test_a_limit_below_what_a_start_takes(tmp_path, arguments, what, flag, limit, size_bytes, needed):
    """Torch is not even loaded: it would fail in any of its libraries, or wait for ever."""
    done = subprocess.run(
        [sys.executable, "-m", "tilewright", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        preexec_fn=lambda: resource.setrlimit(limit, (size_bytes, size_bytes)),
    )
    limit_mb = size_bytes // 10**6
    message = rf"tilewright: {what} needs about {needed} of memory, and .* may have {limit_mb} MB \(ulimit {flag}\)\n"
    assert (done.returncode, done.stdout) == (2, "") and re.fullmatch(message, done.stderr), done.stderr


@contextlib.contextmanager
def addresses_left(num_bytes):
    """A limit of this process's addresses for a while."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_what_is_free_and_in_all_heeds_the_limit_of_addresses():
    with addresses_left(50 << 20):
        assert memory.available_bytes() <= 50 << 20
        assert memory.total_bytes() == resource.getrlimit(resource.RLIMIT_AS)[0]


def test_weights_that_do_not_fit_are_not_begun(tmp_path, monkeypatch):
    """The line has what is needed, the limit and whose it is."""
    save_file({"t.weight": torch.zeros(1 << 14, 1 << 10)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    read = []
    monkeypatch.setattr(LinearWeight, "build_from", lambda *_: read.append(1))
    weights = [LinearWeight([("t", 1 << 14)], 1 << 10)]
    checkpoint = open_checkpoint(tmp_path)
    pattern = r"needs about (\S+) GB of memory, and this process may have (\S+) GB \(ulimit -v\)$"
    with addresses_left(150_000_000), pytest.raises(RequestError, match=pattern) as raised:
        load(weights, checkpoint, dtype=torch.float32)
    needed_gb, limit_gb = map(float, re.search(pattern, str(raised.value)).groups())
    assert needed_gb - limit_gb == pytest.approx(((1 << 26) + memory.SPARE_BYTES - 150e6) / 1e9, abs=0.1)
    assert not read and str(tmp_path) in str(raised.value)


def test_a_control_group_that_is_too_small(groups, monkeypatch):
    monkeypatch.setattr(memory, "_system_bytes", lambda name, *_: 0 if name == "SwapTotal" else 1 << 34)
    groups("0::/tiles\n", {"tiles": (100 << 20, 0)})
    with pytest.raises(
        RequestError, match=r"^m needs about 320 MB of memory, .* may have 105 MB \(its control group\)$"
    ):
        memory.require_start("m")
    monkeypatch.setattr(memory, "_system_bytes", lambda name, *_: 1 << 34)
    memory.require_start("m")  # 16 GiB of swap make room


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
    ],
)
def test_a_shortage_names_the_least_limit(error):
    message = r"^m: there is not enough memory, and this process may have .*\(ulimit -v\)$"
    with addresses_left(1 << 30), pytest.raises(RequestError, match=message), memory.explained_shortage("m"):
        raise error


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), RuntimeError("shapes differ")])
def test_other_errors_stay_what_they_are(error):
    with pytest.raises(type(error), match=str(error.args[-1])), memory.explained_shortage("m"):
        raise error


def test_mapping_a_file_that_does_not_fit(tmp_path):
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(1 << 31)
    (tmp_path / "config.json").write_text("{}")
    with (
        addresses_left(1 << 28),
        pytest.raises(CheckpointError, match=r"it has 2\.1 GB to be mapped: .*\(ulimit -v\)$"),
    ):
        open_checkpoint(tmp_path)
