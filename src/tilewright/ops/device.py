"""The device that a model computes on: its memory, and the copies to it and back.

A copy to an accelerator costs one call whatever its size, and one that the host waits for stalls everything. So data
lies in `host_bytes`, memory that a device reads directly, and is copied in one asynchronous `upload`: `before_use`
orders later computations after it, and `recycle` returns when the memory may be overwritten. On the host all of this
does nothing: data is read where it was written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Result = TypeVar("Result")


class Copy(Protocol):
    """A copy that was started."""

    def before_use(self) -> None:
        """Order this thread's later computations after the copy, without blocking the host."""

    def recycle(self) -> None:
        """Return when the source memory may be overwritten: at once, if the copy is done."""


class Recording(Protocol):
    """Recorded work of a device."""

    def replay(self) -> None:
        """Run the same work again on the same memory, in one call, without blocking the host."""


class NoCopy:
    """A copy that is not needed: the data is read where it lies."""

    def before_use(self) -> None:
        pass

    def recycle(self) -> None:
        pass


class Device:
    """The host; the base of other devices."""

    is_host = True

    def __init__(self, torch_device: torch.device | str = "cpu") -> None:
        self.torch_device = torch.device(torch_device)

    def __str__(self) -> str:
        return str(self.torch_device)

    def host_bytes(self, num_bytes: int) -> Tensor:
        """Return zeroed uint8 memory of the host for `upload`."""
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def can_read(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies in such memory."""
        return True

    def upload(self, source: Tensor, target: Tensor | None = None, *, beside: bool = False) -> tuple[Tensor, Copy]:
        """Start copying `source`, in `host_bytes` memory, to `target` or to new memory; return that, and the copy.

        `beside`: on a stream of its own, concurrent with computations; else in order with them. A copy to a `target`
        runs after all earlier computations, which may read it.
        """
        return source.to(self.torch_device) if target is None else target.copy_(source), NoCopy()

    def fetch(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the host, once it is computed."""
        return tensor

    def record(self, compute: Callable[[], Result]) -> tuple[Recording, Result]:
        """Run `compute` once and return the recording of its work, and its result.

        It must neither wait for the device nor branch on its data. Inputs are read again from their addresses; results
        keep theirs, and are overwritten by a replay.
        """
        raise NotImplementedError(f"work of {self} is not recorded: ops/plan.py records kernels of the host")


HOST = Device()


class CudaDevice(Device):
    """A GPU by its index, independent of torch's current device."""

    is_host = False

    def __init__(self, torch_device: torch.device | str) -> None:
        super().__init__(torch_device)
        assert self.torch_device.index is not None, "a GPU has an index: a model lives on its own device"
        with torch.cuda.device(self.torch_device):
            self._side = torch.cuda.Stream(self.torch_device)
            self._recorder = torch.cuda.Stream(self.torch_device)
        self._fetched: dict[torch.dtype, Tensor] = {}  # host memory for results
        # Memory of recordings, shared since only one runs at a time. It is freed with the last graph that uses it, and
        # cannot be reserved again: so the first graph is kept.
        self._pool: Any = None
        self._first_graph: torch.cuda.CUDAGraph | None = None

    @property
    def _stream(self) -> torch.cuda.Stream:
        """Stream that this thread computes on."""
        return torch.cuda.current_stream(self.torch_device)

    def host_bytes(self, num_bytes: int) -> Tensor:
        with torch.cuda.device(self.torch_device):
            return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)

    def can_read(self, tensor: Tensor) -> bool:
        return tensor.is_pinned()

    def upload(self, source: Tensor, target: Tensor | None = None, *, beside: bool = False) -> tuple[Tensor, Copy]:
        stream = self._side if beside else self._stream
        if beside and target is not None:
            stream.wait_stream(self._stream)
        with torch.cuda.device(self.torch_device), torch.cuda.stream(stream):
            if target is None:
                target = torch.empty(source.shape, dtype=source.dtype, device=self.torch_device)
            target.copy_(source, non_blocking=True)
            done = torch.cuda.Event()
            done.record(stream)
        return target, _CudaCopy(self, target, stream, done)

    def fetch(self, tensor: Tensor) -> Tensor:
        count = tensor.numel()
        room = self._fetched.get(tensor.dtype)
        if room is None or len(room) < count:
            room = self.host_bytes(2 * count * tensor.dtype.itemsize).view(tensor.dtype)
            self._fetched[tensor.dtype] = room
        here = room[:count].view(tensor.shape)
        here.copy_(tensor, non_blocking=True)
        done = torch.cuda.Event()
        done.record(self._stream)
        done.synchronize()
        return here.clone()

    def record(self, compute: Callable[[], Result]) -> tuple[Recording, Result]:
        """Record a CUDA graph of `compute`, which must have run once before: libraries initialise in their first call.

        The stream is restored by hand, since torch.cuda.graph does not do so if recording fails.
        """
        inputs = _Inputs()

        def compute_noting_inputs() -> Result:
            with inputs:
                return compute()

        with torch.cuda.device(self.torch_device):
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
                self._first_graph, _ = self._capture(lambda: torch.zeros(1, device=self.torch_device))
            graph, result = self._capture(compute_noting_inputs)
            recording = _CudaRecording(graph, inputs)
            recording.replay()
        return recording, result

    def _capture(self, compute: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
        graph = torch.cuda.CUDAGraph()
        self._recorder.wait_stream(self._stream)
        with torch.cuda.stream(self._recorder):
            # Other threads may allocate meanwhile, which is not recorded.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = compute()
            finally:
                graph.capture_end()
        return graph, result


class _CudaRecording:
    def __init__(self, graph: torch.cuda.CUDAGraph, inputs: _Inputs) -> None:
        self._graph, self._inputs = graph, inputs

    def replay(self) -> None:
        self._graph.replay()


class _Inputs(TorchDispatchMode):
    """Keeps tensors that recorded work reads but did not make, so that their memory is not reused."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[int, torch.UntypedStorage] = {}
        self._made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor) and tensor.is_cuda:
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self._made:
                    self._kept[storage.data_ptr()] = storage
        result = func(*args, **kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.is_cuda:
                address = tensor.untyped_storage().data_ptr()
                if address not in self._kept:
                    self._made.add(address)
        return result


class _CudaCopy:
    def __init__(self, device: CudaDevice, target: Tensor, stream: torch.cuda.Stream, done: torch.cuda.Event) -> None:
        self._device, self._target, self._stream, self._done = device, target, stream, done

    def before_use(self) -> None:
        stream = self._device._stream
        if stream != self._stream:
            stream.wait_event(self._done)
            self._target.record_stream(stream)  # its memory is not reused before that stream has read it

    def recycle(self) -> None:
        if not self._done.query():
            self._done.synchronize()


@functools.cache
def named(name: str) -> Device:
    """Return the device of a name; a GPU without an index is the first, not the current one."""
    device = torch.device(name)
    if device.type != "cuda":
        return Device(device)
    return CudaDevice(torch.device("cuda", device.index or 0))
