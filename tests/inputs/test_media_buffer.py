"""The buffer that media wait in: neighbours, room that comes back, memory that is given back."""

import ctypes
import gc
import mmap
import threading
import time
import weakref

import pytest
import torch
from fuzzing import num_cases
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.inputs.media_buffer import MediaBuffer
from tilewright.types import Region, RequestError

TIMEOUT_S = 60.0


def make(num_rows=8, width=4, dtype=torch.float32) -> MediaBuffer:
    return MediaBuffer(width, dtype, num_rows * width * dtype.itemsize)


def resident_bytes(buffer: MediaBuffer) -> int:
    """How much of the buffer has memory."""
    size = len(buffer._memory)
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    address = ctypes.c_void_p(buffer.rows.data_ptr())
    assert ctypes.CDLL(None, use_errno=True).mincore(address, ctypes.c_size_t(size), pages) == 0
    return mmap.PAGESIZE * sum(page & 1 for page in pages)


def test_regions_of_a_request_are_neighbours():
    buffer = make()
    allocation = buffer.allocate([2, 1, 3])
    assert allocation.regions == (Region(0, 2), Region(2, 1), Region(3, 3))
    for index, region in enumerate(allocation.regions):
        buffer.view(region).fill_(index)
    assert buffer.rows[:6, 0].tolist() == [0, 0, 1, 2, 2, 2] and buffer.num_free_rows == 2
    assert buffer.allocate([]) is None


def test_room_comes_back_with_the_last_reference_or_by_release():
    buffer = make()
    first, second = buffer.allocate([3]), buffer.allocate([5])
    del first
    gc.collect()
    assert buffer.num_free_rows == 3 and buffer.allocate([2]).regions == (Region(0, 2),)
    second.release()
    second.release()
    gc.collect()
    assert buffer._free == [(0, 8)]


def test_more_than_the_buffer_is_refused():
    with pytest.raises(RequestError, match="media take 144 bytes once prepared, the limit is 128"):
        make().allocate([4, 5])


def test_a_request_waits_for_room_and_is_not_passed_by_a_smaller_one():
    buffer = make()
    held, kept = buffer.allocate([6]), buffer.allocate([1])
    got = []
    threads = []
    for count in (7, 1):  # the second would fit at once
        threads.append(threading.Thread(target=lambda count=count: got.append(buffer.allocate([count]).regions)))
        threads[-1].start()
        time.sleep(0.2)
    assert not got and kept
    held.release()
    del kept
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert [region.num_rows for (region,) in got] == [7, 1]


def test_a_request_that_nobody_waits_for_any_more_stops_waiting():
    buffer = make()
    held = buffer.allocate([8])
    asked = []

    def check_cancelled():
        asked.append(1)
        if len(asked) == 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        buffer.allocate([1], check_cancelled)
    held.release()
    assert buffer.allocate([8])


def test_what_is_left_unwritten_is_written_once_when_it_is_loaded():
    buffer = make()
    allocation = buffer.allocate([2, 2])
    written = []
    buffer.write_later(allocation.regions[1], lambda rows: written.append(rows.fill_(7.0)))
    buffer.load(allocation.regions[0])
    assert not written
    for _ in range(2):
        buffer.load(allocation.regions[1])
    assert len(written) == 1 and buffer.rows[:4, 0].tolist() == [0, 0, 7, 7]


def test_a_write_that_fails_may_be_tried_again():
    buffer = make()
    allocation = buffer.allocate([1])
    buffer.write_later(allocation.regions[0], lambda rows: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            buffer.load(allocation.regions[0])


def test_a_released_request_leaves_nothing_of_its_source():
    class Source:
        def write(self, rows):
            raise AssertionError("nobody asked")

    buffer, source = make(), Source()
    gone = weakref.ref(source)
    allocation = buffer.allocate([2])
    buffer.write_later(allocation.regions[0], source.write)
    del source
    gc.collect()
    assert gone() is not None
    del allocation
    gc.collect()
    assert gone() is None
    buffer.load(Region(0, 2))  # of another request by now


def test_memory_is_taken_by_writing_and_given_back():
    """Rows of a page and a half: a page that two requests share goes with the second of them."""
    width = mmap.PAGESIZE * 3 // 8
    buffer = MediaBuffer(width, torch.float32, 1 << 30)
    assert resident_bytes(buffer) == 0
    allocations = [buffer.allocate([3]) for _ in range(3)]
    for allocation in allocations:
        buffer.view(allocation.regions[0]).fill_(1.0)
    taken = resident_bytes(buffer)
    assert taken >= 9 * width * 4
    allocations[1].release()
    assert taken - resident_bytes(buffer) == 4 * mmap.PAGESIZE  # of 4.5: half of one is the first request's
    assert buffer.view(allocations[0].regions[0]).min() == buffer.view(allocations[2].regions[0]).min() == 1.0
    allocations[0].release()
    allocations[2].release()
    assert resident_bytes(buffer) == 0


@settings(max_examples=num_cases(60), deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=40))
def test_no_two_requests_share_a_row(actions):
    buffer = make(num_rows=32, width=1)
    held = []
    for takes, number in actions:
        if takes and any(end - begin >= number for begin, end in buffer._free):
            allocation = buffer.allocate([number])
            buffer.view(allocation.regions[0]).fill_(float(len(held) + 1))
            held.append((allocation, float(len(held) + 1)))
        elif held:
            held.pop(number % len(held))[0].release()
        assert buffer.num_free_rows == 32 - sum(item.regions[0].num_rows for item, _ in held)
        assert all((buffer.view(item.regions[0]) == value).all() for item, value in held)
    for allocation, _ in held:
        allocation.release()
    assert buffer._free == [(0, 32)]
