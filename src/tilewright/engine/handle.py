"""The caller's side of a request, and the errors of the engine itself, which no request causes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator

from tilewright.types import Completion, Delta, SamplingParams, Timings


class EngineError(RuntimeError):
    """A step failed, and the requests in it with it."""


class EngineLostError(EngineError):
    """The engine cannot continue with any request; a restarted one can."""


_log = logging.getLogger(__name__)


class Handle:
    """The answers to one request as they are generated, readable from any thread; a slow reader delays nobody."""

    def __init__(
        self,
        request_id: str,
        params: SamplingParams,
        abort: Callable[[Handle], None],
        aborted: threading.Event | None = None,
    ) -> None:
        self.request_id = request_id
        self.params = params
        self._aborted = aborted or threading.Event()
        self.prompt_token_ids: tuple[int, ...] = ()  # set once the prompt is prepared; its media are not kept here
        self.opens_reasoning = False
        self._abort = abort
        self.submitted_s = time.perf_counter()
        self._changed = threading.Condition()
        self._deltas: list[Delta] = []
        self._completions: list[Completion | None] = [None] * params.n
        # Separate from `_changed`, so that a thread waiting for the end is not woken by every token, on a core that
        # computes.
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._subscribers: list[tuple[Callable[[Delta], None], Callable[[BaseException | None], None]]] = []

    @property
    def is_aborted(self) -> bool:
        return self._aborted.is_set()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def __iter__(self) -> Iterator[Delta]:
        """Yield every Delta from the first one, as it arrives; then raise the request's error, if there is one."""
        index = 0
        while True:
            with self._changed:
                while len(self._deltas) == index and not self.is_done:
                    self._changed.wait()
                deltas = self._deltas[index:]
            yield from deltas
            index += len(deltas)
            if not deltas:
                if self._error is not None:
                    raise self._error
                return

    def subscribe(self, on_delta: Callable[[Delta], None], on_end: Callable[[BaseException | None], None]) -> None:
        """Call on_delta with every Delta from the first one, then on_end with the error or None.

        Both are called on the engine's thread, which waits for them: hand over and return.
        """
        with self._changed:
            for delta in self._deltas:
                _call(on_delta, delta)
            if self.is_done:
                _call(on_end, self._error)
            else:
                self._subscribers.append((on_delta, on_end))

    def result(self, timeout_s: float | None = None) -> list[Completion]:
        """Return the n answers once all are finished; raise the request's error, or TimeoutError."""
        if not self._done.wait(timeout_s):
            raise TimeoutError(f"request {self.request_id} is not finished after {timeout_s} s")
        if self._error is not None:
            raise self._error
        return [completion for completion in self._completions if completion is not None]

    def abort(self) -> None:
        """End the request as soon as the step under way is done; its answers get finish_reason "abort"."""
        self._aborted.set()
        self._abort(self)

    def push(self, delta: Delta, completion: Completion | None = None) -> None:
        """Append a Delta, and the answer it completes. Called by the engine, as are `end` and `end_unstarted`."""
        with self._changed:
            self._deltas.append(delta)
            if completion is not None:
                self._completions[delta.index] = completion
            for on_delta, _ in self._subscribers:
                _call(on_delta, delta)
            self._changed.notify_all()
        if None not in self._completions:
            self.end(None)

    def end(self, error: BaseException | None) -> None:
        with self._changed:
            if self.is_done:
                return
            self._error = error
            self._done.set()
            for _, on_end in self._subscribers:
                _call(on_end, error)
            self._subscribers.clear()
            self._changed.notify_all()

    def end_unstarted(self) -> None:
        """End a request that was aborted before it reached the engine: its answers are empty."""
        waited_s = time.perf_counter() - self.submitted_s
        for index in range(self.params.n):
            completion = Completion("", (), "abort", 0, 0, Timings(waited_s, waited_s, waited_s))
            self.push(Delta(index, "", (), finish_reason="abort"), completion)


def _call(function: Callable, argument: object) -> None:
    try:
        function(argument)
    except Exception:  # a broken reader must not stop the engine
        _log.exception("a subscriber of a request failed")
