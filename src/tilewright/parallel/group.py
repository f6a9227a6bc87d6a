"""A group of ranks that compute one model together, and its collectives over the shared memory of one machine.

Shape suffixes: T packed tokens, D model width, R ranks. All ranks make the same calls in the same order. Sums are
computed in fp32, in the order of ranks, and rounded once, in every kind of group: results have the same bits on all
ranks and in every run. See docs/parallel.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from tilewright.ops.native import kernels, view
from tilewright.ops.norm import rms_norm
from tilewright.ops.plan import empty

# A collective failed: a rank was late or lost, closed the group, or called another operation. The message names the
# rank and the number of the operation. The group is unusable afterwards.
CollectiveError = kernels.CollectiveError

# How long a rank spins for a post before it sleeps: longer than rank 0 takes between two steps of a busy server, which
# then start without a system call.
DEFAULT_SPIN_US = 1000.0


class Group(ABC):
    """One rank's end of a group."""

    recordable = True  # whether a recorded plan (ops.plan) replays its collectives

    def __init__(self, name: str, rank: int, size: int) -> None:
        self.name = name
        self.rank = rank
        self.size = size

    def all_reduce(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return the sum of all ranks' x, fp32 or bf16, in `out`; without one, in x itself."""
        out = x if out is None else out
        self._all_reduce(x, out)
        return out

    def all_reduce_add(self, x: Tensor, residual: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return residual + the sum of all ranks' x, rounded once, in `out`; without one, in residual itself.

        The residual must be the same on all ranks. x has its type, or is fp32 beside a bf16 residual.
        """
        out = residual if out is None else out
        self._all_reduce_add(x, residual, out)
        return out

    def all_gather(self, x: Tensor, *, dim: int = 0, out: Tensor | None = None) -> Tensor:
        """Return all ranks' x, concatenated along the first axis (dim 0) or the last (dim -1).

        Along the last axis `out` may be narrower than their sum: it has the first columns, and the ranks' columns
        beyond, which are padding, are dropped. Then both may be columns of wider tensors, and x may be its own part of
        `out`.
        """
        if dim not in (0, -1) or not x.dim():
            raise ValueError(
                f"all_gather: dim is {dim} of x with {x.dim()} axes, expected the first, 0, or the last, -1"
            )
        if out is None:
            shape = list(x.shape)
            shape[dim] *= self.size
            out = empty(tuple(shape), x.dtype)
        if dim == 0:
            self._all_gather(x, out)
        else:
            self._all_gather_columns(x, out)
        return out

    def reduce_scatter(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return this rank's part, of R equal ones along the first axis, of the sum of all ranks' x."""
        if out is None:
            if not x.dim() or x.shape[0] % self.size:
                raise ValueError(f"reduce_scatter: x is {list(x.shape)}, expected a multiple of {self.size} rows")
            out = empty((x.shape[0] // self.size, *x.shape[1:]), x.dtype)
        self._reduce_scatter(x, out)
        return out

    def all_reduce_norm(
        self,
        x_TD: Tensor,
        residual_TD: Tensor,
        weight_D: Tensor,
        eps: float,
        *,
        weight_plus_one: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """Add the sum of all ranks' x to residual, and return its RMSNorm; each is rounded once.

        Bits and types are those of all_reduce_add, then rms_norm. `out` may be x.
        """
        if out is None:
            out = empty(x_TD.shape, residual_TD.dtype)
        self._all_reduce_norm(x_TD, residual_TD, weight_D, out, eps, weight_plus_one)
        return out

    @abstractmethod
    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        """Return x of the rank `root`, in x, on all ranks."""

    @abstractmethod
    def barrier(self) -> None:
        """Return when all ranks have called it."""

    @abstractmethod
    def post(self) -> None:
        """Wake each other rank from one more wait_for_post, without waiting for them. On rank 0."""

    @abstractmethod
    def wait_for_post(self, spin_us: float = DEFAULT_SPIN_US) -> None:
        """Wait until rank 0 has posted once more than this rank has seen, however long that takes. On other ranks.

        Spins for `spin_us`, then sleeps. Signal handlers run meanwhile; if one raises, the wait ends, but not the
        group. Raises CollectiveError if a rank is lost or closes the group, after all earlier posts.
        """

    @abstractmethod
    def close(self) -> None:
        """Free what the group holds: later calls raise CollectiveError, on other ranks as well."""

    @abstractmethod
    def _all_reduce(self, x: Tensor, out: Tensor) -> None: ...

    @abstractmethod
    def _all_reduce_add(self, x: Tensor, residual: Tensor, out: Tensor) -> None: ...

    @abstractmethod
    def _all_gather(self, x: Tensor, out: Tensor) -> None: ...

    @abstractmethod
    def _all_gather_columns(self, x: Tensor, out: Tensor) -> None: ...

    @abstractmethod
    def _reduce_scatter(self, x: Tensor, out: Tensor) -> None: ...

    @abstractmethod
    def _all_reduce_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, eps: float, weight_plus_one: bool
    ) -> None: ...


class SingleGroup(Group):
    """A group of one rank: the result is x itself unless `out` is given."""

    def __init__(self, name: str = "single") -> None:
        super().__init__(name, rank=0, size=1)

    def all_gather(self, x: Tensor, *, dim: int = 0, out: Tensor | None = None) -> Tensor:
        return super().all_gather(x, dim=dim, out=x if out is None else out)

    def reduce_scatter(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        return super().reduce_scatter(x, out=x if out is None else out)

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        if root != 0:
            raise ValueError(f"broadcast: root is {root}, expected 0: the group has one rank")
        return x

    def barrier(self) -> None:
        pass

    def post(self) -> None:
        pass

    def wait_for_post(self, spin_us: float = DEFAULT_SPIN_US) -> None:
        raise ValueError("wait_for_post: this is rank 0, which posts")

    def close(self) -> None:
        pass

    def _all_reduce(self, x: Tensor, out: Tensor) -> None:
        if out is not x:
            kernels.copy_rows(view(x), view(out))

    def _all_gather(self, x: Tensor, out: Tensor) -> None:
        self._all_reduce(x, out)

    def _all_gather_columns(self, x: Tensor, out: Tensor) -> None:
        self._all_reduce(x, out)

    def _reduce_scatter(self, x: Tensor, out: Tensor) -> None:
        self._all_reduce(x, out)

    def _all_reduce_add(self, x: Tensor, residual: Tensor, out: Tensor) -> None:
        kernels.reduce(view(x), 1, view(residual), view(out))

    def _all_reduce_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, eps: float, weight_plus_one: bool
    ) -> None:
        if x.dtype == residual.dtype:
            rms_norm(x, weight, eps, residual=residual, weight_plus_one=weight_plus_one, out=out)
        else:
            self._all_reduce_add(x, residual, residual)
            rms_norm(residual, weight, eps, weight_plus_one=weight_plus_one, out=out)


def refuse_recording(what: str) -> None:
    """Raise if a plan is being recorded: it records only kernel calls, and would replay without this one."""
    if kernels.is_recording():
        raise ValueError(f"{what} cannot be part of a recorded plan")


class SharedMemoryGroup(Group):
    """Ranks that share the memory of a file descriptor, which may be closed after construction."""

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
