"""Devices that CI has: one that keeps what it is sent in memory of its own and counts, one without any values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tilewright.ops.device import Device, NoCopy


@dataclass(frozen=True)
class Upload:
    num_bytes: int
    beside: bool  # on a stream of its own


class FakeDevice(Device):
    """A device in the host's memory, where nothing is there before it was ordered to be.

    A copy beside what is computed arrives when `before_use` says that it must have, and is garbage until then. Memory
    that is copied from must not change before the copy is done: when something was fetched, or was waited for.
    """

    is_host = False

    def __init__(self):
        super().__init__("cpu")
        self.uploads: list[Upload] = []
        self.num_fetches = 0
        self.num_waits = 0  # of the host, for a copy that was not done
        self.recordings: list[Tape] = []
        self.order: list[str] = []  # of copies there and back, as they were started
        self._under_way: list[FakeCopy] = []
        self._readable: list[tuple[int, int]] = []

    def begin(self):
        """Counts from here on."""
        self.uploads, self.num_fetches, self.num_waits = [], 0, 0

    def host_bytes(self, num_bytes):
        memory = super().host_bytes(num_bytes)
        self._readable.append((memory.data_ptr(), memory.data_ptr() + num_bytes))
        return memory

    def can_read(self, tensor):
        begin = tensor.data_ptr()
        return any(first <= begin and begin + tensor.nbytes <= end for first, end in self._readable)

    def upload(self, source, target=None, *, beside=False):
        assert self.can_read(source), "the device cannot read this memory"
        if target is None:
            target = torch.empty_like(source)
        if beside:
            target.view(torch.uint8).fill_(0xFF)
        self.uploads.append(Upload(source.nbytes, beside))
        self.order.append("media" if beside else "inputs")
        copy = FakeCopy(self, source, target)
        self._under_way.append(copy)
        if not beside:
            copy.before_use()
        return target, copy

    def fetch(self, tensor):
        self.num_fetches += 1
        self.order.append("fetch")
        for copy in list(self._under_way):
            self.finish(copy)
        return tensor.clone()

    def record(self, compute):
        tape = Tape()
        with tape:
            result = compute()
        self.recordings.append(tape)
        return tape, result

    def finish(self, copy):
        if copy in self._under_way:
            self._under_way.remove(copy)
            copy.check()


class Tape(TorchDispatchMode):
    """Calls of torch's ops with the very tensors they had, to be made again: nothing else is asked the second time.

    What they made is garbage when a replay begins.
    """

    WAITS = ("_local_scalar_dense", "nonzero", "equal", "unique", "masked_select", "is_nonzero")

    def __init__(self):
        super().__init__()
        self.calls = []
        self.num_replays = 0
        self._given, self._made = set(), {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.partition(".")[0]
        assert name not in self.WAITS, f"{name} waits for the device, in work that is recorded"
        assert name != "lift_fresh", "a tensor is made of Python numbers, in work that is recorded"
        kwargs = kwargs or {}
        self._given |= {_memory(tensor) for tensor in _tensors((args, kwargs))} - self._made.keys()
        result = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, result))
        self._made |= {_memory(tensor): tensor for tensor in _tensors(result) if _memory(tensor) not in self._given}
        return result

    def replay(self):
        self.num_replays += 1
        for tensor in self._made.values():
            tensor.untyped_storage().fill_(0xFF)
        for func, args, kwargs, result in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(_tensors(result), _tensors(again), strict=True):
                if _memory(old) != _memory(new):
                    old.copy_(new)


def _memory(tensor):
    return tensor.untyped_storage().data_ptr()


def _tensors(tree):
    return [item for item in tree_leaves(tree) if isinstance(item, torch.Tensor)]


class FakeCopy:
    def __init__(self, device, source, target):
        self.device, self.source, self.target = device, source, target
        self.sent = source.clone()

    def before_use(self):
        self.target.copy_(self.sent)

    def recycle(self):
        self.device.num_waits += self in self.device._under_way
        self.device.finish(self)

    def check(self):
        assert self.source.view(torch.uint8).equal(self.sent.view(torch.uint8)), "written to while it was copied"


class NoValues(Device):
    """A device whose tensors have shapes and no values: what would wait for one, or mixes places, is an error."""

    is_host = False

    def __init__(self):
        super().__init__("meta")

    def can_read(self, tensor):
        return True

    def upload(self, source, target=None, *, beside=False):
        return (torch.empty_like(source, device="meta") if target is None else target), NoCopy()

    def fetch(self, tensor):
        assert tensor.device.type == "meta"
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
