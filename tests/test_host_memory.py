"""Sizes of memory."""

import pytest

from tilewright import control_group, host_memory
from tilewright.types import RequestError


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Writes the files of control groups: groups(own, {folder: (limit, used)})."""
    monkeypatch.setattr(control_group, "GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(control_group, "OWN_GROUP", tmp_path / "own")

    def write(own, limits, names=("memory.max", "memory.current")):
        (tmp_path / "own").write_text(own)
        for folder, values in limits.items():
            path = tmp_path / "cgroup" / folder
            path.mkdir(parents=True, exist_ok=True)
            for name, value in zip(names, values, strict=True):
                (path / name).write_text(f"{value}\n")

    return write


def test_a_service_has_the_limit_of_its_own_group(groups):
    free = host_memory.available_bytes()
    groups("0::/system.slice/tiles.service\n", {"system.slice/tiles.service": (1 << 20, 1 << 18), ".": ("max", 5)})
    assert host_memory.total_bytes() == 1 << 20
    assert host_memory.available_bytes() == (1 << 20) - (1 << 18) < free


def test_groups_around_it_count_too(groups):
    groups("0::/outer/inner\n", {"outer/inner": ("max", 0), "outer": (1 << 21, 0)})
    assert host_memory.total_bytes() == 1 << 21


def test_the_older_form(groups):
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    groups("5:cpu:/x\n4:memory:/tiles\n0::/\n", {"memory/tiles": (1 << 22, 1 << 10)}, names)
    assert host_memory.available_bytes() == (1 << 22) - (1 << 10)


def test_no_groups(groups, tmp_path):
    assert host_memory.total_bytes() > 1 << 28


@pytest.mark.parametrize(("text", "size_bytes"), [("2GB", 2 * 10**9), ("1.5 GiB", 3 << 29), ("64k", 64_000), (7, 7)])
def test_sizes(text, size_bytes):
    assert host_memory.parse_bytes(text) == size_bytes


@pytest.mark.parametrize("text", ["much", "1i", "-5", "3TB"])
def test_what_is_no_size(text):
    with pytest.raises(RequestError, match="expected bytes or a size"):
        host_memory.parse_bytes(text)
