"""How the memory for keys, values and recurrent states is shared out."""

from __future__ import annotations

from tilewright.host_memory import available_bytes, parse_bytes
from tilewright.types import RequestError

# Of what is free once the weights are loaded; the rest is for activations, pictures and other programs.
KV_SHARE = 0.5
# Of that, for encoder states: a picture of Llama-3.2-Vision takes as much as 1,600 tokens of text.
CROSS_SHARE = 0.25
# Of that, for states of recurrent layers. One of Qwen3.5 takes as much as 1,500 to 2,300 tokens of text, and an answer
# needs three or so, two of them snapshots: with some 6,000 tokens each, pages and slots run out together.
STATE_SHARE = 0.5
# One to go on from and seven to come back to are as many as an answer can have use of.
SLOTS_PER_SEQUENCE = 8


def kv_bytes(kv_memory: int | str | None) -> int:
    """What `kv_memory` says, or a share of the free memory."""
    return int(available_bytes() * KV_SHARE) if kv_memory is None else parse_bytes(kv_memory)


def num_cross_pages(page_bytes: int, pages_per_medium: int, max_media: int, size_bytes: int) -> int:
    """Pages for encoder states: a share of `size_bytes`, at least one medium's, no more than could be seen at once."""
    if page_bytes * pages_per_medium >= size_bytes:
        raise RequestError(
            f"kv_memory is {size_bytes} bytes, expected more than the {page_bytes * pages_per_medium} that the encoder "
            "states of one image take"
        )
    pages = int(size_bytes * CROSS_SHARE // page_bytes)
    return min(max(pages, pages_per_medium), pages_per_medium * max_media)


def num_state_slots(slot_bytes: int, page_bytes: int, max_slots: int, size_bytes: int) -> int:
    """Slots for states of recurrent layers: a share of `size_bytes`, at least one, no more than are of use."""
    if slot_bytes + page_bytes > size_bytes:
        raise RequestError(
            f"kv_memory is {size_bytes} bytes, expected at least {slot_bytes + page_bytes}: the recurrent state of one "
            f"sequence takes {slot_bytes}, a page of keys and values {page_bytes}"
        )
    return min(max(int(size_bytes * STATE_SHARE // slot_bytes), 1), max_slots)


def num_kv_pages(page_bytes: int, max_pages: int, size_bytes: int) -> int:
    """Pages that fit `size_bytes`; no more than could ever be used."""
    pages = size_bytes // page_bytes
    if pages < 1:
        raise RequestError(f"kv_memory is {size_bytes} bytes, expected at least one page of {page_bytes}")
    return min(pages, max_pages)
