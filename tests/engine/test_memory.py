"""How the memory for keys and values is shared out."""

import pytest

from tilewright.engine import memory
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
