"""A group over torch's gloo: for ranks on several hosts, and for machines without memfd.

Gloo moves the bytes; the sums are computed here, by the kernel of the shared-memory group, so that they have the same
bits. Gloo's own all_reduce sums in the order of its ring, and bf16 in bf16.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tilewright.ops.native import kernels, view, view_or_none
from tilewright.ops.norm import rms_norm
from tilewright.parallel.group import DEFAULT_SPIN_US, CollectiveError, Group, refuse_recording

# Up to this size every rank sums everything itself: one exchange instead of two.
_ONE_PHASE_BYTES = 64 * 1024
# Time that a rank whose operation failed waits for the others to report the same.
_ROLL_CALL_S = 2.0
# Interval at which a wait returns to Python, which then runs signal handlers.
_SIGNAL_CHECK = timedelta(milliseconds=100)


class GlooGroup(Group):
    """Ranks that find each other through a torch TCPStore at `address`, which the launcher serves."""

    recordable = False

    def __init__(self, address: tuple[str, int], rank: int, size: int, name: str, timeout_s: float) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank is {rank}, expected 0 to {size - 1}")
        super().__init__(name, rank, size)
        timeout = timedelta(seconds=timeout_s)
        self._timeout_s = timeout_s
        self._num_operations = 0
        self._failure: str | None = None
        self._num_posts = 0  # made by rank 0, or seen by this rank
        tcp = dist.TCPStore(*address, is_master=False, timeout=timeout)
        self._store = dist.PrefixStore(name, tcp)
        # Not init_process_group, which allows one group per process. Torch has types for a part of it only.
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timeout
        options._devices = [gloo.create_device(hostname=_own_address(address))]
        self._gloo = gloo(self._store, rank, size, options)

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        if not 0 <= root < self.size:
            raise ValueError(f"broadcast: root is {root}, expected 0 to {self.size - 1}")
        options = dist.BroadcastOptions()
        options.rootRank = root
        whole = _bytes_of("broadcast", "x", x)
        self._run("broadcast", lambda gloo: gloo.broadcast([whole], options))
        return x

    def barrier(self) -> None:
        self._run("barrier", lambda gloo: gloo.barrier())

    def post(self) -> None:
        if self.rank != 0:
            raise ValueError(f"post: this is rank {self.rank}, only rank 0 posts")
        self._check_usable("post")
        with self._store_errors("post"):
            self._store.set(f"post/{self._num_posts}", "1")
        self._num_posts += 1

    def wait_for_post(self, spin_us: float = DEFAULT_SPIN_US) -> None:
        """Wait as Group.wait_for_post, asleep at once on the launcher's store; a lost rank is noticed within 100 ms."""
        if self.rank == 0:
            raise ValueError("wait_for_post: this is rank 0, which posts")
        self._check_usable("wait_for_post")
        post = f"post/{self._num_posts}"
        with self._store_errors("wait_for_post"):
            while not self._appears(post):
                # Checked again once the group is broken: earlier posts are still seen.
                if self._store.check(["broken"]) and not self._store.check([post]):
                    self._failure = self._store.get("broken").decode()
                    self._check_usable("wait_for_post")
            seen = f"seen/{self._num_posts}"
            if self._store.add(seen, 1) == self.size - 1:  # the last rank to see it deletes it: the store does not grow
                self._store.delete_key(post)
                self._store.delete_key(seen)
        self._num_posts += 1

    def close(self) -> None:
        if self._gloo is not None:
            with contextlib.suppress(RuntimeError):  # the store is gone, and so are the other ranks
                mark_broken(self._store, f"rank {self.rank} has closed the group")
        self._gloo = None

    def _all_reduce(self, x: Tensor, out: Tensor) -> None:
        _check_out("all_reduce", out, x.numel(), x.dtype)
        self._reduce("all_reduce", x, None, out)

    def _all_reduce_add(self, x: Tensor, residual: Tensor, out: Tensor) -> None:
        _check_residual("all_reduce_add", x, residual)
        _check_out("all_reduce_add", out, x.numel(), residual.dtype)
        self._reduce("all_reduce_add", x, residual, out)

    def _all_gather(self, x: Tensor, out: Tensor) -> None:
        _check_out("all_gather", out, self.size * x.numel(), x.dtype)
        out.view(-1).copy_(self._gather("all_gather", x))

    def _all_gather_columns(self, x: Tensor, out: Tensor) -> None:
        width = x.shape[-1]
        if out.dtype != x.dtype or out.shape[:-1] != x.shape[:-1] or out.shape[-1] > self.size * width:
            raise ValueError(
                f"all_gather: x is {x.dtype} {list(x.shape)} and out {out.dtype} {list(out.shape)}, expected out to "
                f"have the same rows of at most {self.size * width} columns, {width} per rank"
            )
        parts = self._gather("all_gather", x.contiguous()).view(self.size, *x.shape)
        out.copy_(torch.cat(tuple(parts), dim=-1)[..., : out.shape[-1]])

    def _reduce_scatter(self, x: Tensor, out: Tensor) -> None:
        _check_summable("reduce_scatter", x)
        if x.numel() % self.size:
            raise ValueError(f"reduce_scatter: x is {list(x.shape)}, expected a part for each of {self.size} ranks")
        _check_out("reduce_scatter", out, x.numel() // self.size, x.dtype)
        self._sum(self._exchange("reduce_scatter", x), None, out)

    def _all_reduce_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, eps: float, weight_plus_one: bool
    ) -> None:
        _check_residual("all_reduce_norm", x, residual)
        _check_out("all_reduce_norm", out, x.numel(), residual.dtype)
        self._reduce("all_reduce_norm", x, residual, residual)
        rms_norm(residual, weight, eps, weight_plus_one=weight_plus_one, out=out)

    def _reduce(self, operation: str, x: Tensor, addend: Tensor | None, out: Tensor) -> None:
        """Compute out = the sum over ranks of x, + addend."""
        _check_summable(operation, x)
        if x.numel() * x.itemsize <= _ONE_PHASE_BYTES:
            return self._sum(self._gather(operation, x), addend, out)
        length = -(-x.numel() // self.size)  # of a rank's slice; the last slice may be shorter, but is sent padded
        padded = _padded(x, length * self.size)
        mine = slice(self.rank * length, (self.rank + 1) * length)
        own_addend = None if addend is None else _padded(addend, length * self.size)[mine]
        own_sum = torch.empty(length, dtype=out.dtype)
        self._sum(self._exchange(operation, padded), own_addend, own_sum)
        out.view(-1).copy_(self._gather(operation, own_sum)[: x.numel()])

    def _sum(self, parts: Tensor, addend: Tensor | None, out: Tensor) -> None:
        """Sum parts in fp32 and in order, the addend last; round once."""
        kernels.reduce(view(parts), self.size, view_or_none(addend), view(out))

    def _gather(self, operation: str, x: Tensor) -> Tensor:
        """Return all ranks' x as one row."""
        out = torch.empty(self.size * x.numel(), dtype=x.dtype)
        whole, whole_out = _bytes_of(operation, "x", x), out.view(torch.uint8)
        self._run(operation, lambda gloo: gloo._allgather_base(whole_out, whole))
        return out

    def _exchange(self, operation: str, x: Tensor) -> Tensor:
        """Return this rank's part of every rank's x as one row."""
        out = torch.empty_like(x)
        whole, whole_out = _bytes_of(operation, "x", x), out.view(-1).view(torch.uint8)
        self._run(operation, lambda gloo: gloo.alltoall_base(whole_out, whole, [], []))
        return out

    def _run(self, operation: str, start: Callable[[Any], Any]) -> None:
        self._num_operations += 1
        self._check_usable(operation)
        try:
            self._finish(operation, start(self._gloo))
        except CollectiveError:
            raise
        except BaseException:  # raised by a signal handler: the others' operation is lost
            self._break(f"rank {self.rank} was interrupted at operation {self._num_operations}")
            raise

    def _check_usable(self, operation: str) -> None:
        refuse_recording(f"{operation} of a gloo group")
        if self._gloo is None:
            raise CollectiveError(f"group '{self.name}': {operation} after close")
        if self._failure:
            raise CollectiveError(f"{self._where(operation)}: {self._failure}")

    def _where(self, operation: str) -> str:
        number = "" if operation in ("post", "wait_for_post") else f", operation {self._num_operations}"
        return f"group '{self.name}', {operation}{number}"

    def _finish(self, operation: str, work: Any) -> None:
        """Wait for an operation that gloo has begun, and run signal handlers meanwhile."""
        while not work.is_completed():
            with contextlib.suppress(RuntimeError):  # timeout of this wait, or a failure, which is raised below
                work.wait(_SIGNAL_CHECK)
        try:
            work.wait()
        except RuntimeError as error:
            self._break(self._name_missing() or f"gloo failed ({str(error).splitlines()[0]})")
            raise CollectiveError(f"{self._where(operation)}: {self._failure}") from error

    def _break(self, reason: str) -> None:
        """Mark the group as unusable, and notify ranks that wait for a post."""
        self._failure = f"{reason}; the group is broken"
        with contextlib.suppress(RuntimeError):
            mark_broken(self._store, self._failure)

    def _appears(self, key: str) -> bool:
        """Return whether the store has the key, now or within 100 ms."""
        try:
            self._store.wait([key], _SIGNAL_CHECK)
        except dist.DistStoreError:  # not yet
            return False
        return True

    @contextlib.contextmanager
    def _store_errors(self, operation: str) -> Iterator[None]:
        try:
            yield
        except dist.DistError as error:
            self._failure = "the launcher's store is gone; the group is broken"
            raise CollectiveError(f"{self._where(operation)}: {self._failure}") from error

    def _name_missing(self) -> str | None:
        """Return the ranks that do not report the same failure: those that caused it."""
        missing = set(range(self.size))
        deadline = time.monotonic() + _ROLL_CALL_S
        try:
            self._store.set(f"failed/{self.rank}", "1")
            while missing and time.monotonic() < deadline:
                missing = {rank for rank in missing if not self._store.check([f"failed/{rank}"])}
                time.sleep(0.02)
        except RuntimeError:
            return "the launcher's store is gone"
        names = ", ".join(map(str, sorted(missing)))
        return f"rank {names} was lost or did not arrive within {self._timeout_s:g} s" if missing else None


def mark_broken(store: dist.Store, reason: str) -> None:
    """Notify ranks that wait for a post; the first reason is kept."""
    store.compare_set("broken", "", reason)


def _check_summable(operation: str, x: Tensor) -> None:
    if x.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"{operation}: x is {x.dtype}, expected torch.float32 or torch.bfloat16")


def _check_residual(operation: str, x: Tensor, residual: Tensor) -> None:
    fits = residual.dtype == x.dtype or (x.dtype, residual.dtype) == (torch.float32, torch.bfloat16)
    if not fits or residual.numel() != x.numel() or not residual.is_contiguous():
        raise ValueError(
            f"{operation}: residual is {residual.dtype} {list(residual.shape)} with strides {residual.stride()}, "
            f"expected {x.numel()} elements of {x.dtype}, or of torch.bfloat16 for x of torch.float32, contiguous"
        )


def _check_out(operation: str, out: Tensor, count: int, dtype: torch.dtype) -> None:
    if out.numel() != count or out.dtype != dtype or not out.is_contiguous():
        raise ValueError(
            f"{operation}: out is {out.dtype} {list(out.shape)} with strides {out.stride()}, expected {count} elements "
            f"of {dtype}, contiguous"
        )


def _bytes_of(operation: str, name: str, x: Tensor) -> Tensor:
    if not x.is_contiguous():
        raise ValueError(
            f"{operation}: {name} has strides {x.stride()} for shape {list(x.shape)}, it must be contiguous"
        )
    return x.view(-1).view(torch.uint8)


def _padded(x: Tensor, length: int) -> Tensor:
    padded = torch.zeros(length, dtype=x.dtype)
    padded[: x.numel()] = x.view(-1)
    return padded


def _own_address(peer: tuple[str, int]) -> str:
    """Return this host's address on the route to `peer`; no packet is sent."""
    family = socket.getaddrinfo(*peer, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(peer)
        return probe.getsockname()[0]
