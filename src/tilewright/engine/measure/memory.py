"""Shares memory between keys, values and recurrent states, and reports the use of an engine and its process."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from tilewright.engine.kv.pages import PAGE_SIZE
from tilewright.engine.kv.prefix_cache import pages_in_window
from tilewright.engine.schedule.step import StepLimits
from tilewright.host.memory import available_bytes, parse_bytes
from tilewright.models.protocol import Model
from tilewright.types import RequestError

# Share of the memory that is free after loading; the rest is for activations, images and other programs.
KV_SHARE = 0.5
# Share of that for encoder states: an image of Llama-3.2-Vision takes as much as 1,600 tokens of text.
CROSS_SHARE = 0.25
# Share of that for states of recurrent layers. One of Qwen3.5 takes as much as 1,500 to 2,300 tokens of text, and an
# answer needs about three, two of them snapshots: with some 6,000 tokens each, pages and slots run out together.
STATE_SHARE = 0.5
# Its own state and seven snapshots: an answer has no use for more.
SLOTS_PER_SEQUENCE = 8
# At this length of answers the pages of layers with a sliding window run out together with the others. Shorter answers
# run out of the former first, longer ones of the latter.
BALANCED_TOKENS = 4096


@dataclass(frozen=True)
class MemorySizes:
    """Numbers of pages and slots of each kind of memory that sequences share."""

    num_pages: int
    num_cross_pages: int  # for encoder states; 0 in models without cross-attention
    num_state_slots: int  # 0 in models without recurrent layers
    num_window_pages: tuple[int, ...] = ()  # by window, the shortest first; none in models without sliding windows


def split_memory(
    model: Model,
    itemsize: int,
    limits: StepLimits,
    max_media: int,
    size_bytes: int,
    byte_dtype: torch.dtype | None = None,
) -> MemorySizes:
    """Split `size_bytes` into pages for keys and values, pages for encoder states, and slots for recurrent states.

    A request has at most `max_media` media. `byte_dtype` is the 8-bit type of keys and values, if they have one.
    """
    cross, for_cross = model.cross_spec, 0
    if cross is not None:
        cross_page_bytes = cross.bytes_per_token(itemsize, byte_dtype) * PAGE_SIZE
        pages_per_medium = -(-cross.max_states // PAGE_SIZE)
        # Media that running sequences see, or one request has side by side: more are not needed at once.
        most_media = max(limits.max_sequences, max_media)
        for_cross = num_cross_pages(cross_page_bytes, pages_per_medium, most_media, size_bytes)
        size_bytes -= for_cross * cross_page_bytes
    spec = model.kv_spec
    windows = spec.windows(limits.max_context)
    page_bytes = spec.outside(windows).bytes_per_token(itemsize, byte_dtype) * PAGE_SIZE
    states, num_slots = model.state_spec, 0
    if states is not None:
        slot_bytes = states.bytes_per_slot(itemsize)
        most_slots = SLOTS_PER_SEQUENCE * limits.max_sequences + limits.max_rows_with_drafts
        num_slots = num_state_slots(slot_bytes, page_bytes, most_slots, size_bytes)
        size_bytes -= num_slots * slot_bytes
    most_pages = -(-limits.max_context // PAGE_SIZE) * limits.max_sequences
    window_bytes = [spec.in_window(window).bytes_per_token(itemsize, byte_dtype) * PAGE_SIZE for window in windows]
    for_windows = num_window_pages(windows, window_bytes, page_bytes, most_pages, size_bytes)
    size_bytes -= sum(count * each for count, each in zip(for_windows, window_bytes, strict=True))
    return MemorySizes(num_kv_pages(page_bytes, most_pages, size_bytes), for_cross, num_slots, for_windows)


def kv_bytes(kv_memory: int | str | None, free_bytes: int | None = None) -> int:
    """Return `kv_memory` in bytes: a size, a percentage of the free memory, or half of it for None.

    `free_bytes`: the device's free memory; None: the host's.
    """
    if free_bytes is None:
        free_bytes = available_bytes()
    if kv_memory is None:
        return int(free_bytes * KV_SHARE)
    percentage = re.fullmatch(r"(\d{1,2}(?:\.\d+)?)%", str(kv_memory))
    return int(free_bytes * float(percentage[1]) / 100) if percentage else parse_bytes(kv_memory)


def num_cross_pages(page_bytes: int, pages_per_medium: int, max_media: int, size_bytes: int) -> int:
    """Return the pages for encoder states: a share of `size_bytes`, between one medium's and `max_media` media's."""
    if page_bytes * pages_per_medium >= size_bytes:
        raise RequestError(
            f"kv_memory is {size_bytes} bytes, expected more than the {page_bytes * pages_per_medium} that the encoder "
            "states of one image take"
        )
    pages = int(size_bytes * CROSS_SHARE // page_bytes)
    return min(max(pages, pages_per_medium), pages_per_medium * max_media)


def num_state_slots(slot_bytes: int, page_bytes: int, max_slots: int, size_bytes: int) -> int:
    """Return the slots for recurrent states: a share of `size_bytes`, at least one, at most `max_slots`."""
    if slot_bytes + page_bytes > size_bytes:
        raise RequestError(
            f"kv_memory is {size_bytes} bytes, expected at least {slot_bytes + page_bytes}: the recurrent state of one "
            f"sequence takes {slot_bytes}, a page of keys and values {page_bytes}"
        )
    return min(max(int(size_bytes * STATE_SHARE // slot_bytes), 1), max_slots)


def num_window_pages(
    windows: Sequence[int], window_bytes: Sequence[int], page_bytes: int, max_pages: int, size_bytes: int
) -> tuple[int, ...]:
    """Return how many pages each window gets of `size_bytes`, beside the pages for all tokens.

    `window_bytes` are the bytes of a page of each window, `page_bytes` those of a page for all tokens; 0: all layers
    have a window. An answer needs the pages of its window, and those of the window at its prompt's end, from which the
    same prompt and the next turn continue.
    """
    if not windows:
        return ()
    balanced = BALANCED_TOKENS // PAGE_SIZE
    each = [min(balanced, 2 * pages_in_window(window, PAGE_SIZE)) for window in windows]
    for_one = balanced * page_bytes + sum(count * size for count, size in zip(each, window_bytes, strict=True))
    least = [pages_in_window(window, PAGE_SIZE) for window in windows]
    counts = tuple(
        min(max_pages, max(least_count, size_bytes * count // for_one))
        for count, least_count in zip(each, least, strict=True)
    )
    least_bytes = page_bytes + sum(count * size for count, size in zip(least, window_bytes, strict=True))
    if least_bytes > size_bytes:
        raise RequestError(
            f"kv_memory is {size_bytes} bytes, expected at least {least_bytes}: a page of keys and values, and those "
            f"of the windows of {', '.join(map(str, windows))} tokens"
        )
    return counts


def num_kv_pages(page_bytes: int, max_pages: int, size_bytes: int) -> int:
    """Return how many pages fit `size_bytes`, at most `max_pages`; `max_pages` if pages have no bytes."""
    if not page_bytes:
        return max_pages
    pages = size_bytes // page_bytes
    if pages < 1:
        raise RequestError(f"kv_memory is {size_bytes} bytes, expected at least one page of {page_bytes}")
    return min(pages, max_pages)


_ROLLUP = Path("/proc/self/smaps_rollup")


@dataclass(frozen=True)
class MemoryUse:
    """Memory use of an engine in bytes; with several ranks, of the first."""

    weight_bytes: int  # as packed
    mapped_weight_bytes: int  # of these, mapped from the pack cache's file, and shared by all processes that map it
    kv_bytes: int  # of all pages of keys and values; untouched ones take no memory
    kv_bytes_used: int  # of pages that running answers hold
    kv_bytes_touched: int  # of pages written at least once: held now, or by the prefix cache
    scratch_bytes: int  # for results of ops
    feature_bytes: int  # cached features of media
    resident_bytes: int  # of the process; 0 if the system does not report it
    resident_file_bytes: int  # of these, pages of files: libraries and mapped weights

    @property
    def other_bytes(self) -> int:
        """Resident bytes that are none of the above: Python, libraries such as torch, the tokenizer, step buffers."""
        known = self.weight_bytes + self.kv_bytes_touched + self.scratch_bytes + self.feature_bytes
        return max(0, self.resident_bytes - known)

    def as_text(self) -> str:
        """Return one line per part, for people."""
        rows = [
            ("weights, packed", self.weight_bytes),
            ("  of these mapped from the pack cache", self.mapped_weight_bytes),
            ("keys and values, room for", self.kv_bytes),
            ("  held by running answers", self.kv_bytes_used),
            ("  written so far, prefix cache included", self.kv_bytes_touched),
            ("results of ops within a step", self.scratch_bytes),
            ("features of media", self.feature_bytes),
            ("other", self.other_bytes),
            ("resident in all", self.resident_bytes),
            ("  of these pages of files", self.resident_file_bytes),
        ]
        return "\n".join(f"{name:42} {size / 2**20:10.1f} MiB" for name, size in rows)


class Resident(NamedTuple):
    """Resident memory of a process in bytes."""

    total: int = 0
    file: int = 0  # pages of files, shared with other processes or not


def read_resident() -> Resident:
    """Return the resident memory of this process; zeros if the system does not report it."""
    try:
        text = _ROLLUP.read_text()
    except OSError:
        return Resident()
    found = {name: int(size) * 1024 for name, size in re.findall(r"^(Rss|Anonymous):\s+(\d+) kB", text, re.MULTILINE)}
    total = found.get("Rss", 0)
    return Resident(total, total - found.get("Anonymous", total))
