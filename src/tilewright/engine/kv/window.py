"""The KV pages of layers with a sliding window: a sequence holds those alone that its next tokens see."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilewright.engine.kv.pages import PagePool
from tilewright.engine.kv.prefix_cache import PrefixCache
from tilewright.engine.resource import SequenceResource
from tilewright.engine.sequence import Sequence, WindowPages


def pages_in_window(window: int, page_size: int) -> int:
    """Return how many pages the tokens that one query sees lie in at most: it and the window - 1 before it."""
    return (window - 2) // page_size + 2


class WindowCache(SequenceResource):
    """Hands out the pages of the layers whose queries see `window` tokens.

    They are computed beside those of layers that see all tokens, and found by the same digests, but pages that no later
    query sees are given back while the sequence goes on. Given back is not forgotten: a page stays findable until it is
    the least recently used one and a page is needed. A prompt continues from the end of a cached page if all pages that
    its next token sees are still there.
    """

    def __init__(self, window: int, pool: PagePool, prefix_cache: PrefixCache) -> None:
        self.window, self.pool = window, pool
        self._prefix_cache = prefix_cache
        self._num_in_window = pages_in_window(window, pool.page_size)
        if pool.num_pages < self._num_in_window:
            raise ValueError(
                f"{pool.num_pages} pages of {pool.page_size} tokens for a window of {window}, expected at least "
                f"{self._num_in_window}: with fewer no sequence could go on"
            )
        self._admitted: set[Sequence] = set()

    def match(self, sequence: Sequence, num_tokens: int) -> int:
        """Hold the pages before the last page end, up to num_tokens, whose window is cached; return that end."""
        self._give_back(sequence)  # what an earlier look held
        end = index = num_tokens // self.pool.page_size
        while index > self._first_seen(end * self.pool.page_size):
            index -= 1
            if self.pool.find(self._prefix_cache.digest(sequence, index)) is None:
                end = index  # a later end would need this page too
        found = [self.pool.find(self._prefix_cache.digest(sequence, page)) for page in range(index, end)]
        pages = [page for page in found if page is not None]
        for page in pages:
            self.pool.retain(page)
        sequence.window_pages[self.window] = WindowPages(index, pages, num_stored=end)
        return end * self.pool.page_size

    def has_room(self, sequence: Sequence, num_cached: int) -> bool:
        """Whether there are pages for the sequence's window beside those that admitted ones need."""
        needed = self._num_missing(sequence)
        promised = sum(1 + self._num_missing(item) for item in self._admitted)
        return not self._admitted or needed + promised <= self.pool.num_free

    def admit(self, sequence: Sequence, num_cached: int) -> None:
        self._admitted.add(sequence)

    def chunk_end(self, sequence: Sequence, start: int, stop: int, budget: int) -> int:
        return min(stop, (sequence.window_pages[self.window].stop + self.pool.num_free) * self.pool.page_size)

    def reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether the sequence has, or now got, pages for tokens up to num_tokens."""
        held = sequence.window_pages[self.window]
        missing = self.pool.pages_for(num_tokens) - held.stop
        if missing <= 0:
            return True
        if missing > self.pool.num_free:
            return False
        held.pages.extend(self.pool.allocate() for _ in range(missing))
        return True

    def commit(self, sequence: Sequence) -> None:
        """Make full pages findable, and give back those that neither the next token sees nor any after it."""
        held, num_tokens = sequence.window_pages[self.window], sequence.num_computed_tokens
        if self._prefix_cache.enabled:
            num_full = num_tokens // self.pool.page_size
            for index in range(held.num_stored, num_full):
                self.pool.name(held.pages[index - held.first], self._prefix_cache.digest(sequence, index))
            held.num_stored = max(held.num_stored, num_full)
        num_behind = self._first_seen(num_tokens) - held.first
        if num_behind > 0:
            self.pool.release(held.pages[:num_behind])
            del held.pages[:num_behind]
            held.first += num_behind

    def release(self, sequence: Sequence) -> None:
        self._give_back(sequence)
        self._admitted.discard(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        held = sequence.window_pages.pop(self.window, None)
        if held is not None:
            self.pool.release(held.pages)

    def _first_seen(self, place: int) -> int:
        """The first page that the token at `place` sees."""
        return max(0, place - self.window + 1) // self.pool.page_size

    def _num_missing(self, sequence: Sequence) -> int:
        """Pages that a sequence will hold one day and does not yet. Those of a large chunk are its step's alone."""
        held = sequence.window_pages[self.window]
        wanted = min(self.pool.pages_for(sequence.num_tokens) - held.first, self._num_in_window)
        return max(0, wanted - len(held.pages))


def window_stats(windows: Mapping[int, WindowCache]) -> dict[str, Any]:
    """The fields of `Stats` about the pages of all windows."""
    pools = [cache.pool for cache in windows.values()]
    return {
        "num_window_pages": sum(pool.num_pages for pool in pools),
        "num_window_pages_used": sum(pool.num_used for pool in pools),
    }
