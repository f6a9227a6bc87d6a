"""The KV pages of sequences: found in the prefix cache, taken as tokens come, given back."""

from __future__ import annotations

from typing import Any

from tilewright.engine.kv.pages import PagePool
from tilewright.engine.kv.prefix_cache import PrefixCache
from tilewright.engine.resource import SequenceResource
from tilewright.engine.sequence import Sequence


class KvCacheManager(SequenceResource):
    """Hands the pages of a pool out to sequences, those of known prefixes first."""

    def __init__(self, pool: PagePool, prefix_cache: PrefixCache) -> None:
        self.pool = pool
        self.prefix_cache = prefix_cache
        self._admitted: set[Sequence] = set()

    def match(self, sequence: Sequence, num_tokens: int) -> int:
        sequence.pages = self.prefix_cache.match(sequence)
        num_cached = len(sequence.pages) * self.pool.page_size
        if sequence.first_kept_token is not None:
            num_cached = min(num_cached, sequence.first_kept_token // self.pool.page_size * self.pool.page_size)
        sequence.branch_border = num_cached
        return num_cached

    def has_room(self, sequence: Sequence, num_cached: int) -> bool:
        """Whether there are pages for all tokens of the sequence beside what the admitted ones need."""
        num_pages, pool = num_cached // self.pool.page_size, self.pool
        pool.release(sequence.pages[num_pages:])
        del sequence.pages[num_pages:]
        needed = pool.pages_for(sequence.num_tokens) - num_pages
        # Each admitted sequence needs the rest of its prompt, and soon one more page.
        promised = sum(1 + max(0, pool.pages_for(item.num_tokens) - len(item.pages)) for item in self._admitted)
        return not self._admitted or needed + promised <= pool.num_free

    def admit(self, sequence: Sequence, num_cached: int) -> None:
        self.prefix_cache.count(sequence, num_cached)
        sequence.num_stored_pages = len(sequence.pages)
        self._admitted.add(sequence)

    def chunk_end(self, sequence: Sequence, start: int, stop: int, budget: int) -> int:
        return min(stop, (len(sequence.pages) + self.pool.num_free) * self.pool.page_size)

    def reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether the sequence has, or now got, pages for num_tokens."""
        missing = self.pool.pages_for(num_tokens) - len(sequence.pages)
        if missing <= 0:
            return True
        if missing > self.pool.num_free:
            return False
        sequence.pages.extend(self.pool.allocate() for _ in range(missing))
        return True

    def commit(self, sequence: Sequence) -> None:
        self.prefix_cache.store(sequence)

    def release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.pages)
        sequence.pages = []
        self._admitted.discard(sequence)

    def stats(self) -> dict[str, Any]:
        return {
            "num_pages": self.pool.num_pages,
            "num_pages_used": self.pool.num_used,
            "prefix_hit_rate": self.prefix_cache.hit_rate,
        }
