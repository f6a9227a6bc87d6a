"""Files mapped into memory, read as tensors without a copy, whose pages can be released."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import torch
from torch import Tensor

from tilewright import files
from tilewright.host_memory import MAP_NORESERVE, shortage_text, size_text
from tilewright.model_files import CheckpointError


class MappedFile:
    """A file as memory. Writing to a tensor of it changes a private copy of the page, never the file.

    Mapped writable because torch warns of memory it may not write to, and the pages stay shared until written anyway.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with files.open_regular(path) as file:
                status = os.fstat(file.fileno())
                self.size_bytes, self.modified_ns = status.st_size, status.st_mtime_ns
                if self.size_bytes == 0:
                    raise CheckpointError(f"{path} is empty: download it again")
                self.memory = mmap.mmap(
                    file.fileno(),
                    self.size_bytes,
                    flags=mmap.MAP_PRIVATE | MAP_NORESERVE,
                    prot=mmap.PROT_READ | mmap.PROT_WRITE,
                )
        except OSError as error:
            reason = error.strerror or str(error)
            if error.errno == errno.ENOMEM:
                reason = f"it has {size_text(self.size_bytes)} to be mapped: {shortage_text()}"
            raise CheckpointError(f"{path} cannot be read: {reason}") from error

    def bytes_at(self, offset: int, size_bytes: int) -> Tensor:
        """`size_bytes` of the file, uint8, in place. The caller has checked that the file has them."""
        if size_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self.memory, dtype=torch.uint8, count=size_bytes, offset=offset)

    def tensor_at(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor of the file: in place, or a copy where the file does not align its elements."""
        num_elements = 1
        for size in shape:
            num_elements *= size
        data = self.bytes_at(offset, num_elements * dtype.itemsize)
        if offset % dtype.itemsize:
            data = data.clone()
        return data.view(dtype).view(shape)

    def release(self, offset: int, size_bytes: int) -> None:
        """Releases the pages of a range: they no longer count as this process's, and are read again when touched."""
        begin = offset // mmap.PAGESIZE * mmap.PAGESIZE
        if size_bytes:
            self.memory.madvise(mmap.MADV_DONTNEED, begin, offset + size_bytes - begin)

    def will_need(self, offset: int, size_bytes: int) -> None:
        """Asks the system to start reading a range from disk."""
        begin = offset // mmap.PAGESIZE * mmap.PAGESIZE
        if size_bytes:
            self.memory.madvise(mmap.MADV_WILLNEED, begin, offset + size_bytes - begin)
