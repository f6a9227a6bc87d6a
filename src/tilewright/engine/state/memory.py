"""The states of recurrent layers: what a slot of the state cache stands for."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilewright.engine.step_inputs import StepHeader, StepInputs
from tilewright.layers.batch import StateBatch
from tilewright.models.protocol import StateSpec
from tilewright.ops.memory import empty_in_huge_pages


class StateMemory:
    """`num_slots` states of each recurrent layer."""

    def __init__(self, spec: StateSpec, num_slots: int, dtype: torch.dtype) -> None:
        self.num_slots = num_slots
        self.conv_states = [_empty((num_slots, *spec.conv_shape), dtype) for _ in range(spec.num_layers)]
        self.delta_states = [_empty((num_slots, *spec.delta_shape), torch.float32) for _ in range(spec.num_layers)]

    def batch(self, inputs: StepInputs, header: StepHeader) -> StateBatch:
        """The states with the slots that a step reads and writes, as views."""
        return StateBatch(
            inputs.tensors["read_slots"][: header.num_sequences],
            inputs.tensors["write_slots"][: header.num_tokens],
            self.conv_states,
            self.delta_states,
        )


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return empty_in_huge_pages(math.prod(shape), dtype).view(shape)
