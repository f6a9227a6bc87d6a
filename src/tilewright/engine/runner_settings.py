"""What a runner is made with besides its model: plain data, so that every rank makes the same one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewright.engine.kv.dtype import kv_byte_dtype
from tilewright.engine.kv.pages import PAGE_SIZE
from tilewright.engine.runner import ModelRunner
from tilewright.engine.state.memory import StateMemory
from tilewright.engine.step_inputs import StepInputs, StepLayout
from tilewright.engine.step_limits import StepLimits
from tilewright.models.protocol import Model
from tilewright.ops.kv_cache import KvCache


@dataclass(frozen=True)
class RunnerSettings:
    """Sizes of the memory that sequences share, and how steps are run."""

    limits: StepLimits
    num_pages: int
    num_cross_pages: int = 0  # for encoder states; 0 in models without cross-attention
    num_state_slots: int = 0  # 0 in models without recurrent layers
    num_window_pages: tuple[int, ...] = ()  # of layers with a sliding window, by window: the shortest first
    page_size: int = PAGE_SIZE
    drafting: bool = False
    kv_cache_dtype: str = "auto"
    replay: bool = True

    def layout(self, model: Model) -> StepLayout:
        """How steps lie in a buffer."""
        return StepLayout(
            self.limits,
            num_axes=model.num_position_axes,
            page_size=self.page_size,
            num_pages=self.num_pages,
            num_cross_pages=self.num_cross_pages,
            window_pages=self.window_pages(model),
        )

    def window_pages(self, model: Model) -> dict[int, int]:
        """Return how many pages layers with a sliding window share, by window."""
        windows = model.kv_spec.windows(self.limits.max_context)
        return dict(zip(windows, self.num_window_pages, strict=True))

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> RunnerSettings:
        own = {"limits": StepLimits(**fields["limits"]), "num_window_pages": tuple(fields["num_window_pages"])}
        return RunnerSettings(**{**fields, **own})


def build_runner(
    model: Model,
    dtype: torch.dtype,
    settings: RunnerSettings,
    inputs: StepInputs,
    draft_inputs: StepInputs,
    media_rows: Tensor | None,
) -> ModelRunner:
    """A runner for a model whose weights are loaded, with fresh memory, that reads its steps from the inputs."""

    kv_dtype, cross_spec = kv_byte_dtype(settings.kv_cache_dtype) or dtype, model.cross_spec
    # One page more, which stays zero: it stands for those behind a window.
    window_pages = {window: count + 1 for window, count in settings.window_pages(model).items()}
    cross_caches: list[KvCache] = []
    if cross_spec is not None:
        cross_caches = cross_spec.empty_caches(settings.num_cross_pages, settings.page_size, kv_dtype)
    return ModelRunner(
        model,
        model.kv_spec.empty_caches(settings.num_pages, settings.page_size, kv_dtype, window_pages),
        inputs,
        settings.limits,
        cross_caches=cross_caches,
        states=StateMemory(model.state_spec, settings.num_state_slots, dtype) if model.state_spec else None,
        predictor=model.predictor if settings.drafting else None,
        draft_inputs=draft_inputs,
        dtype=dtype,
        media_rows=media_rows,
        replay=settings.replay,
    )
