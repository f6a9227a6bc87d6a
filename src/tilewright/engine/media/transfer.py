"""The media of a step on their way to the device that encodes them: all of them in one copy, which nobody waits for."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import replace

from torch import Tensor

from tilewright.models.media_batch import MediaBatch, MediaItem
from tilewright.ops.device import Copy, Device, NoCopy

# Rows that lie between media and are copied with them cost less than gathering the media, while they are fewer than so
# many in a hundred: the host copies some 10 GB/s, the bus 25 to 50.
MAX_SHARE_BETWEEN = 0.25


class MediaTransfer:
    """Copies media out of the media buffer `rows`. Whatever an encoder is, it reads a MediaBatch, and no rows but that.

    The buffer lies in memory that the device reads by itself, so a step's media are copied from where they were
    written, with the rows between them. Where those would be many, media are gathered first.
    """

    def __init__(self, rows: Tensor, device: Device) -> None:
        self._rows = rows
        self._device = device
        self._gathered: Tensor | None = None  # [rows, width], for media that lie far apart
        self._copy: Copy = NoCopy()

    def send(self, items: Items[MediaItem]) -> MediaBatch:
        """The media as their encoder reads them, on the device; what is computed from now on comes after the copy."""
        if self._device.is_host:
            return MediaBatch(self._rows, tuple(items))
        begin, end = min(item.first_row for item in items), max(item.first_row + item.num_rows for item in items)
        num_rows = sum(item.num_rows for item in items)
        if self._device.can_read(self._rows) and end - begin <= num_rows * (1 + MAX_SHARE_BETWEEN):
            source = self._rows[begin:end]
            items = [replace(item, first_row=item.first_row - begin) for item in items]
        else:
            source, items = self._gather(items, num_rows)
        there, self._copy = self._device.upload(source, beside=True)
        self._copy.before_use()
        return MediaBatch(there, tuple(items))

    def recycle(self) -> None:
        """Returns when the rows that were copied may be written again."""
        self._copy.recycle()
        self._copy = NoCopy()

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
