"""Steps recorded once per shape and replayed: by our kernels (ops/plan.py), or as a device's graph."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from tilewright.ops.device import Device, Recording
from tilewright.ops.plan import Arena, Plan

# Python takes some 2 ms of a step of any size; steps with more tokens take a hundred times that.
MAX_RECORDED_TOKENS = 64
# A plan is some 300 calls of a few hundred bytes: this bounds clutter rather than memory.
MAX_PLANS = 128

Result = TypeVar("Result")


class RecordedSteps(Generic[Result]):
    """Results of a computation over fixed buffers, recorded per shape of their contents; the latest used are kept."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._recorded: OrderedDict[tuple[int, ...], tuple[Plan, Result]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._recorded)

    def run(self, shape: tuple[int, ...], compute: Callable[[], Result]) -> Result:
        """Return the result of `compute`: called and recorded for a new shape, replayed for a known one."""
        known = self._recorded.get(shape)
        if known is not None:
            self._recorded.move_to_end(shape)
            known[0].replay()
            return known[1]
        plan = Plan(self._arena)
        with plan.record():
            result = compute()
        self._recorded[shape] = plan, result
        if len(self._recorded) > MAX_PLANS:
            self._recorded.popitem(last=False)
        return result


# A recording is some 1,000 nodes, about 1 MB of the driver's memory, and its results; they share their scratch memory.
MAX_RECORDINGS = 64


_log = logging.getLogger(__name__)


class CapturedSteps(Generic[Result]):
    """Results of a computation over fixed buffers, recorded per shape of their contents; the latest used are kept.

    The first call with a shape runs op by op, which prepares libraries for it, the second is recorded, the others are
    replayed. If recording fails, all run op by op from then on, with one warning.
    """

    def __init__(self, device: Device, what: str) -> None:
        self._device = device
        self._what = what
        self._is_on = True
        self._seen: OrderedDict[Hashable, tuple[Recording, Result] | None] = OrderedDict()

    def __len__(self) -> int:
        return sum(known is not None for known in self._seen.values())

    def run(self, shape: Hashable, compute: Callable[[], Result]) -> Result:
        """Return the result of `compute`, valid until the next call."""
        if not self._is_on:
            return compute()
        if shape not in self._seen:
            self._keep(shape, None)
            return compute()
        known = self._seen[shape]
        self._seen.move_to_end(shape)
        if known is None:
            return self._record(shape, compute)
        known[0].replay()
        return known[1]

    def _record(self, shape: Hashable, compute: Callable[[], Result]) -> Result:
        try:
            known = self._device.record(compute)
        except Exception as error:
            reason = str(error).partition("\n")[0]
            _log.warning("%s cannot be recorded on %s and run op by op, slower: %s", self._what, self._device, reason)
            self._is_on = False
            self._seen.clear()
            return compute()
        self._keep(shape, known)
        return known[1]

    def _keep(self, shape: Hashable, known: tuple[Recording, Result] | None) -> None:
        self._seen[shape] = known
        if len(self._seen) > MAX_RECORDINGS:
            self._seen.popitem(last=False)
