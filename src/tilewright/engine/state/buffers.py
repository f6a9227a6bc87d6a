"""The states of recurrent layers, and which of them a step reads and writes, at fixed places for recorded steps."""

from __future__ import annotations

import math
from collections.abc import Sequence as Items

import torch
from torch import Tensor

from tilewright.engine.sequence import NO_SLOT
from tilewright.engine.step import Chunk
from tilewright.engine.step_limits import StepLimits
from tilewright.layers.batch import StateBatch
from tilewright.models.protocol import StateSpec
from tilewright.ops.memory import empty_in_huge_pages


class StateBuffers:
    """`num_slots` states of each recurrent layer, and the slots of a step, which are filled in through numpy."""

    def __init__(self, spec: StateSpec, num_slots: int, dtype: torch.dtype, limits: StepLimits) -> None:
        self.num_slots = num_slots
        self.conv_states = [_empty((num_slots, *spec.conv_shape), dtype) for _ in range(spec.num_layers)]
        self.delta_states = [_empty((num_slots, *spec.delta_shape), torch.float32) for _ in range(spec.num_layers)]
        self.read_slots = torch.full((limits.max_sequences,), NO_SLOT, dtype=torch.int32)
        self.write_slots = torch.full((limits.max_tokens_per_step,), NO_SLOT, dtype=torch.int32)
        self._read_slots, self._write_slots = self.read_slots.numpy(), self.write_slots.numpy()

    def fill(self, chunks: Items[Chunk]) -> None:
        begin = 0
        for index, chunk in enumerate(chunks):
            slots = chunk.sequence.state_slots
            assert slots is not None, f"sequence {chunk.sequence.id} has no state"
            self._read_slots[index] = slots.read
            self._write_slots[begin : begin + chunk.num_tokens] = NO_SLOT
            for count, slot in slots.kept.items():
                self._write_slots[begin + count - 1 - chunk.start] = slot
            begin += chunk.num_tokens

    def batch(self, num_tokens: int, num_sequences: int) -> StateBatch:
        """What was filled in, as views."""
        return StateBatch(
            self.read_slots[:num_sequences], self.write_slots[:num_tokens], self.conv_states, self.delta_states
        )


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return empty_in_huge_pages(math.prod(shape), dtype).view(shape)
