"""Memory in huge pages, on systems that have them and that have not."""

import errno
import mmap

import torch

from tilewright.ops import plan


class NoHugePages(mmap.mmap):
    """Memory of a kernel that was built without huge pages."""

    def madvise(self, *arguments):
        raise OSError(errno.EINVAL, "Invalid argument")


def test_a_system_without_huge_pages_gives_small_ones(monkeypatch):
    monkeypatch.setattr(plan.mmap, "mmap", NoHugePages)
    made = plan.empty_in_huge_pages(3 << 20, torch.bfloat16)
    assert made.shape == (3 << 20,) and not made.any()
    assert made.fill_(1.0).sum(dtype=torch.float64) == 3 << 20


def test_advice_is_for_whole_pages_of_any_size(monkeypatch):
    """The kernel refuses a range that does not begin on one of its pages, of 4, 16 or 64 KiB."""
    advised = []

    class Noting(mmap.mmap):
        def madvise(self, option, start, length):
            advised.append((torch.frombuffer(self, dtype=torch.uint8).data_ptr() + start, length))
            super().madvise(option, start, length)

    monkeypatch.setattr(plan.mmap, "mmap", Noting)
    made = plan.empty_in_huge_pages((5 << 20) + 12_345, torch.uint8)
    assert advised == [(made.data_ptr(), 4 << 20)] and made.data_ptr() % (64 << 10) == 0
