"""What a chunk looks at is there when it is computed: media are encoded by then, scenes have pages that are filled."""

from __future__ import annotations

import math

from tilewright.engine.feature_cache import FeatureCache
from tilewright.engine.limits import Limits
from tilewright.engine.scene import Scene
from tilewright.engine.scene_cache import SceneCache
from tilewright.engine.sequence import FeatureRun, Sequence
from tilewright.engine.step import Step
from tilewright.types import Medium


class MediaSupply:
    """Has media encoded and scenes filled in the step that reads them, and keeps them until they have been read."""

    def __init__(self, features: FeatureCache, scenes: SceneCache, limits: Limits) -> None:
        self.features = features
        self.scenes = scenes
        self.limits = limits
        self._without_place: Sequence | None = None  # the earliest of this step whose scene finds no pages

    def begin_step(self) -> None:
        self._without_place = None

    def make_ready(self, step: Step, sequence: Sequence, start: int, stop: int) -> int:
        """Where the chunk ends: at `stop`, or before the first medium or scene that this step cannot have ready."""
        needs: list[FeatureRun | Scene] = [*sequence.features_in(start, stop), *sequence.scenes_in(start, stop)]
        for need in sorted(needs, key=lambda need: need.start):
            if isinstance(need, Scene):
                is_ready = self._show(step, sequence, need)
            else:
                is_ready = self._encode(step, sequence, need.medium)
            if not is_ready:
                return max(start, need.start)
        return stop

    def unpin_read(self, sequence: Sequence) -> None:
        """Lets go of what no token that is left to compute looks at."""
        if sequence.pinned_keys:
            rest = sequence.features_in(sequence.num_computed_tokens, sequence.num_prompt_tokens)
            needed = {run.medium.key for run in rest}
            unfilled = [scene for scene in sequence.pinned_scenes if not self.scenes.is_filled(scene.key)]
            needed |= {medium.key for scene in unfilled for medium in scene.media}
            for key in sequence.pinned_keys:
                if key not in needed:
                    self.features.unpin(key)
            sequence.pinned_keys = [key for key in sequence.pinned_keys if key in needed]
        for scene in list(sequence.pinned_scenes):
            if scene.stop <= sequence.num_computed_tokens:
                self.scenes.unpin(scene.key)
                sequence.pinned_scenes.remove(scene)

    def release(self, sequence: Sequence) -> None:
        """Lets go of all that the sequence holds."""
        for key in sequence.pinned_keys:
            self.features.unpin(key)
        for scene in sequence.pinned_scenes:
            self.scenes.unpin(scene.key)
        sequence.pinned_keys = []
        sequence.pinned_scenes = []

    def _encode(self, step: Step, sequence: Sequence, medium: Medium) -> bool:
        """Whether the medium has features, or gets them in this step. Not if there is no encoder time left for it."""
        if not self.features.has(medium.key) and all(other.key != medium.key for other in step.encode):
            num_patches = sum(math.prod(other.grid) for other in (*step.encode, medium))
            if step.encode and num_patches > self.limits.max_patches(step.has_decodes):
                return False
            step.encode.append(medium)
        if medium.key not in sequence.pinned_keys:
            self.features.pin(medium.key)
            sequence.pinned_keys.append(medium.key)
        return True

    def _show(self, step: Step, sequence: Sequence, scene: Scene) -> bool:
        """Whether the sequence can look at a scene in this step: it has pages, and what fills them.

        Pictures that side by side are more than a step has time for are encoded over several.
        """
        if not self._has_pages(sequence, scene):
            return False
        if self.scenes.is_filled(scene.key) or any(other.key == scene.key for other in step.scenes):
            return True
        if not all(self._encode(step, sequence, medium) for medium in scene.media):
            return False
        step.scenes.append(scene)
        return True

    def _has_pages(self, sequence: Sequence, scene: Scene) -> bool:
        """Whether the scene has pages, from now on until the sequence lets go of it.

        When one finds none, those that came after it take none either, not even to share: else a stream of small
        scenes would keep a large one out for ever.
        """
        if scene in sequence.pinned_scenes:
            return True
        first = self._without_place
        if (first is not None and first.id < sequence.id) or not self.scenes.pin(scene):
            self._without_place = sequence if first is None or sequence.id < first.id else first
            return False
        sequence.pinned_scenes.append(scene)
        return True
