"""The prefix cache: full pages of keys and values, found again by everything they depend on."""

from __future__ import annotations

import struct
from array import array
from hashlib import blake2b

from tilewright.engine.kv.pages import PagePool
from tilewright.engine.sequence import Sequence

DIGEST_BYTES = 16


class PrefixCache:
    """Finds the pages of a sequence's prefix that another one has computed, and counts how often.

    A full page is keyed by a digest over the digest of the page before it, its token ids, their rope positions, the
    features among them and what they see by cross-attention, so equal digests mean equal keys and values. Generated
    tokens are stored too: the next turn of a conversation finds the answer. With `one_of_each`, a page that another
    sequence has computed as well is released, and the cached one used.
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
        """The pages of the longest cached prefix, retained; at least one token is left to compute, for its logits."""
        pages: list[int] = []
        if not self.enabled or sequence.wants_prompt_logprobs:
            return pages
        for index in range((sequence.num_tokens - 1) // self.pool.page_size):
            page = self.pool.find(self.digest(sequence, index))
            if page is None:
                break
            self.pool.retain(page)
            pages.append(page)
        return pages

    def count(self, sequence: Sequence, num_tokens_hit: int) -> None:
        """Counts one look-up of a sequence that was admitted."""
        if self.enabled:
            self.num_tokens_looked_up += sequence.num_tokens
            self.num_tokens_hit += num_tokens_hit

    def store(self, sequence: Sequence) -> None:
        """Makes the full pages findable that the sequence has computed since the last call."""
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
        """The digest of everything up to the end of a sequence's page."""
        digests = sequence.page_digests
        while len(digests) <= index:
            parent = digests[-1] if digests else bytes(DIGEST_BYTES)
            start = len(digests) * self.pool.page_size
            stop = start + self.pool.page_size
            state = blake2b(parent, digest_size=DIGEST_BYTES)
            state.update(array("q", sequence.token_ids[start:stop]).tobytes())
            state.update(sequence.positions(start, stop).tobytes())
            for run in sequence.features_in(start, stop):
                state.update(run.medium.key)
                state.update(struct.pack("<qqq", run.start - start, run.first_feature, run.length))
            for cross_span in sequence.cross_spans(start, stop):
                state.update(cross_span.group.key)
                state.update(
                    struct.pack("<qqq", cross_span.start - start, cross_span.stop - start, cross_span.num_states)
                )
            digests.append(state.digest())
        return digests[index]
