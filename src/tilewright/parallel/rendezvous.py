"""Opens a group of ranks in the launcher, and lets each rank join it.

    host = open_rendezvous(size=2)                       # in the launcher
    subprocess.Popen(..., pass_fds=host.pass_fds)        # with host.rendezvous.to_json() among the arguments
    ...
    group = make_group(Rendezvous.from_json(text), rank) # in each rank
    group.all_reduce(x)

A launcher that is itself a rank joins by host.make_group(rank). A launcher that sees a rank die calls host.abort(rank):
the others fail at once instead of after their timeout.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import socket
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from tilewright.ops.native import kernels
from tilewright.parallel.gloo import GlooGroup, mark_broken
from tilewright.parallel.group import Group, SharedMemoryGroup, SingleGroup

DEFAULT_TIMEOUT_S = 60.0
MAX_RANKS: int = kernels.max_ranks

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rendezvous:
    """Plain data that a rank needs to join its group."""

    size: int
    name: str
    timeout_s: float
    segment_fd: int | None = None  # shared memory, inherited under this number
    address: tuple[str, int] | None = None  # of the store through which gloo's ranks meet

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> Rendezvous:
        fields = json.loads(text)
        address = fields.pop("address")
        return Rendezvous(**fields, address=None if address is None else tuple(address))


class RendezvousHost:
    """The launcher's side of a group; it must outlive the ranks' start."""

    def __init__(self, rendezvous: Rendezvous, store: dist.TCPStore | None = None) -> None:
        self.rendezvous = rendezvous
        self._store = store
        self._segment_fd = rendezvous.segment_fd

    @property
    def pass_fds(self) -> tuple[int, ...]:
        """Descriptors that a rank must inherit, for subprocess.Popen."""
        return () if self._segment_fd is None else (self._segment_fd,)

    def make_group(self, rank: int) -> Group:
        """Join the group as the launcher's rank; the descriptor stays open for `abort`."""
        fd = self._segment_fd
        return make_group(dataclasses.replace(self.rendezvous, segment_fd=None if fd is None else os.dup(fd)), rank)

    def abort(self, rank: int) -> None:
        """Tell the group that this rank is gone: waiting ranks fail at once and name it.

        In a collective gloo's ranks notice it themselves: the connections of a dead process close.
        """
        if not 0 <= rank < self.rendezvous.size:
            raise ValueError(f"abort: rank is {rank}, expected 0 to {self.rendezvous.size - 1}")
        if self._segment_fd is not None:
            kernels.abort_group(self._segment_fd, rank)
        if self._store is not None:
            store = dist.PrefixStore(self.rendezvous.name, self._store)
            mark_broken(store, f"rank {rank} was lost; the group is broken")

    def close(self) -> None:
        """Close the store, and the memory, which lives on while a rank has it."""
        if self._segment_fd is not None:
            os.close(self._segment_fd)
        self._segment_fd = self._store = None

    def __enter__(self) -> RendezvousHost:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def open_rendezvous(
    size: int,
    *,
    name: str = "tp",
    timeout_s: float = DEFAULT_TIMEOUT_S,
    host: str | None = None,
    slot_bytes: int = kernels.default_slot_bytes,
) -> RendezvousHost:
    """Open a new group of `size` ranks, over shared memory, or over gloo if there is none.

    `host`, an address of this machine that ranks on other hosts can reach, selects gloo. `slot_bytes` bounds the shared
    memory: two slots per rank.
    """
    if not 1 <= size <= MAX_RANKS:
        raise ValueError(f"a group has {size} ranks, expected 1 to {MAX_RANKS}")
    if not 0 < timeout_s <= 1e6:
        raise ValueError(f"timeout_s is {timeout_s}, expected more than 0 and at most 1e6")
    rendezvous = Rendezvous(size, name, timeout_s)
    if size == 1:
        return RendezvousHost(rendezvous)
    if host is None:
        try:
            segment_fd = kernels.create_segment(size, slot_bytes)
            return RendezvousHost(dataclasses.replace(rendezvous, segment_fd=segment_fd))
        except OSError as error:
            _log.warning("group '%s': no shared memory (%s), its ranks use gloo", name, str(error))
    # Bound here: the store would listen on every address of the machine, without authentication.
    listener = socket.create_server((host or "127.0.0.1", 0))
    own_host, port = listener.getsockname()[:2]
    store = dist.TCPStore(
        own_host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )
    return RendezvousHost(dataclasses.replace(rendezvous, address=(own_host, port)), store)


def make_group(rendezvous: Rendezvous, rank: int) -> Group:
    """Join the group as this rank. The inherited descriptor of shared memory is closed."""
    group: Group
    if rendezvous.segment_fd is not None:
        group = SharedMemoryGroup(rendezvous.segment_fd, rank, rendezvous.name, rendezvous.timeout_s)
        os.close(rendezvous.segment_fd)
        kind = "shared memory"
    elif rendezvous.address is not None:
        group = GlooGroup(rendezvous.address, rank, rendezvous.size, rendezvous.name, rendezvous.timeout_s)
        kind = "gloo at {}:{}".format(*rendezvous.address)
    else:
        if rendezvous.size != 1 or rank != 0:
            raise ValueError(f"rank {rank} of {rendezvous.size} has nothing to meet at, only rank 0 of 1 needs nothing")
        group, kind = SingleGroup(rendezvous.name), "alone"
    _log.info("group '%s': rank %d of %d, %s", group.name, rank, group.size, kind)
    return group
