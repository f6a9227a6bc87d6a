"""Slots of recurrent states: of running sequences, of drafts, and snapshots found by content."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tilewright.engine.kv.pages import PagePool
from tilewright.engine.kv.prefix_cache import PrefixCache
from tilewright.engine.run.inputs import StepHeader, StepInputs
from tilewright.engine.schedule.sequence import NO_SLOT, Sequence, StateSlots
from tilewright.engine.schedule.step import Chunk, SequenceResource
from tilewright.layers.batch import StateBatch
from tilewright.models.protocol import StateSpec
from tilewright.ops.plan import empty_in_huge_pages


class StateMemory:
    """`num_slots` states of each recurrent layer."""

    def __init__(self, spec: StateSpec, num_slots: int, dtype: torch.dtype) -> None:
        self.num_slots = num_slots
        self.conv_states = [_empty((num_slots, *spec.conv_shape), dtype) for _ in range(spec.num_layers)]
        self.delta_states = [_empty((num_slots, *spec.delta_shape), torch.float32) for _ in range(spec.num_layers)]

    def batch(self, inputs: StepInputs, header: StepHeader) -> StateBatch:
        """Return views of the states, with the slots that a step reads and writes."""
        return StateBatch(
            inputs.tensors["read_slots"][: header.num_sequences],
            inputs.tensors["write_slots"][: header.num_tokens],
            self.conv_states,
            self.delta_states,
        )


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return empty_in_huge_pages(math.prod(shape), dtype).view(shape)


# The end of a prompt opens the answer, and differs once the answer is part of the next turn's prompt: Qwen3.5's
# templates change the last 2 to 4 tokens. A snapshot among them would never be found.
OPENING_TOKENS = 8


class StateCache(SequenceResource):
    """num_slots slots, each with the state of all recurrent layers after some tokens of a sequence.

    A running sequence has a slot that its steps write, and one more for each draft of a step. The others hold
    snapshots: states at the end of pages, named by the page's digest and never overwritten. When a slot is needed, the
    least recently used snapshot without readers is evicted; a snapshot is also evicted with its page.
    docs/models/qwen3_5.md explains how slots are shared out, and where snapshots are taken.
    """

    can_repeat_steps = False  # a failed step may have overwritten half of the states that it read

    def __init__(self, num_slots: int, prefix_cache: PrefixCache) -> None:
        self._slots = PagePool(num_slots, 1)  # counted, named and evicted as pages are
        self._prefix_cache = prefix_cache
        self._page_size = prefix_cache.pool.page_size
        prefix_cache.pool.on_forget = self._slots.forget
        # At most half of the slots are for sequences and a quarter for drafts: the rest is always left for snapshots.
        self.max_running = max(1, num_slots // 2)
        self.max_drafts_per_step = (num_slots - self.max_running) // 2
        self.num_running = 0
        self.num_lookups = 0
        self.num_hits = 0

    @property
    def num_slots(self) -> int:
        return self._slots.num_pages

    @property
    def num_used(self) -> int:
        """Slots that sequences hold, including snapshots they are about to read."""
        return self._slots.num_used

    @property
    def num_free(self) -> int:
        return self._slots.num_free

    @property
    def num_snapshots(self) -> int:
        return self._slots.num_named

    @property
    def hit_rate(self) -> float:
        return self.num_hits / max(1, self.num_lookups)

    def match(self, sequence: Sequence, num_tokens: int) -> int:
        """Return how many of the tokens with matching pages the last snapshot covers.

        Other prompts branch off where the match of pages ended (`Sequence.branch_border`): a snapshot is taken when the
        sequence reaches that token.
        """
        count = num_tokens // self._page_size
        while count and self._slots.find(sequence.page_digests[count - 1]) is None:
            count -= 1
        return count * self._page_size

    def has_room(self, sequence: Sequence, num_cached: int) -> bool:
        """Return whether there is a slot for the sequence to write to; always true while no other sequence runs."""
        return self.num_running < self.max_running and self._slots.num_free > 0

    def admit(self, sequence: Sequence, num_cached: int) -> None:
        """Allocate a slot for the sequence, which starts from the snapshot after its cached tokens."""
        read = self._slots.find(self._digest(sequence, num_cached)) if num_cached else None
        if read is not None:
            self._slots.retain(read)
            if not self._slots.num_free:
                self._slots.release([read])  # the last free slot was the snapshot's: the sequence takes it over
        own = self._slots.allocate()
        sequence.state_slots = StateSlots(own, NO_SLOT if read is None else read)
        self.num_running += 1
        if self._prefix_cache.enabled:
            self.num_lookups += 1
            self.num_hits += read is not None

    def release(self, sequence: Sequence) -> None:
        """Release all slots of a sequence, if it has any. A state at the end of a page becomes a snapshot."""
        slots, sequence.state_slots = sequence.state_slots, None
        if slots is None:
            return
        if slots.read == slots.own and not slots.kept:  # else a step under way may have overwritten half of it
            self._name(sequence, sequence.num_computed_tokens, slots.own)
        self._slots.release(list({slots.own, slots.read, *slots.kept.values()} - {NO_SLOT}))
        self.num_running -= 1

    def chunk_end(self, sequence: Sequence, start: int, stop: int, budget: int) -> int:
        """Return where a prompt's chunk of at most `stop` ends: at a page end, so that `release` leaves a snapshot.

        Less than a page waits for the next step, if that will have more budget: kernels compute chunks as long as a
        page, and bf16 rounds where chunks begin. With four pages of budget, each prompt gets at least one page when it
        is its turn.
        """
        if stop >= sequence.num_tokens:
            return stop
        border = stop // self._page_size * self._page_size
        if border <= start:
            return start if budget >= 4 * self._page_size else stop
        return border

    def plan(self, chunk: Chunk) -> None:
        """Allocate the slots for the states that a chunk leaves: its last one, those of drafts, and snapshots."""
        slots = _slots_of(chunk.sequence)
        num_known = chunk.stop - chunk.num_drafts
        slots.kept = {count: self._slots.allocate() for count in range(num_known + 1, chunk.stop + 1)}
        for border in self._borders(chunk.sequence, chunk.start, num_known):
            if self._slots.num_free:
                slots.kept[border] = self._slots.allocate()
        slots.kept.setdefault(num_known, slots.own)

    def draft_room(self) -> int:
        return self._slots.num_free  # each draft leaves the state after it

    def commit(self, sequence: Sequence) -> None:
        """Set the state that the next step reads, and turn states at page ends into snapshots.

        If the state to read is a snapshot, the next step writes the sequence's own slot; else its slot becomes the
        sequence's own. The slots of rejected drafts are released.
        """
        slots = _slots_of(sequence)
        kept, slots.kept = slots.kept, {}
        if slots.read not in (NO_SLOT, slots.own):
            self._slots.release([slots.read])
        slots.read = kept[sequence.num_computed_tokens]
        reads_snapshot = False
        for count in sorted(kept):
            if count <= sequence.num_computed_tokens and kept[count] != slots.own:
                is_snapshot = self._name(sequence, count, kept[count])
                reads_snapshot = is_snapshot and kept[count] == slots.read
        held = dict.fromkeys([slots.own, *(kept[count] for count in sorted(kept))])
        if not reads_snapshot:
            slots.own = slots.read
        self._slots.release([slot for slot in held if slot not in (slots.own, slots.read)])

    def stats(self) -> dict[str, Any]:
        return {
            "num_state_slots": self.num_slots,
            "num_state_slots_used": self.num_used,
            "num_state_snapshots": self.num_snapshots,
            "state_hit_rate": self.hit_rate,
        }

    def _borders(self, sequence: Sequence, start: int, stop: int) -> list[int]:
        """Return the page ends in (start, stop] at which a state is worth keeping and not kept yet."""
        if not self._prefix_cache.enabled:
            return []
        last = sequence.num_tokens // self._page_size * self._page_size
        wanted = {sequence.branch_border, self._prompt_border(sequence), last}
        return [
            border
            for border in sorted(wanted)
            if start < border <= stop and self._slots.find(self._digest(sequence, border)) is None
        ]

    def _prompt_border(self, sequence: Sequence) -> int:
        """Return the last page end at which the next turn, and the same prompt again, still agree with this prompt."""
        return max(0, sequence.num_prompt_tokens - OPENING_TOKENS) // self._page_size * self._page_size

    def _name(self, sequence: Sequence, count: int, slot: int) -> bool:
        """Make the state after `count` tokens a snapshot, if possible, and return whether it is one.

        Of the snapshots after the prompt only the latest is kept.
        """
        if not self._prefix_cache.enabled or count % self._page_size:
            return False
        digest = self._digest(sequence, count)
        if self._prefix_cache.pool.find(digest) is None:
            return False
        self._slots.name(slot, digest)
        if self._slots.find(digest) != slot:
            return False  # another sequence was first
        if count > self._prompt_border(sequence):
            earlier, sequence.last_snapshot = sequence.last_snapshot, digest
            if earlier is not None and earlier != digest:
                self._slots.forget(earlier)
        return True

    def _digest(self, sequence: Sequence, count: int) -> bytes:
        return self._prefix_cache.digest(sequence, count // self._page_size - 1)


def _slots_of(sequence: Sequence) -> StateSlots:
    assert sequence.state_slots is not None, f"sequence {sequence.id} is {sequence.status.value}, and has no state"
    return sequence.state_slots
