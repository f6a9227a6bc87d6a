"""Steps in memory that all ranks map: what to do next, the step itself, and a predictor's inputs."""

from __future__ import annotations

import enum
import mmap
import os

import numpy as np
import torch

from tilewright.engine.step_inputs import ALIGNMENT, StepInputs, StepLayout
from tilewright.host_memory import shared_file


class Command(enum.IntEnum):
    """What the ranks do next."""

    run = 1  # the step
    draft = 2
    stop = 3


class StepMemory:
    """The memory of one engine's steps. The first rank makes it, the others map its file."""

    def __init__(self, layout: StepLayout, size: int, fd: int | None = None) -> None:
        """For `size` ranks. `fd` is the file of the rank that made it, which this takes over."""
        first = -(-(1 + size) * 8 // ALIGNMENT) * ALIGNMENT
        total = first + 2 * layout.size_bytes
        self.fd = shared_file("steps") if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, total)
        memory = torch.frombuffer(mmap.mmap(self.fd, total), dtype=torch.uint8)
        numbers = memory[: (1 + size) * 8].view(torch.int64).numpy()
        self._command = numbers[:1]
        # How many commands each rank could not do: those of a step that raised on all of them are the same.
        self.num_failures: np.ndarray = numbers[1:]
        self.inputs = StepInputs(layout, memory[first : first + layout.size_bytes])
        self.draft_inputs = StepInputs(layout, memory[first + layout.size_bytes :])

    @property
    def command(self) -> Command:
        return Command(int(self._command[0]))

    @command.setter
    def command(self, command: Command) -> None:
        self._command[0] = command

    def close(self) -> None:
        """Lets go of the file; the memory lives as long as it is mapped."""
        os.close(self.fd)
