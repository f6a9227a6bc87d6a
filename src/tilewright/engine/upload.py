"""Small tensors that a step makes on the host and reads on its device: several in one copy."""

from __future__ import annotations

from torch import Tensor

from tilewright.ops.device import Device

ALIGNMENT = 16
ROOM_BYTES = 1 << 20


class Uploads:
    """Copies of one step at a time: what it sent has arrived before the next one `begin`s, since tokens came back."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._room: Tensor | None = None
        self._used_bytes = 0

    def begin(self) -> None:
        self._used_bytes = 0

    def send(self, *tensors: Tensor) -> list[Tensor]:
        """The tensors on the device, after one copy that nobody waits for; themselves where that is the host."""
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
            # What was sent from the room before keeps it until it has arrived.
            self._room, self._used_bytes = self._device.host_bytes(max(ROOM_BYTES, 2 * num_bytes)), 0
        begin = self._used_bytes
        self._used_bytes += num_bytes
        return self._room[begin : begin + num_bytes]


def _part(room: Tensor, place: int, like: Tensor) -> Tensor:
    return room[place : place + like.nbytes].view(like.dtype).view(like.shape)
