"""Splits a model over the ranks of a group while it is built: each layer asks for its part.

    with partition.use(Partition(group)) as parts:
        model = family.build(config, shapes)     # layers hold this rank's heads, widths and rows
    parts.warn()                                 # log once what was padded

Linears that read a part of their inputs compute a partial sum and add it up with the other ranks; those that compute a
part of their outputs leave it to the next one to read, or gather it (layers/linear.py). Norms, the router of experts
and position tables are whole on every rank: they are small, and all of them are read for every token.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Generic, TypeVar

from tilewright.parallel.group import Group, SingleGroup
from tilewright.weights.spec import PADDING, HeadShard, Shard, heads_together, split_heads, split_width

T = TypeVar("T")


class ThreadSetting(threading.local, Generic[T]):
    """A value per thread: `make_default()`, or the one given to `use`."""

    def __init__(self, make_default: Callable[[], T]) -> None:  # called again on each thread that reads it
        self._value = make_default()

    def current(self) -> T:
        return self._value

    @contextlib.contextmanager
    def use(self, value: T) -> Iterator[T]:
        before, self._value = self._value, value
        try:
            yield value
        finally:
            self._value = before


_log = logging.getLogger(__name__)


class Partition:
    """Computes this rank's parts. `padded` and `copied` record axes that did not divide, with totals over all ranks."""

    def __init__(self, group: Group, block: int = 1) -> None:
        """Take the ranks; `block` entries of each axis share a scale in a quantised checkpoint and stay together."""
        self.group = group
        self.block = block
        self.padded: dict[tuple[str, int], int] = {}
        self.copied: dict[tuple[str, int], int] = {}  # KV heads that queries of several ranks read

    @property
    def is_split(self) -> bool:
        return self.group.size > 1

    def heads(self, what: str, num_queries: int, num_keys: int | None, *head_widths: int) -> HeadShard:
        """Return this rank's query heads and the kv heads they read; `num_keys`: None if each query has its own."""
        keys = num_queries if num_keys is None else num_keys
        together = heads_together(self.block, *head_widths) if self.is_split else 1
        shard = split_heads(num_queries, keys, self.group.rank, self.group.size, together)
        _record(self.padded, f"{what} heads", num_queries, shard.num_queries * self.group.size)
        if num_keys is not None:
            is_cut = shard.num_queries // shard.num_keys < num_queries // keys
            _record(self.copied if is_cut else self.padded, f"{what} KV heads", keys, shard.num_keys * self.group.size)
        return shard

    def width(self, what: str, width: int) -> Shard:
        """Return this rank's entries of an axis."""
        shard = split_width(width, self.group.rank, self.group.size, self.block)
        _record(self.padded, what, width, shard.length * self.group.size)
        return shard

    def on_first_rank(self, length: int) -> Shard:
        """Return an axis that the first rank has, with zeros on others: a bias that is added to a sum over ranks."""
        return Shard.whole(length) if self.group.rank == 0 else Shard(((PADDING, length),))

    def warn(self) -> None:
        """Log what was padded and copied, once, on the first rank."""
        if self.group.rank != 0:
            return
        for how, noted in (("padded with zeros", self.padded), ("kept by each rank that reads them", self.copied)):
            parts = ", ".join(f"{what} {count} to {total}" for (what, count), total in noted.items())
            if parts:
                _log.warning("the model does not divide by %d ranks; %s: %s", self.group.size, how, parts)


def _record(noted: dict[tuple[str, int], int], what: str, count: int, total: int) -> None:
    if total != count:
        noted[what, count] = total


_setting = ThreadSetting(lambda: Partition(SingleGroup()))


def current() -> Partition:
    """Return the partition of layers that this thread builds; a single rank outside `use`."""
    return _setting.current()


def use(partition: Partition) -> AbstractContextManager[Partition]:
    return _setting.use(partition)
