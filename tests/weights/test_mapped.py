"""Mapped files on machines whose pages have 4, 16 or 64 KiB."""

import mmap

import pytest
import torch

from tilewright.weights import safetensors
from tilewright.weights.safetensors import MappedFile

SIZE_BYTES = (256 << 10) + 777


@pytest.mark.parametrize("page_bytes", [4 << 10, 16 << 10, 64 << 10])
def test_advice_begins_on_a_page(tmp_path, monkeypatch, page_bytes):
    """The kernel refuses what does not; all of the range must be in it, and the bytes must stay as they were."""
    content = bytes(torch.arange(SIZE_BYTES).to(torch.uint8).tolist())
    (tmp_path / "a").write_bytes(content)
    advised = []

    class Noting(mmap.mmap):
        def madvise(self, option, start, length):
            advised.append((option, start, start + length))
            super().madvise(option, start, length)

    monkeypatch.setattr(safetensors.mmap, "PAGESIZE", page_bytes)
    monkeypatch.setattr(safetensors.mmap, "mmap", Noting)
    file = MappedFile(tmp_path / "a")
    for offset, size_bytes in ((0, 100), (5000, 70_000), (64 << 10, 64 << 10), (SIZE_BYTES - 3, 3), (7, 0)):
        advised.clear()
        file.will_need(offset, size_bytes)
        before = file.bytes_at(offset, size_bytes).clone()
        file.release(offset, size_bytes)
        assert [option for option, _, _ in advised] == [mmap.MADV_WILLNEED, mmap.MADV_DONTNEED][: 2 * bool(size_bytes)]
        for _, begin, end in advised:
            assert begin % page_bytes == 0 and begin <= offset < begin + page_bytes and end == offset + size_bytes
        assert torch.equal(file.bytes_at(offset, size_bytes), before)
        assert bytes(before.tolist()) == content[offset : offset + size_bytes]
