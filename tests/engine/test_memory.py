"""The memory there is for keys and values."""

import pytest

from tilewright.engine import memory
from tilewright.types import RequestError


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Writes the files of control groups: groups(own, {folder: (limit, used)})."""
    monkeypatch.setattr(memory, "GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "OWN_GROUP", tmp_path / "own")

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


def test_pages_of_scenes():
    assert memory.num_scene_pages(10, 5, 100, 4000) == 100  # a quarter
    assert memory.num_scene_pages(10, 5, 2, 4000) == 10  # two pictures are all there may be
    assert memory.num_scene_pages(10, 5, 100, 80) == 5  # one at least
    with pytest.raises(RequestError, match="kv_memory is 50 bytes, expected more than the 50 that"):
        memory.num_scene_pages(10, 5, 100, 50)


def test_slots_of_states():
    assert memory.num_state_slots(100, 10, 1000, 4000) == 20  # a half
    assert memory.num_state_slots(100, 10, 7, 4000) == 7  # no more than are of use
    assert memory.num_state_slots(100, 10, 1000, 110) == 1  # one at least, beside a page
    with pytest.raises(
        RequestError, match=r"kv_memory is 109 bytes, expected at least 110: .* takes 100, a page .* 10"
    ):
        memory.num_state_slots(100, 10, 1000, 109)


@pytest.mark.parametrize("text", ["much", "1i", "-5", "3TB"])
def test_what_is_no_size(text):
    with pytest.raises(RequestError, match="expected bytes or a size"):
        memory.parse_bytes(text)
