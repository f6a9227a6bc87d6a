"""Memory for what is streamed every step: weights, keys and values, results of ops."""

import logging
import mmap

import torch
from torch import Tensor

from tilewright.ops import backend

# Where pages have 4 KiB; where they have 16 or 64, huge ones have 32 or 512 MiB, and a tensor gets those within it.
HUGE_PAGE_BYTES = 2 << 20

_log = logging.getLogger(__name__)


def empty_in_huge_pages(num_elements: int, dtype: torch.dtype) -> Tensor:
    """A flat tensor whose memory the OS is asked to back with huge pages: streaming it costs a TLB miss per 2 MB.

    It is zero, as memory from the OS is. Of a backend that computes elsewhere, it is that device's own memory.
    """
    size_bytes = num_elements * dtype.itemsize
    device = backend.device()
    if size_bytes < HUGE_PAGE_BYTES or device.type != "cpu":
        return torch.zeros(num_elements, dtype=dtype, device=device)
    # Private: Linux gives shared memory no huge pages unless configured (shmem_enabled is "never" by default). One page
    # more than needed, so that the tensor can begin on a boundary; what is not touched takes no memory.
    memory = mmap.mmap(-1, size_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -whole.data_ptr() % HUGE_PAGE_BYTES
    try:
        # Not the rest after the last whole page: it would take 2 MB however little it is.
        memory.madvise(mmap.MADV_HUGEPAGE, begin, size_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES)
    except OSError as error:  # a kernel built without them, as those of small boards are
        _log.debug("%d bytes are in small pages: %s", size_bytes, error)
    return whole[begin : begin + size_bytes].view(dtype)
