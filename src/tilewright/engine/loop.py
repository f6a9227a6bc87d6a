"""The thread that runs steps while there is work; other threads prepare requests and read the answers."""

from __future__ import annotations

import logging
import threading
import time
import traceback
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Literal, TypeVar

from tilewright.engine.constraint.compiler import Grammar
from tilewright.engine.core import EngineCore, StepResult
from tilewright.engine.handle import EngineError, EngineLostError, Handle
from tilewright.engine.measure.costs import Costs, draft_cost, step_cost
from tilewright.engine.measure.stats import Stats, StepCount, StepCounter
from tilewright.engine.schedule.sequence import PromptReader, Sequence
from tilewright.engine.schedule.step import Step
from tilewright.host.memory import trim_heap
from tilewright.types import Completion, Delta, ModelInputs, RequestError, SamplingParams

PromptKind = Literal["text", "long text", "media", "constraint"]
Result = TypeVar("Result")


class PreparationThreads:
    """Thread pools that prepare requests, one pool per kind of slow work.

    Text does not wait behind videos or a book, nor videos behind a constraint that takes seconds to compile. The pools
    for media and for constraints have `num_threads` each. A thread starts when first needed and calls `start`.
    """

    def __init__(self, num_threads: int, start: Callable[[], None] | None = None) -> None:
        counts: dict[PromptKind, int] = {"text": 1, "long text": 1, "media": num_threads, "constraint": num_threads}
        self._pools = {kind: ThreadPoolExecutor(count, f"prepare {kind}", start) for kind, count in counts.items()}

    def submit(self, kind: PromptKind, task: Callable[[], Result]) -> Future[Result]:
        return self._pools[kind].submit(task)

    def close(self) -> None:
        """Wait for the submitted tasks."""
        for pool in self._pools.values():
            pool.shutdown()


_log = logging.getLogger(__name__)


class EngineLoop:
    """Accepts requests from any thread, and answers them through their Handles.

    Threads of the loop prepare prompts, num_prepare_threads of them for those with media, so that decoding images
    overlaps with computing. Each calls start_preparing first; the thread that runs steps calls start_stepping. With
    threaded=False nothing runs in the background: `submit` prepares, and the caller calls `step` until it returns
    False.
    """

    def __init__(
        self,
        core: EngineCore,
        *,
        num_prepare_threads: int = 2,
        start_preparing: Callable[[], None] | None = None,
        start_stepping: Callable[[], None] = lambda: None,
        costs: Costs | None = None,
        threaded: bool = True,
    ) -> None:
        self.core = core
        self._handles: dict[str, Handle] = {}  # of all unfinished requests
        self._inbox: deque[Callable[[], None]] = deque()  # tasks of other threads, run between steps
        self._changed = threading.Condition()  # guards what is above and below
        self._num_preparing = 0
        self._is_closing = False
        self._has_read_media = False  # since the heap was last trimmed
        self._failure: Exception | None = None  # why new requests are refused
        self._counter = StepCounter()
        self._costs = costs  # None: bytes read and operations are not counted
        self._step_began_s: float | None = None
        self.after_step: Callable[[], None] = lambda: None  # on the engine's thread, when all Handles have the results
        self._start_stepping = start_stepping
        self._preparers = PreparationThreads(num_prepare_threads, start_preparing) if threaded else None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True) if threaded else None
        if self._thread:
            self._thread.start()

    def submit(
        self,
        prepare: Callable[[], ModelInputs],
        params: SamplingParams,
        *,
        has_media: bool = True,
        is_long: bool = False,
        aborted: threading.Event | None = None,
        prompt_reader: PromptReader | None = None,
    ) -> Handle:
        """Return the Handle of a request whose prompt `prepare` makes; the Handle raises what `prepare` raises.

        `aborted` is set when the request is aborted, so that `prepare` can end early. `prompt_reader` is called on the
        engine's thread (`EngineCore.add`).
        """
        handle = Handle(uuid.uuid4().hex, params, self._abort, aborted)
        # Outside the lock, which the engine's thread needs too: looking up a constraint of megabytes takes a while.
        kind: PromptKind = "media" if has_media else "long text" if is_long else "text"
        if self.core.must_compile(params):
            kind = "constraint"
        with self._changed:
            if self._is_closing:
                raise EngineError("the engine is closed")
            if self._failure:
                raise self._failure
            if self._preparers:  # first: if no thread can be started, nothing is left behind
                self._preparers.submit(kind, partial(self._prepare, handle, prepare, prompt_reader))
            self._handles[handle.request_id] = handle
            self._num_preparing += 1
        if not self._preparers:
            self._prepare(handle, prepare, prompt_reader)
        return handle

    def step(self) -> bool:
        """Run the tasks of other threads, then one step; return False if there was no work."""
        while self._inbox:
            self._inbox.popleft()()
        if not self.core.has_work:
            return False
        self._step_began_s = time.perf_counter()
        try:
            result = self.core.step()
        finally:
            took_s, self._step_began_s = time.perf_counter() - self._step_began_s, None
        if result.step is not None:
            self._count(result.step, result, took_s)
        self._deliver(result.deltas)
        for request_id, failure in result.failures.items():
            self._fail(request_id, failure)
        return True

    def call(self, task: Callable[[], Result]) -> Result:
        """Run `task` on the engine's thread between two steps, and return its result."""
        done: Future[Result] = Future()

        def run() -> None:
            try:
                done.set_result(task())
            except BaseException as error:
                done.set_exception(error)

        with self._changed:
            if self._is_closing:
                raise EngineError("the engine is closed")
            if self._failure:
                raise self._failure
            self._post(run)
        if not self._thread:
            self.step()
        return done.result()

    def stats(self) -> Stats:
        """Return the counters and speeds as of now."""
        scheduler = self.core.scheduler
        drafter = scheduler.drafter
        counter, began_s = self._counter, self._step_began_s
        return Stats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_preparing=self._num_preparing,
            num_preemptions=scheduler.num_preemptions,
            num_drafts_proposed=drafter.num_proposed if drafter else 0,
            num_drafts_accepted=drafter.num_accepted if drafter else 0,
            num_prompt_tokens=counter.num_prompt_tokens,
            num_output_tokens=counter.num_output_tokens,
            num_steps=counter.num_steps,
            busy_s=counter.reads.busy_s,
            step_age_s=0.0 if began_s is None else time.perf_counter() - began_s,
            **vars(counter.speeds()),
            **scheduler.resources.stats(),
        )

    def fail(self, error: Exception) -> None:
        """End every request with `error` and refuse later ones: for faults that make all answers wrong. Thread-safe."""
        with self._changed:
            self._failure = error
            handles = list(self._handles.values())
        for handle in handles:
            handle.end(error)
            handle.abort()

    def close(self, *, drain: bool = True) -> None:
        """Return when all requests are answered, or aborted without `drain`. Later submissions are refused."""
        with self._changed:
            self._is_closing = True
            handles = list(self._handles.values())
            self._changed.notify_all()
        if not drain:
            for handle in handles:
                handle.abort()
        if self._preparers:
            self._preparers.close()
        if self._thread:
            self._thread.join()
        else:
            while self.step():
                pass

    def _run(self) -> None:
        self._start_stepping()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._inbox or self.core.has_work or self._can_stop)
                if self._can_stop and not self._inbox:
                    return
            self.step()
            self.after_step()
            if self._has_read_media and not self._handles:
                self._has_read_media = False
                trim_heap()  # decoded images and what was made of them: 100 MB of freed blocks for one of 1024x1024

    @property
    def _can_stop(self) -> bool:
        return self._is_closing and not self._handles

    def _post(self, task: Callable[[], None]) -> None:
        with self._changed:
            self._inbox.append(task)
            self._changed.notify_all()

    def _prepare(self, handle: Handle, prepare: Callable[[], ModelInputs], prompt_reader: PromptReader | None) -> None:
        try:
            inputs = None if handle.is_aborted else prepare()
            grammar = None if inputs is None else self.core.compile(inputs, handle.params)
        except BaseException as error:
            self._post(partial(self._add, handle, error))
        else:
            self._post(partial(self._add, handle, inputs, grammar, prompt_reader))

    def _add(
        self,
        handle: Handle,
        prepared: ModelInputs | BaseException | None,
        grammar: Grammar | None = None,
        prompt_reader: PromptReader | None = None,
    ) -> None:
        """Pass a prepared request to the core, or end it if preparing failed or it was aborted."""
        with self._changed:
            self._num_preparing -= 1
        if prepared is None or handle.is_aborted:
            handle.end_unstarted()
            self._forget(handle)
        elif isinstance(prepared, BaseException):
            self._end(handle, prepared)
        else:
            handle.prompt_token_ids, handle.opens_reasoning = prepared.token_ids, prepared.opens_reasoning
            self._has_read_media |= bool(prepared.media)
            try:
                self.core.add(
                    handle.request_id,
                    prepared,
                    handle.params,
                    handle.submitted_s,
                    grammar=grammar,
                    prompt_reader=prompt_reader,
                )
            except Exception as error:
                self._end(handle, error)

    def _abort(self, handle: Handle) -> None:
        self._post(partial(self._abort_now, handle.request_id))

    def _abort_now(self, request_id: str) -> None:
        try:
            self._deliver(self.core.abort(request_id))
        except Exception as error:
            self._fail(request_id, error)

    def _deliver(self, results: list[tuple[Sequence, Delta]]) -> None:
        for sequence, delta in results:
            handle = self._handles.get(sequence.request_id)
            if handle is None:  # `fail` has ended it, and a step has passed since
                continue
            handle.push(delta, None if delta.finish_reason is None else self._completion(sequence))
            if handle.is_done:
                self._forget(handle)

    def _completion(self, sequence: Sequence) -> Completion:
        """Return the answer of a finished sequence, with the read speed of the steps that decoded it."""
        completion, earlier = self.core.completion(sequence), sequence.reads_at_first_token
        speed = None if earlier is None else self._counter.reads.speed_since(earlier)
        return replace(completion, timings=replace(completion.timings, decode_bytes_per_s=speed))

    def _fail(self, request_id: str, error: Exception) -> None:
        """End a request that failed in a step: with its own RequestError, or else with an EngineError."""
        is_told = isinstance(error, RequestError | EngineLostError)  # the loss was logged when it was seen
        if not is_told:
            # Logged as text, since the error's frames would keep the sequences of the step, and their images, alive
            # as long as someone holds the error or the log record; they are removed below.
            _log.error("request %s failed in a step\n%s", request_id, "".join(traceback.format_exception(error)))
        forget_frames(error)
        if not is_told:
            wrapped = EngineError(f"the step that computed this request failed: {error}")
            wrapped.__cause__ = error
            error = wrapped
        self._end(self._handles[request_id], error)

    def _end(self, handle: Handle, error: BaseException) -> None:
        handle.end(error)
        self._forget(handle)

    def _forget(self, handle: Handle) -> None:
        with self._changed:
            del self._handles[handle.request_id]
            self._changed.notify_all()

    def _count(self, step: Step, result: StepResult, took_s: float) -> None:
        chunks = step.chunks
        num_sampled = sum(bool(delta.token_ids) for _, delta in result.deltas)
        read_bytes, flops = step_cost(self._costs, chunks, num_sampled) if self._costs else (0, 0)
        if self._costs and self._costs.draft:
            drafted_bytes, drafted_flops = draft_cost(self._costs.draft, result.draft_inputs)
            read_bytes, flops = read_bytes + drafted_bytes, flops + drafted_flops
        count = StepCount(
            ended_s=time.perf_counter(),
            took_s=took_s,
            num_prompt_tokens=sum(
                min(chunk.stop, chunk.sequence.num_prompt_tokens) - chunk.start
                for chunk in chunks
                if chunk.start < chunk.sequence.num_prompt_tokens
            ),
            num_output_tokens=sum(len(delta.token_ids) for _, delta in result.deltas),
            read_bytes=read_bytes,
            flops=flops,
        )
        self._counter.count(count)
        for sequence, _ in result.deltas:
            if sequence.reads_at_first_token is None:
                sequence.reads_at_first_token = self._counter.reads


def forget_frames(error: BaseException) -> None:
    """Remove the tracebacks from an error and from its causes and contexts."""
    chain = [error]
    for link in chain:
        link.__traceback__ = None
        earlier = (link.__cause__, link.__context__)
        chain += [item for item in earlier if item is not None and all(item is not known for known in chain)]
