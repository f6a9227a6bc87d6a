"""The thread that steps while there is work, and the way in and out for all others."""

from __future__ import annotations

import logging
import threading
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from tilewright.engine.constraint import Grammar
from tilewright.engine.core import EngineCore
from tilewright.engine.handle import Handle
from tilewright.engine.sequence import Sequence
from tilewright.engine.stats import Stats, TokenCounter
from tilewright.types import Delta, ModelInputs, SamplingParams

_log = logging.getLogger(__name__)


class EngineError(RuntimeError):
    """A step failed, and with it the requests that were part of it."""


class EngineLoop:
    """Takes requests from any thread, and answers them through their Handles.

    Prompts are prepared by num_prepare_threads of its own, so that reading pictures overlaps with computing; each calls
    start_preparing first, as the thread that steps calls start_stepping. With threaded=False nothing runs by itself:
    `submit` prepares, and the caller calls `step` until it returns False.
    """

    def __init__(
        self,
        core: EngineCore,
        *,
        num_prepare_threads: int = 2,
        start_preparing: Callable[[], None] | None = None,
        start_stepping: Callable[[], None] = lambda: None,
        threaded: bool = True,
    ) -> None:
        self.core = core
        self._handles: dict[str, Handle] = {}  # of all requests that are not done
        self._inbox: deque[Callable[[], None]] = deque()  # what other threads ask for, done between steps
        self._changed = threading.Condition()  # guards what is above and below
        self._num_preparing = 0
        self._is_closing = False
        self._tokens = TokenCounter()
        self._start_stepping = start_stepping
        self._preparers = ThreadPoolExecutor(num_prepare_threads, "prepare", start_preparing) if threaded else None
        # A constraint may take seconds to compile: meanwhile others are prepared. Threads start when they are needed.
        self._constrainers = ThreadPoolExecutor(num_prepare_threads, "constrain", start_preparing) if threaded else None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True) if threaded else None
        if self._thread:
            self._thread.start()

    def submit(self, prepare: Callable[[], ModelInputs], params: SamplingParams) -> Handle:
        """The Handle of a request whose prompt `prepare` makes. What it raises, the Handle's readers get."""
        handle = Handle(uuid.uuid4().hex, params, self._abort)
        with self._changed:
            if self._is_closing:
                raise EngineError("the engine is closed")
            self._handles[handle.request_id] = handle
            self._num_preparing += 1
            preparers = self._preparers if params.constraint is None else self._constrainers
            if preparers:
                preparers.submit(self._prepare, handle, prepare)
        if not preparers:
            self._prepare(handle, prepare)
        return handle

    def step(self) -> bool:
        """Does what came in, then one step; False when there was no work."""
        while self._inbox:
            self._inbox.popleft()()
        if not self.core.has_work:
            return False
        try:
            results = self.core.step()
        except Exception as error:
            _log.exception("a step failed")
            for request_id in self.core.abandon_step():
                wrapped = EngineError(f"the step that computed this request failed: {error}")
                wrapped.__cause__ = error
                self._end(self._handles[request_id], wrapped)
            return True
        self._count(results)
        self._deliver(results)
        for request_id, failure in self.core.failures.items():
            self._end(self._handles[request_id], failure)
        return True

    def stats(self) -> Stats:
        """How it is doing now."""
        scheduler = self.core.scheduler
        pool, speculator = scheduler.pool, scheduler.speculator
        prompt_tokens_per_s, output_tokens_per_s = self._tokens.speeds()
        return Stats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_preparing=self._num_preparing,
            num_pages=pool.num_pages,
            num_pages_used=pool.num_used,
            prefix_hit_rate=scheduler.prefix_cache.hit_rate,
            feature_hit_rate=scheduler.features.hit_rate,
            feature_bytes=scheduler.features.size_bytes,
            num_preemptions=scheduler.num_preemptions,
            num_drafts_proposed=speculator.num_proposed if speculator else 0,
            num_drafts_accepted=speculator.num_accepted if speculator else 0,
            num_prompt_tokens=self._tokens.num_prompt_tokens,
            num_output_tokens=self._tokens.num_output_tokens,
            prompt_tokens_per_s=prompt_tokens_per_s,
            output_tokens_per_s=output_tokens_per_s,
        )

    def close(self, *, drain: bool = True) -> None:
        """Ends when all requests are answered, or, without drain, aborted. Later submissions are refused."""
        with self._changed:
            self._is_closing = True
            handles = list(self._handles.values())
            self._changed.notify_all()
        if not drain:
            for handle in handles:
                handle.abort()
        if self._preparers and self._constrainers and self._thread:
            self._preparers.shutdown()
            self._constrainers.shutdown()
            self._thread.join()
        else:
            while self.step():
                pass

    def _run(self) -> None:
        self._start_stepping()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._inbox or self.core.has_work or self._can_stop)
                if self._can_stop:
                    return
            self.step()

    @property
    def _can_stop(self) -> bool:
        return self._is_closing and not self._handles

    def _post(self, task: Callable[[], None]) -> None:
        with self._changed:
            self._inbox.append(task)
            self._changed.notify_all()

    def _prepare(self, handle: Handle, prepare: Callable[[], ModelInputs]) -> None:
        try:
            inputs = None if handle.is_aborted else prepare()
            grammar = None if inputs is None else self.core.compile(inputs, handle.params)
        except BaseException as error:
            self._post(partial(self._add, handle, error))
        else:
            self._post(partial(self._add, handle, inputs, grammar))

    def _add(
        self, handle: Handle, prepared: ModelInputs | BaseException | None, grammar: Grammar | None = None
    ) -> None:
        """Hands a prepared request to the core, or ends it if preparing it failed or is of no use any more."""
        with self._changed:
            self._num_preparing -= 1
        if isinstance(prepared, BaseException):
            self._end(handle, prepared)
        elif prepared is None or handle.is_aborted:
            handle.end_unstarted()
            self._forget(handle)
        else:
            try:
                self.core.add(handle.request_id, prepared, handle.params, handle.submitted_s, grammar)
            except Exception as error:
                self._end(handle, error)

    def _abort(self, handle: Handle) -> None:
        self._post(lambda: self._deliver(self.core.abort(handle.request_id)))

    def _deliver(self, results: list[tuple[Sequence, Delta]]) -> None:
        for sequence, delta in results:
            handle = self._handles[sequence.request_id]
            handle.push(delta, None if delta.finish_reason is None else self.core.completion(sequence))
            if handle.is_done:
                self._forget(handle)

    def _end(self, handle: Handle, error: BaseException) -> None:
        handle.end(error)
        self._forget(handle)

    def _forget(self, handle: Handle) -> None:
        with self._changed:
            del self._handles[handle.request_id]
            self._changed.notify_all()

    def _count(self, results: list[tuple[Sequence, Delta]]) -> None:
        step = self.core.step_under_way
        assert step is not None
        num_prompt_tokens = sum(
            max(0, min(chunk.stop, chunk.sequence.num_prompt_tokens) - chunk.start) for chunk in step.chunks
        )
        self._tokens.count(num_prompt_tokens, sum(len(delta.token_ids) for _, delta in results))
        self.core.step_under_way = None  # with its sequences and their media, which nobody else may need any more
