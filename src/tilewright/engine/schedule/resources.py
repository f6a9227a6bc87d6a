"""All memory that running sequences hold, behind one interface."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from tilewright.engine.kv.prefix_cache import KvCacheManager, WindowCache, window_stats
from tilewright.engine.kv.state import StateCache
from tilewright.engine.media.scheduler import MediaScheduler
from tilewright.engine.schedule.sequence import Sequence
from tilewright.engine.schedule.step import Chunk, SequenceResource, Step


class SequenceResources:
    """KV pages, encoder outputs and, in models with such layers, pages of windows and recurrent states.

    A sequence is admitted by all of them or by none. KV pages come first: the others only shorten the prefix that they
    match.
    """

    def __init__(
        self,
        kv: KvCacheManager,
        media: MediaScheduler,
        states: StateCache | None = None,
        windows: Iterable[WindowCache] = (),
    ) -> None:
        self.kv = kv
        self.media = media
        self.states = states
        self.windows = {cache.window: cache for cache in windows}
        self._all: list[SequenceResource] = [kv, *self.windows.values(), *([] if states is None else [states]), media]
        self.max_drafts_per_step = min(resource.max_drafts_per_step for resource in self._all)
        self.can_repeat_steps = all(resource.can_repeat_steps for resource in self._all)
        # Called for each sequence of a step: only on resources that override the default. Of all only keys and values
        # grow with every token.
        self.reserve = self._reserve_all if self.windows else kv.reserve
        self._shorten = self._overriding("match")[1:]  # of all but `kv`: they match at most what it does
        self._begin_step = self._overriding("begin_step")
        self._is_ready = self._overriding("is_ready")
        self._draft_room = self._overriding("draft_room")
        self._plan = self._overriding("plan")
        self._commit = self._overriding("commit")

    def _reserve_all(self, sequence: Sequence, num_tokens: int) -> bool:
        pools: list[KvCacheManager | WindowCache] = [self.kv, *self.windows.values()]
        return all(pool.reserve(sequence, num_tokens) for pool in pools)

    def _overriding(self, name: str) -> list[Callable[..., Any]]:
        default = getattr(SequenceResource, name)
        return [getattr(item, name) for item in self._all if getattr(type(item), name) is not default]

    def check(self, sequence: Sequence) -> None:
        """Raise RequestError for a sequence that could never be held."""
        for resource in self._all:
            resource.check(sequence)

    def begin_step(self) -> None:
        for begin_step in self._begin_step:
            begin_step()

    def admit(self, sequence: Sequence) -> int | None:
        """Give a waiting sequence what it needs, and return how many of its tokens are cached; None: no room."""
        num_cached = self._match(sequence)
        if not all(resource.has_room(sequence, num_cached) for resource in self._all):
            self.release(sequence)
            return None
        for resource in self._all:
            resource.admit(sequence, num_cached)
        return num_cached

    def _match(self, sequence: Sequence) -> int:
        """Return how many tokens all resources have cached: if one has fewer, the others match again."""
        num_cached, found = -1, self.kv.match(sequence, sequence.num_tokens)
        while found != num_cached:
            num_cached = found
            for match in self._shorten:
                found = match(sequence, found)
        return num_cached

    def chunk_end(self, step: Step, sequence: Sequence, start: int, stop: int, budget: int) -> int:
        """Return where a prompt's chunk of at most `stop` ends; what it reads is ready, or made in this step."""
        stop = ready = self._chunk_end(sequence, start, stop, budget)
        for resource in self._all:
            ready = resource.prepare(step, sequence, start, ready)
        if ready < stop:
            end = self._chunk_end(sequence, start, ready, budget)
            if end > start or step.chunks:  # else nothing would be computed at all
                return end
        return ready

    def _chunk_end(self, sequence: Sequence, start: int, stop: int, budget: int) -> int:
        for resource in self._all:
            stop = resource.chunk_end(sequence, start, stop, budget)
        return stop

    def ready(self, sequences: list[Sequence]) -> list[Sequence]:
        """Return the decoding sequences whose next token has all its inputs."""
        for is_ready in self._is_ready:
            sequences = [sequence for sequence in sequences if is_ready(sequence)]
        return sequences

    def draft_room(self) -> int:
        """Return how many drafts a sequence may have now."""
        room = sys.maxsize
        for draft_room in self._draft_room:
            room = min(room, draft_room())
        return room

    def plan(self, chunk: Chunk) -> None:
        """Allocate the memory that a chunk writes to, beyond its pages."""
        for plan in self._plan:
            plan(chunk)

    def commit(self, sequence: Sequence) -> None:
        """Record that the tokens computed so far are final, so that the prefix cache may share them."""
        for commit in self._commit:
            commit(sequence)

    def release(self, sequence: Sequence) -> None:
        """Release all that a sequence holds."""
        for resource in self._all:
            resource.release(sequence)

    def stats(self) -> dict[str, Any]:
        """Return the fields of `Stats` about memory."""
        own = {name: value for resource in self._all for name, value in resource.stats().items()}
        return {**own, **window_stats(self.windows)}
