"""Copies a step's inputs to its device without waiting: its media in one copy, small tensors in another."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import replace

import torch
from torch import Tensor

from tilewright.models.protocol import MediaBatch, MediaItem
from tilewright.ops.device import Copy, Device, NoCopy

ALIGNMENT = 16
ROOM_BYTES = 1 << 20


class Uploads:
    """Copies of one step at a time. They have arrived when the next step calls `begin`, since its tokens came back."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._room: Tensor | None = None
        self._used_bytes = 0

    def begin(self) -> None:
        self._used_bytes = 0

    def send(self, *tensors: Tensor) -> list[Tensor]:
        """Return the tensors on the device, after one asynchronous copy; on the host, the tensors themselves."""
        if self._device.is_host:
            return list(tensors)
        places = []
        end = 0
        for tensor in tensors:
            places.append(end)
            end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        room = self._take(end)
        for tensor, place in zip(tensors, places, strict=True):
            _part(room, place, tensor).copy_(tensor)
        there, copy = self._device.upload(room)
        copy.before_use()
        return [_part(there, place, tensor) for tensor, place in zip(tensors, places, strict=True)]

    def _take(self, num_bytes: int) -> Tensor:
        if self._room is None or self._used_bytes + num_bytes > len(self._room):
            # Copies under way keep the previous buffer alive until they have arrived.
            self._room, self._used_bytes = self._device.host_bytes(max(ROOM_BYTES, 2 * num_bytes)), 0
        begin = self._used_bytes
        self._used_bytes += num_bytes
        return self._room[begin : begin + num_bytes]


def _part(room: Tensor, place: int, like: Tensor) -> Tensor:
    return room[place : place + like.nbytes].view(like.dtype).view(like.shape)


# Rows between media are copied with them while they are at most a quarter of the media's rows. That costs less than
# gathering: the host copies some 10 GB/s, the bus 25 to 50.
MAX_SHARE_BETWEEN = 0.25


class MediaTransfer:
    """Copies media from the media buffer `rows`. Encoders read only the rows in a MediaBatch.

    The buffer lies in memory that the device reads directly, so a step's media are copied from where they were written,
    with the rows between them. If those are too many, media are gathered first.
    """

    def __init__(self, rows: Tensor, device: Device) -> None:
        self._rows = rows
        self._device = device
        self._gathered: Tensor | None = None  # [rows, width], for media that lie far apart
        self._copy: Copy = NoCopy()
        self._kept: Tensor | None = None  # [rows, width] on the device, for recorded passes
        self._ahead: tuple[int, Tensor, Copy] | None = None  # the first row of the media sent ahead

    def send(self, items: Items[MediaItem], *, ahead: bool = False, max_kept_rows: int = 0) -> MediaBatch:
        """Return the media as their encoder reads them, on the device; later computations wait for the copy.

        `ahead`: they were sent by `send_ahead`. Media of at most `max_kept_rows` rows lie at the same address in every
        step.
        """
        if self._device.is_host:
            return MediaBatch(self._rows, tuple(items))
        if ahead:
            assert self._ahead is not None, "nothing was sent ahead"
            begin, there, self._copy = self._ahead
            self._ahead = None
            self._copy.before_use()
            kept = self._kept_rows(len(there), max_kept_rows)
            return MediaBatch(there if kept is None else kept.copy_(there), _moved(items, begin))
        begin, end = _reach(items)
        if self._are_neighbours(items):
            source, items = self._rows[begin:end], _moved(items, begin)
        else:
            source, items = self._gather(items, sum(item.num_rows for item in items))
        kept = self._kept_rows(len(source), max_kept_rows)
        there, self._copy = self._device.upload(source, kept, beside=True)
        self._copy.before_use()
        return MediaBatch(there, tuple(items))

    def is_kept(self, batch: MediaBatch) -> bool:
        """Return whether a batch lies at the address that is the same in every step."""
        return self._kept is not None and batch.buffer.data_ptr() == self._kept.data_ptr()

    def _kept_rows(self, num_rows: int, max_rows: int) -> Tensor | None:
        if num_rows > max_rows:
            return None
        if self._kept is None:
            shape = max_rows, self._rows.shape[1]
            self._kept = torch.empty(shape, dtype=self._rows.dtype, device=self._device.torch_device)
        return self._kept[:num_rows]

    def send_ahead(self, items: Items[MediaItem]) -> bool:
        """Start copying media of a later step during the current one; return False if they lie far apart."""
        if not self._are_neighbours(items):
            return False
        begin, end = _reach(items)
        there, copy = self._device.upload(self._rows[begin:end], beside=True)
        self._ahead = begin, there, copy
        return True

    def recycle(self) -> None:
        """Return when the copied rows may be overwritten."""
        self._copy.recycle()
        self._copy = NoCopy()
        if self._ahead is not None:
            self._ahead[2].recycle()

    def _are_neighbours(self, items: Items[MediaItem]) -> bool:
        """Return whether media are copied from where they lie."""
        begin, end = _reach(items)
        num_rows = sum(item.num_rows for item in items)
        return self._device.can_read(self._rows) and end - begin <= num_rows * (1 + MAX_SHARE_BETWEEN)

    def _gather(self, items: Items[MediaItem], num_rows: int) -> tuple[Tensor, list[MediaItem]]:
        self.recycle()
        room, width = self._gathered, self._rows.shape[1]
        if room is None or len(room) < num_rows:
            size_bytes = num_rows * width * self._rows.dtype.itemsize
            room = self._gathered = self._device.host_bytes(size_bytes).view(self._rows.dtype).view(-1, width)
        first, moved = 0, []
        for item in items:
            room[first : first + item.num_rows] = self._rows[item.first_row : item.first_row + item.num_rows]
            moved.append(replace(item, first_row=first))
            first += item.num_rows
        return room[:num_rows], moved


def _reach(items: Items[MediaItem]) -> tuple[int, int]:
    """Return the first row of some items, and the row after their last."""
    return min(item.first_row for item in items), max(item.first_row + item.num_rows for item in items)


def _moved(items: Items[MediaItem], begin: int) -> tuple[MediaItem, ...]:
    """Return items with row numbers relative to row `begin`."""
    return tuple(replace(item, first_row=item.first_row - begin) for item in items)
