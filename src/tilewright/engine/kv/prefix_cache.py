"""KV pages of sequences: found in the prefix cache, allocated as tokens come, and released.

A full page is found by everything its keys and values depend on. In layers with a sliding window a sequence holds only
the pages that its next tokens see.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from tilewright.engine.kv.pages import PagePool
from tilewright.engine.schedule.sequence import Sequence, WindowPages
from tilewright.engine.schedule.step import SequenceResource

DIGEST_BYTES = 16


class PrefixCache:
    """Finds the pages of a sequence's prefix that another sequence has computed, and counts how often.

    The key of a full page is a digest of the previous page's digest, its token ids, their rope positions, the features
    among them and what they see by cross-attention, so equal digests mean equal keys and values. Generated tokens are
    stored too: the next turn of a conversation finds the answer. With `one_of_each`, a page that another sequence has
    computed as well is released, and the cached one used.
    """

    def __init__(self, pool: PagePool, *, enabled: bool = True, one_of_each: bool = False) -> None:
        self.pool = pool
        self.enabled = enabled
        self.one_of_each = one_of_each
        self.num_tokens_looked_up = 0
        self.num_tokens_hit = 0

    @property
    def hit_rate(self) -> float:
        return self.num_tokens_hit / max(1, self.num_tokens_looked_up)

    def match(self, sequence: Sequence) -> list[int]:
        """Return the pages of the longest cached prefix, retained; at least one token is left to compute its logits."""
        pages: list[int] = []
        if not self.enabled or sequence.needs_prompt_logprobs:
            return pages
        for index in range((sequence.num_tokens - 1) // self.pool.page_size):
            page = self.pool.find(self.digest(sequence, index))
            if page is None:
                break
            self.pool.retain(page)
            pages.append(page)
        return pages

    def count(self, sequence: Sequence, num_tokens_hit: int) -> None:
        """Count one look-up of an admitted sequence."""
        if self.enabled:
            self.num_tokens_looked_up += sequence.num_tokens
            self.num_tokens_hit += num_tokens_hit

    def store(self, sequence: Sequence) -> None:
        """Make the full pages findable that the sequence has computed since the last call."""
        if not self.enabled:
            return
        num_full = sequence.num_computed_tokens // self.pool.page_size
        for index in range(sequence.num_stored_pages, num_full):
            digest = self.digest(sequence, index)
            self.pool.name(sequence.pages[index], digest)
            if self.one_of_each:
                self._swap(sequence, index, digest)
        sequence.num_stored_pages = max(sequence.num_stored_pages, num_full)

    def _swap(self, sequence: Sequence, index: int, digest: bytes) -> None:
        page, found = sequence.pages[index], self.pool.find(digest)
        if found is not None and found != page:
            self.pool.retain(found)
            self.pool.release([page])
            sequence.pages[index] = found

    def digest(self, sequence: Sequence, index: int) -> bytes:
        """Return the digest of everything up to the end of a sequence's page."""
        digests = sequence.page_digests
        while len(digests) <= index:
            parent = digests[-1] if digests else bytes(DIGEST_BYTES)
            start = len(digests) * self.pool.page_size
            stop = start + self.pool.page_size
            state = blake2b(parent, digest_size=DIGEST_BYTES)
            state.update(array("q", sequence.token_ids[start:stop]).tobytes())
            state.update(sequence.positions(start, stop).tobytes())
            for span in sequence.feature_spans(start, stop):
                state.update(span.medium.key)
                state.update(struct.pack("<qqq", span.start - start, span.first_feature, span.length))
            for cross_span in sequence.cross_spans(start, stop):
                state.update(cross_span.group.key)
                state.update(
                    struct.pack("<qqq", cross_span.start - start, cross_span.stop - start, cross_span.num_states)
                )
            digests.append(state.digest())
        return digests[index]


class KvCacheManager(SequenceResource):
    """Allocates the pages of a pool to sequences; cached prefixes are reused."""

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
        """Return whether there are pages for all tokens of the sequence beside those the admitted ones need."""
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
        """Allocate pages up to num_tokens tokens; return False if there are too few."""
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


def pages_in_window(window: int, page_size: int) -> int:
    """Return the most pages that the tokens seen by one query lie in: itself and the window - 1 before it."""
    return (window - 2) // page_size + 2


class WindowCache(SequenceResource):
    """Allocates the pages of layers whose queries see `window` tokens.

    They are found by the same digests as those of layers that see all tokens, but pages that no later query sees are
    released while the sequence goes on; they can be found until they are evicted. A prompt continues from the end of a
    cached page if all pages that its next token sees are still cached.
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
        self._release_held(sequence)  # pages held by an earlier match
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
        """Return whether there are pages for the sequence's window beside those the admitted ones need."""
        needed = self._num_missing(sequence)
        promised = sum(1 + self._num_missing(item) for item in self._admitted)
        return not self._admitted or needed + promised <= self.pool.num_free

    def admit(self, sequence: Sequence, num_cached: int) -> None:
        self._admitted.add(sequence)

    def chunk_end(self, sequence: Sequence, start: int, stop: int, budget: int) -> int:
        return min(stop, (sequence.window_pages[self.window].stop + self.pool.num_free) * self.pool.page_size)

    def reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Allocate pages up to num_tokens tokens; return False if there are too few."""
        held = sequence.window_pages[self.window]
        missing = self.pool.pages_for(num_tokens) - held.stop
        if missing <= 0:
            return True
        if missing > self.pool.num_free:
            return False
        held.pages.extend(self.pool.allocate() for _ in range(missing))
        return True

    def commit(self, sequence: Sequence) -> None:
        """Make full pages findable, and release those that no token from the next one on sees."""
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
        self._release_held(sequence)
        self._admitted.discard(sequence)

    def _release_held(self, sequence: Sequence) -> None:
        held = sequence.window_pages.pop(self.window, None)
        if held is not None:
            self.pool.release(held.pages)

    def _first_seen(self, place: int) -> int:
        """Return the first page that the token at `place` sees."""
        return max(0, place - self.window + 1) // self.pool.page_size

    def _num_missing(self, sequence: Sequence) -> int:
        """Return how many more pages a sequence will hold at most, apart from those that only a large chunk needs."""
        held = sequence.window_pages[self.window]
        wanted = min(self.pool.pages_for(sequence.num_tokens) - held.first, self._num_in_window)
        return max(0, wanted - len(held.pages))


def window_stats(windows: Mapping[int, WindowCache]) -> dict[str, Any]:
    """Return the fields of `Stats` about the pages of all windows."""
    pools = [cache.pool for cache in windows.values()]
    return {
        "num_window_pages": sum(pool.num_pages for pool in pools),
        "num_window_pages_used": sum(pool.num_used for pool in pools),
    }
