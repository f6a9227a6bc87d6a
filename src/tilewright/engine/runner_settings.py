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
from tilewright.models.protocol import KvSpec, Model
from tilewright.ops.kv_cache import KvCache


@dataclass(frozen=True)
class RunnerSettings:
    """Sizes of the memory that sequences share, and how steps are run."""

    limits: StepLimits
    num_pages: int
    num_cross_pages: int = 0  # for encoder states; 0 in models without cross-attention
    num_state_slots: int = 0  # 0 in models without recurrent layers
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
        )

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> RunnerSettings:
        return RunnerSettings(**{**fields, "limits": StepLimits(**fields["limits"])})


def build_runner(
    model: Model,
    dtype: torch.dtype,
    settings: RunnerSettings,
    inputs: StepInputs,
    draft_inputs: StepInputs,
    media_rows: Tensor | None,
) -> ModelRunner:
    """A runner for a model whose weights are loaded, with fresh memory, that reads its steps from the inputs."""

    byte_dtype = kv_byte_dtype(settings.kv_cache_dtype)

    def caches(spec: KvSpec | None, num_pages: int) -> list[KvCache]:
        if spec is None:
            return []
        return spec.empty_caches(num_pages, settings.page_size, byte_dtype or dtype)

    return ModelRunner(
        model,
        caches(model.kv_spec, settings.num_pages),
        inputs,
        settings.limits,
        cross_caches=caches(model.cross_spec, settings.num_cross_pages),
        states=StateMemory(model.state_spec, settings.num_state_slots, dtype) if model.state_spec else None,
        predictor=model.predictor if settings.drafting else None,
        draft_inputs=draft_inputs,
        dtype=dtype,
        media_rows=media_rows,
        replay=settings.replay,
    )
