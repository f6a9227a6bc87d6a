"""Loads the native module after torch, configures it, and passes tensors to it."""

import contextlib
import functools
import logging
import os
import platform
from dataclasses import dataclass

import torch  # first: the kernels then share torch's OpenMP runtime instead of bringing a second one
from torch.utils.dlpack import to_dlpack as view

from tilewright import _kernels as kernels
from tilewright import config
from tilewright.config import ConfigError
from tilewright.host.binding import RankBinding, claim_cpus

__all__ = [
    "Build",
    "apply_binding",
    "apply_config",
    "bind_team",
    "kernels",
    "read_build",
    "release_binding",
    "view",
    "view_or_none",
    "work_alone",
]

_log = logging.getLogger(__name__)


def view_or_none(tensor: torch.Tensor | None) -> object:
    """Return the DLPack capsule of a tensor, or None."""
    return None if tensor is None else view(tensor)


def bind_team() -> None:
    """Pin the threads of kernels that this thread calls, as configured: every calling thread has its own team.

    The same holds for memory: a rank's thread allocates pages on the rank's nodes.
    """
    settings = config.current()
    if settings.memory_nodes:
        _prefer_memory(settings.memory_nodes)
    if settings.bind_cpus:
        kernels.bind_threads(list(settings.bind_cpus))


def work_alone() -> None:
    """Let kernels called by this thread use no other threads, and unpin it."""
    kernels.work_alone()
    if config.current().bind_cpus:  # a new thread inherits the affinity of the pinned one that started it
        with contextlib.suppress(OSError):  # if this is not permitted, pinning was not either
            os.sched_setaffinity(0, config.current().available_cpus)


@dataclass(frozen=True)
class Build:
    """ISA levels that the kernels were compiled for, best first, and those of this CPU.

    Released packages have every level of the architecture. `make demo` and `make dev` compile, for the CPU they run on,
    the best kernel of each op and the scalar one, `make test` all that it runs (TILEWRIGHT_LEVELS in CMakeLists.txt).
    """

    compiled: tuple[str, ...]
    found: tuple[str, ...]
    of_architecture: tuple[str, ...]

    @property
    def is_whole(self) -> bool:
        return set(self.compiled) == set(self.of_architecture)

    @property
    def is_for_another_cpu(self) -> bool:
        return not self.is_whole and self.compiled[0] not in self.found

    def __str__(self) -> str:
        if self.is_whole:
            return "every ISA level"
        text = f"{', '.join(self.compiled)} alone, for the CPU it was built on"
        if self.is_for_another_cpu:
            text += f"; this one has no {self.compiled[0]}, and ops without a kernel for it run as scalar, far slower"
        return f"{text} (`pip install .` compiles every level)"


def read_build() -> Build:
    """Return the levels of the native module and of this CPU."""
    best_first = config.ISA_LEVELS[platform.machine()][::-1]
    compiled = {level for entries in kernels.manifest().values() for level, _ in entries}
    return Build(tuple(level for level in best_first if level in compiled), tuple(kernels.isa_levels()), best_first)


def apply_config() -> None:
    """Apply the current config to the kernels and to the calling thread's team."""
    settings = config.current()
    kernels.set_max_isa(settings.max_isa)
    kernels.set_num_threads(settings.num_threads or len(settings.bind_cpus))
    kernels.set_sleeps_soon(settings.threads_sleep_soon)
    if settings.bind_cpus:
        # torch's parallel loops use the same team. With another count libgomp would start threads in the middle of a
        # step, all of them on the CPU that the calling thread is pinned to.
        torch.set_num_threads(settings.team_size)
    bind_team()


@dataclass
class _Applied:
    """The binding of this process, with the thread's previous CPUs and torch's threads."""

    binding: RankBinding
    affinity: set[int]
    torch_threads: int
    num_holders: int = 1


_applied: _Applied | None = None


def apply_binding(binding: RankBinding) -> None:
    """Bind this process: the calling thread and its team at once, other threads when they call `bind_team`.

    Kernels may have run before. Each call needs a `release_binding`. ConfigError if the process has another binding:
    the number of threads is per process.
    """
    global _applied
    if _applied is not None:
        if _applied.binding != binding:
            raise ConfigError(
                f"this process is bound already ({_applied.binding}) and cannot also be bound to {binding}: "
                "close the engine that has it so, or start another process"
            )
        _applied.num_holders += 1
    else:
        _applied = _Applied(binding, os.sched_getaffinity(0), torch.get_num_threads())
        claim_cpus(binding)
    apply_config()


def release_binding() -> None:
    """Release a binding. The last holder restores the process and the calling thread."""
    global _applied
    if _applied is None:
        raise RuntimeError("release_binding without apply_binding")
    _applied.num_holders -= 1
    if _applied.num_holders:
        return
    before, _applied = _applied, None
    config.use(None)
    kernels.bind_threads([])
    torch.set_num_threads(before.torch_threads)
    # If the system refuses these, it refused the binding too, with a warning.
    kernels.set_memory_policy("local", [])
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, before.affinity)
    apply_config()


def _prefer_memory(nodes: tuple[int, ...]) -> None:
    if error := kernels.set_memory_policy("prefer", list(nodes)):
        _warn_of_memory(nodes, error)


@functools.cache  # once per process, not per thread
def _warn_of_memory(nodes: tuple[int, ...], error: int) -> None:
    _log.warning(
        "the system does not let us choose where memory comes from (set_mempolicy: %s): pages are on the node of the "
        "thread that first writes them, which for bound threads is the same, here %s",
        os.strerror(error),
        ", ".join(map(str, nodes)),
    )


apply_config()
if (_build := read_build()).is_for_another_cpu:
    _log.warning("kernels are compiled for %s", _build)
