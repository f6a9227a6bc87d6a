"""Pages of the KV cache, which are free, in use or hold a cached prefix, and the types of their values."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch

from tilewright.types import RequestError

_BYTE_DTYPES = {"auto": None, "int8": torch.int8, "fp8": torch.float8_e4m3fn}


def kv_byte_dtype(name: str) -> torch.dtype | None:
    """Return the 8-bit type named by kv_cache_dtype; None for "auto", the model's own type."""
    if name not in _BYTE_DTYPES:
        raise RequestError(f"kv_cache_dtype is {name!r}, expected {', '.join(_BYTE_DTYPES)}")
    return _BYTE_DTYPES[name]


PAGE_SIZE = 64  # tokens


class PagePool:
    """num_pages reference-counted pages of page_size tokens.

    A page may have a digest that names its content (see `prefix_cache`). Without references it can still be found,
    until it is the least recently used one and a page is needed.
    """

    def __init__(self, num_pages: int, page_size: int = PAGE_SIZE) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"a pool of {num_pages} pages of {page_size} tokens, expected at least 1 of each")
        self.num_pages = num_pages
        self.page_size = page_size
        self.on_forget: Callable[[bytes], None] = lambda digest: None  # called for each page that loses its digest
        self._references = [0] * num_pages
        self._digests: list[bytes | None] = [None] * num_pages
        self._page_by_digest: dict[bytes, int] = {}
        self._empty = list(range(num_pages - 1, -1, -1))
        self._reusable: OrderedDict[int, None] = OrderedDict()  # named and unreferenced, least recently used first
        self.num_touched = 0  # pages allocated at least once: the others take no memory yet

    @property
    def num_tokens(self) -> int:
        return self.num_pages * self.page_size

    @property
    def num_free(self) -> int:
        """Pages that can be allocated."""
        return len(self._empty) + len(self._reusable)

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_free

    @property
    def num_named(self) -> int:
        return len(self._page_by_digest)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def allocate(self) -> int:
        """Return a page with one reference, the caller's. Empty pages are used first, then the least recently used."""
        if not self._empty:
            if not self._reusable:
                raise RuntimeError(f"all {self.num_pages} pages are in use")
            digest = self._digests[next(iter(self._reusable))]
            assert digest is not None
            self.forget(digest)
        page = self._empty.pop()
        self.num_touched = max(self.num_touched, page + 1)  # untouched pages are allocated in order
        self._references[page] = 1
        return page

    def find(self, digest: bytes) -> int | None:
        """Return the page with that content, or None."""
        return self._page_by_digest.get(digest)

    def retain(self, page: int) -> None:
        """Add a reference to a page."""
        if self._references[page] == 0:
            del self._reusable[page]
        self._references[page] += 1

    def release(self, pages: list[int]) -> None:
        """Remove a reference from each page. The last one is evicted first: it is useless without those before it."""
        for page in reversed(pages):
            if self._references[page] == 0:
                raise RuntimeError(f"page {page} is released, but has no references")
            self._references[page] -= 1
            if self._references[page] == 0:
                if self._digests[page] is None:
                    self._empty.append(page)
                else:
                    self._reusable[page] = None

    def name(self, page: int, digest: bytes) -> None:
        """Make the page findable by its content, unless another page already is."""
        if digest not in self._page_by_digest and self._digests[page] is None:
            self._page_by_digest[digest] = page
            self._digests[page] = digest

    def forget(self, digest: bytes) -> None:
        """Remove the digest from its page, if there is one; references to the page stay."""
        page = self._page_by_digest.pop(digest, None)
        if page is None:
            return
        self._digests[page] = None
        if self._references[page] == 0:
            del self._reusable[page]
            self._empty.append(page)
        self.on_forget(digest)

    def clear(self) -> None:
        """Forget the content of all pages, also of those in use."""
        for digest in list(self._page_by_digest):
            self.forget(digest)
