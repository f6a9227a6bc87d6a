"""Schedules the encoding of media and the filling of cross-attention groups before the chunks that read them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tilewright.engine.kv.cross import CrossCache, CrossGroup, group_key
from tilewright.engine.media.encoder_cache import EncoderCache
from tilewright.engine.schedule.sequence import FeatureSpan, Sequence
from tilewright.engine.schedule.step import SequenceResource, Step, StepLimits
from tilewright.types import Medium, RequestError


class MediaScheduler(SequenceResource):
    """Adds media to encode and groups to fill to the step that reads them, and pins both until they are read."""

    def __init__(self, features: EncoderCache, cross_cache: CrossCache, limits: StepLimits) -> None:
        self.features = features
        self.cross_cache = cross_cache
        self.limits = limits
        self._blocked: Sequence | None = None  # the earliest sequence of this step whose group got no pages

    def is_known(self, media_key: bytes) -> bool:
        """Return whether a medium need not be decoded: its features, or its own keys and values, are cached."""
        return self.features.has(media_key) or self.cross_cache.is_filled(group_key([media_key]))

    def ahead(self, step: Step, sequences: Iterable[Sequence]) -> list[Medium]:
        """Return media that the next step is likely to encode, in the order of the sequences, within a step's limit."""
        seen = {medium.key for medium in step.encode}
        found: list[Medium] = []
        num_patches = 0
        for medium in (medium for sequence in sequences for medium in sequence.unread_media):
            if medium.key not in seen and not self.is_known(medium.key):
                num_patches += medium.encoder_rows
                if found and num_patches > self.limits.max_patches(True):
                    break
                seen.add(medium.key)
                found.append(medium)
        return found

    def readers(self, media: Iterable[Medium], sequences: Iterable[Sequence]) -> list[Sequence]:
        """Return the sequences that media are encoded for, even if they have no chunk yet."""
        keys = {medium.key for medium in media}
        return [sequence for sequence in sequences if keys.intersection(sequence.pinned_keys)]

    def check(self, sequence: Sequence) -> None:
        for group in sequence.cross_groups:
            if group.num_states > self.cross_cache.num_states:
                raise RequestError(
                    f"{len(group.media)} images side by side are {group.num_states} encoder states, expected at most "
                    f"{self.cross_cache.num_states}, for which there is memory: put text between them, or raise "
                    "kv_memory"
                )

    def begin_step(self) -> None:
        self._blocked = None

    def is_ready(self, sequence: Sequence) -> bool:
        """Return whether the pages of the next token's group are filled; they may not be after a preemption."""
        if not sequence.cross_groups:
            return True
        last = sequence.cross_groups[-1]
        return last in sequence.pinned_groups and self.cross_cache.is_filled(last.key)

    def prepare(self, step: Step, sequence: Sequence, start: int, stop: int) -> int:
        """Return where the chunk ends: at `stop`, or before the first medium or group that this step cannot prepare."""
        needs: list[FeatureSpan | CrossGroup] = [
            *sequence.feature_spans(start, stop),
            *sequence.cross_groups_in(start, stop),
        ]
        for need in sorted(needs, key=lambda need: need.start):
            if isinstance(need, CrossGroup):
                is_ready = self._prepare_group(step, sequence, need)
            else:
                is_ready = self._encode(step, sequence, need.medium)
            if not is_ready:
                return max(start, need.start)
        return stop

    def commit(self, sequence: Sequence) -> None:
        """Unpin media and groups that no uncomputed token reads."""
        if sequence.pinned_keys:
            self._unpin_features(sequence)
        if sequence.pinned_groups:
            self._unpin_groups(sequence)

    def _unpin_features(self, sequence: Sequence) -> None:
        rest = sequence.feature_spans(sequence.num_computed_tokens, sequence.num_prompt_tokens)
        needed = {span.medium.key for span in rest}
        unfilled = [group for group in sequence.pinned_groups if not self.cross_cache.is_filled(group.key)]
        needed |= {medium.key for group in unfilled for medium in group.media}
        for key in sequence.pinned_keys:
            if key not in needed:
                self.features.unpin(key)
        sequence.pinned_keys = [key for key in sequence.pinned_keys if key in needed]

    def _unpin_groups(self, sequence: Sequence) -> None:
        for group in list(sequence.pinned_groups):
            if group.stop <= sequence.num_computed_tokens:
                self.cross_cache.unpin(group.key)
                sequence.pinned_groups.remove(group)

    def release(self, sequence: Sequence) -> None:
        """Unpin all that the sequence reads."""
        for key in sequence.pinned_keys:
            self.features.unpin(key)
        for group in sequence.pinned_groups:
            self.cross_cache.unpin(group.key)
        sequence.pinned_keys = []
        sequence.pinned_groups = []

    def stats(self) -> dict[str, Any]:
        return {
            "feature_hit_rate": self.features.hit_rate,
            "feature_bytes": self.features.size_bytes,
            "num_cross_pages": self.cross_cache.num_pages,
            "num_cross_pages_used": self.cross_cache.num_pages_used,
            "cross_hit_rate": self.cross_cache.hit_rate,
        }

    def _encode(self, step: Step, sequence: Sequence, medium: Medium) -> bool:
        """Return whether the medium has features or gets them in this step, if the encoder's budget allows it."""
        if not self.features.has(medium.key) and all(other.key != medium.key for other in step.encode):
            num_patches = sum(other.encoder_rows for other in (*step.encode, medium))
            if step.encode and num_patches > self.limits.max_patches(step.has_decodes):
                return False
            step.encode.append(medium)
        if medium.key not in sequence.pinned_keys:
            self.features.pin(medium.key)
            sequence.pinned_keys.append(medium.key)
        return True

    def _prepare_group(self, step: Step, sequence: Sequence, group: CrossGroup) -> bool:
        """Return whether a group is ready in this step: it has pages, filled before or during it.

        Adjacent images that are too many for one step are encoded over several.
        """
        if not self._has_pages(sequence, group):
            return False
        if self.cross_cache.is_filled(group.key) or any(other.key == group.key for other in step.cross_groups):
            return True
        if not all(self._encode(step, sequence, medium) for medium in group.media):
            return False
        step.cross_groups.append(group)
        return True

    def _has_pages(self, sequence: Sequence, group: CrossGroup) -> bool:
        """Return whether the group has pages, pinned until the sequence unpins it.

        When a group gets none, later sequences get none either, not even shared ones: otherwise a stream of small
        groups would starve a large one.
        """
        if group in sequence.pinned_groups:
            return True
        first = self._blocked
        if (first is not None and first.id < sequence.id) or not self.cross_cache.pin(group):
            self._blocked = sequence if first is None or sequence.id < first.id else first
            return False
        sequence.pinned_groups.append(group)
        return True
