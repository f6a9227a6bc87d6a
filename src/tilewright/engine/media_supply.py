"""What a chunk looks at is there when it is computed: media are encoded by then, scenes have pages that are filled."""

from __future__ import annotations

import math
from collections.abc import Collection

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

    def make_ready(self, step: Step, sequence: Sequence, start: int, stop: int) -> int:
        """Where the chunk ends: at `stop`, or before the first medium or scene that this step cannot have ready."""
        needs: list[FeatureRun | Scene] = [*sequence.features_in(start, stop), *sequence.scenes_in(start, stop)]
        for need in sorted(needs, key=lambda need: need.start):
            if isinstance(need, Scene):
                is_ready = self._show(step, sequence, need)
            else:
                is_ready = self._encode(step, sequence, [need.medium])
            if not is_ready:
                return max(start, need.start)
        return stop

    def unpin_read(self, sequence: Sequence) -> None:
        """Lets go of what no token that is left to compute looks at."""
        if sequence.pinned_keys:
            rest = sequence.features_in(sequence.num_computed_tokens, sequence.num_prompt_tokens)
            needed = {run.medium.key for run in rest}
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

    def _encode(self, step: Step, sequence: Sequence, media: Collection[Medium]) -> bool:
        """Whether the media have features, or get them in this step. Not if there is no encoder time left for them."""
        planned = {medium.key for medium in step.encode}
        missing = {m.key: m for m in media if m.key not in planned and not self.features.has(m.key)}
        num_patches = sum(math.prod(medium.grid) for medium in (*step.encode, *missing.values()))
        if missing and step.encode and num_patches > self.limits.max_patches(step.has_decodes):
            return False
        step.encode.extend(missing.values())
        for medium in media:
            if medium.key not in sequence.pinned_keys:
                self.features.pin(medium.key)
                sequence.pinned_keys.append(medium.key)
        return True

    def _show(self, step: Step, sequence: Sequence, scene: Scene) -> bool:
        """Whether the sequence can look at a scene in this step: it has pages, and what fills them."""
        if scene not in sequence.pinned_scenes:
            if not self.scenes.pin(scene):
                return False
            sequence.pinned_scenes.append(scene)
        if self.scenes.is_filled(scene.key) or any(other.key == scene.key for other in step.scenes):
            return True
        if not self._encode(step, sequence, scene.media):
            return False
        step.scenes.append(scene)
        return True
