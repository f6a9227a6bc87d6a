"""What the ranks of an engine do at the same time: the first says what, and all do it, each with its part of the model.

A command is a number in memory that all ranks map (step_memory.py); `group.post` wakes those that wait for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from tilewright.engine.errors import EngineLostError
from tilewright.engine.ranks.step_memory import Command, StepMemory
from tilewright.engine.runner import ModelRunner
from tilewright.parallel.group import CollectiveError, Group

# Ranks that raise at the same place of a step do so within milliseconds; one that did not waits in a collective.
FAILURE_WAIT_S = 5.0

_log = logging.getLogger(__name__)
Result = TypeVar("Result")


class RankLostError(EngineLostError):
    """A rank ended, hangs or failed alone: the others cannot go on without it."""


def lead(group: Group, memory: StepMemory, command: Command, compute: Callable[[], Result]) -> Result:
    """What `compute` gives, the first rank's part of a command that all ranks do.

    An error that all of them raise at the same place is one of the step; otherwise they no longer agree.
    """
    memory.command = command
    group.post()
    try:
        return compute()
    except CollectiveError as error:
        raise RankLostError(str(error)) from error
    except Exception as error:
        if not _all_failed(memory, 0):
            raise RankLostError(f"rank 0 failed alone: {error}") from error
        raise


def follow(rank: int, group: Group, memory: StepMemory, runner: ModelRunner) -> None:
    """Does the commands of the first rank until it says stop."""
    while True:
        group.wait_for_post()
        command = memory.command
        if command is Command.stop:
            return
        try:
            runner.run() if command is Command.run else runner.draft()
        except CollectiveError:
            raise
        except Exception:
            _log.debug("rank %d could not %s", rank, command.name, exc_info=True)
            if not _all_failed(memory, rank):
                raise


def _all_failed(memory: StepMemory, rank: int) -> bool:
    """Whether all ranks fail as often as this one, which has failed now: soon, or not at all."""
    memory.num_failures[rank] += 1
    deadline_s = time.monotonic() + FAILURE_WAIT_S
    while time.monotonic() < deadline_s:
        if (memory.num_failures >= memory.num_failures[rank]).all():
            return True
        time.sleep(0.001)
    return False
