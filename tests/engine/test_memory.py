"""How the memory for keys and values is shared out."""

import pytest

from tilewright.engine.measure import memory
from tilewright.types import RequestError


def test_pages_of_groups():
    assert memory.num_cross_pages(10, 5, 100, 4000) == 100  # a quarter
    assert memory.num_cross_pages(10, 5, 2, 4000) == 10  # two pictures are all there may be
    assert memory.num_cross_pages(10, 5, 100, 80) == 5  # one at least
    with pytest.raises(RequestError, match="kv_memory is 50 bytes, expected more than the 50 that"):
        memory.num_cross_pages(10, 5, 100, 50)


def test_slots_of_states():
    assert memory.num_state_slots(100, 10, 1000, 4000) == 20  # a half
    assert memory.num_state_slots(100, 10, 7, 4000) == 7  # no more than are of use
    assert memory.num_state_slots(100, 10, 1000, 110) == 1  # one at least, beside a page
    with pytest.raises(
        RequestError, match=r"kv_memory is 109 bytes, expected at least 110: .* takes 100, a page .* 10"
    ):
        memory.num_state_slots(100, 10, 1000, 109)


@pytest.mark.parametrize(
    ("given", "size"),
    [(None, 500), (123, 123), ("2kB", 2000), ("50%", 500), ("12.5%", 125), ("99%", 990)],
)
def test_bytes_or_a_share_of_the_free_memory(monkeypatch, given, size):
    monkeypatch.setattr(memory, "available_bytes", lambda: 1000)
    assert memory.kv_bytes(given) == size


@pytest.mark.parametrize("given", ["100%", "-1%", "%", "1e1%", "5 %"])
def test_shares_that_are_none(given):
    with pytest.raises(RequestError, match="memory size is"):
        memory.kv_bytes(given)
