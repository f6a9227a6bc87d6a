"""The threads that prepare prompts while the engine's thread computes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal, TypeVar

PromptKind = Literal["text", "long text", "media", "constraint"]
Result = TypeVar("Result")


class PreparationThreads:
    """Threads by what takes long about a request: text does not wait behind videos or a book, nor videos behind a
    constraint that takes seconds to compile.

    `num_threads` are those for media, and for constraints; each calls `start` first. They start when they are needed.
    """

    def __init__(self, num_threads: int, start: Callable[[], None] | None = None) -> None:
        counts: dict[PromptKind, int] = {"text": 1, "long text": 1, "media": num_threads, "constraint": num_threads}
        self._pools = {kind: ThreadPoolExecutor(count, f"prepare {kind}", start) for kind, count in counts.items()}

    def submit(self, kind: PromptKind, task: Callable[[], Result]) -> Future[Result]:
        return self._pools[kind].submit(task)

    def close(self) -> None:
        """Waits for the tasks that were submitted."""
        for pool in self._pools.values():
            pool.shutdown()
