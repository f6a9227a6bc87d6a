"""Small batches recorded once per shape and replayed natively (ops/plan.py)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from tilewright.ops.plan import Arena, Plan

# Python's share of a step is some 2 ms whatever its size: above so many tokens a step takes a hundred times that.
MAX_RECORDED_TOKENS = 64
# A plan is some 300 calls of a few hundred bytes, so this is a bound on clutter rather than on memory.
MAX_PLANS = 128

Result = TypeVar("Result")


class RecordedSteps(Generic[Result]):
    """What a computation over fixed buffers gives, by the shape of what is in them; the latest used are kept."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._recorded: OrderedDict[tuple[int, ...], tuple[Plan, Result]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._recorded)

    def run(self, shape: tuple[int, ...], compute: Callable[[], Result]) -> Result:
        """What `compute` gives: called and recorded for a shape that is new, replayed for one that is not."""
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
