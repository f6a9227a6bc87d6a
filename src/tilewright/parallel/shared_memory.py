"""A group whose ranks are processes of one machine: collectives over shared memory, kernels in csrc/parallel."""

from __future__ import annotations

from torch import Tensor

from tilewright.ops.native import kernels, view
from tilewright.parallel.group import DEFAULT_SPIN_US, Group, refuse_recording


class SharedMemoryGroup(Group):
    """Ranks that share the memory behind a descriptor, which may be closed once this is made."""

    def __init__(self, segment_fd: int, rank: int, name: str, timeout_s: float) -> None:
        self._native = kernels.SharedGroup(segment_fd, rank, name, timeout_s)
        super().__init__(name, rank, self._native.size)

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        kernels.broadcast(self._native, view(x), root)
        return x

    def barrier(self) -> None:
        kernels.barrier(self._native)

    def post(self) -> None:
        refuse_recording("post")
        self._native.post()

    def wait_for_post(self, spin_us: float = DEFAULT_SPIN_US) -> None:
        refuse_recording("wait_for_post")
        self._native.wait_for_post(spin_us)

    def close(self) -> None:
        self._native.close()

    def _all_reduce(self, x: Tensor, out: Tensor) -> None:
        kernels.all_reduce(self._native, view(x), view(out))

    def _all_reduce_add(self, x: Tensor, residual: Tensor, out: Tensor) -> None:
        kernels.all_reduce_add(self._native, view(x), view(residual), view(out))

    def _all_gather(self, x: Tensor, out: Tensor) -> None:
        kernels.all_gather(self._native, view(x), view(out))

    def _all_gather_columns(self, x: Tensor, out: Tensor) -> None:
        kernels.all_gather_columns(self._native, view(x), view(out))

    def _reduce_scatter(self, x: Tensor, out: Tensor) -> None:
        kernels.reduce_scatter(self._native, view(x), view(out))

    def _all_reduce_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, eps: float, weight_plus_one: bool
    ) -> None:
        kernels.all_reduce_norm(self._native, view(x), view(residual), view(weight), view(out), eps, weight_plus_one)
