"""The engine process: reads requests from a socket, submits them to an Engine, sends the events of each step."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tilewright.engine.handle import EngineLostError
from tilewright.flags.engine import make_engine
from tilewright.inputs.media import MediaLimits
from tilewright.outputs.sound import to_pcm16
from tilewright.process.frames import Channel
from tilewright.server.http.errors import param_of
from tilewright.server.link.backend import (
    AnswerDelta,
    DecodedLogprob,
    Ended,
    EngineRequest,
    Event,
    Failed,
    ModelInfo,
    Started,
    event_to_json,
    request_from_json,
)
from tilewright.types import Completion, Delta, RequestError, TokenLogprob, TransientError

if TYPE_CHECKING:
    from tilewright.engine.engine import Engine
    from tilewright.engine.handle import Handle
    from tilewright.inputs.tokenizer import Tokenizer

Post = list[tuple[str, Event]]  # (request id, event)


class Outbox:
    """Events that wait for `flush`. Thread-safe; keeps the order of each request's events."""

    def __init__(self, send: Callable[[Post], object]) -> None:
        self._send = send
        self._events: Post = []
        self._lock = threading.Lock()

    def put(self, request_id: str, event: Event) -> None:
        with self._lock:
            self._events.append((request_id, event))

    def flush(self) -> None:
        """Send the collected events, if any."""
        with self._lock:  # held while sending, so that later events do not overtake
            events, self._events = self._events, []
            if events:
                self._send(events)


_log = logging.getLogger(__name__)

Emit = Callable[[str, Event], None]  # (request id, event); called on the engine's thread


class EngineService:
    """Submits requests and emits their events. One thread calls `submit` and `abort`.

    `limits` are the machine's measured limits, if any: (bytes read, GEMM operations) per second.
    """

    def __init__(self, engine: Engine, emit: Emit, limits: tuple[float, float] | None = None) -> None:
        self._engine = engine
        self._emit = emit
        self._limits = limits
        self._handles: dict[str, Handle] = {}

    def model(self) -> ModelInfo:
        loaded, limits = self._engine.loaded, self._engine.limits
        sources = loaded.tokenizer.chat_template or {}
        template = sources.get("tool_use", sources.get("default", next(iter(sources.values()), None)))
        accepts, text_limits = loaded.processor.accepts, self._engine.text_limits
        sizes = limits.max_context, limits.max_sequences
        voices = self._engine.voices, self._engine.voice_aliases
        return ModelInfo(loaded.name, *sizes, template, accepts, text_limits, *voices)

    def submit(self, request_id: str, request: EngineRequest) -> None:
        """Submit a request; its events, errors included, are emitted."""
        try:
            handle = self._submit(request)
        except Exception as error:
            self._emit(request_id, failure(error, request))
            return
        self._handles[request_id] = handle
        read_limit = None if self._limits is None else self._limits[0]
        events = _Events(self._engine.loaded.tokenizer, handle, request, read_limit)

        def on_delta(delta: Delta) -> None:
            for event in events.of_delta(delta):
                self._emit(request_id, event)

        def on_end(error: BaseException | None) -> None:
            self._handles.pop(request_id, None)
            self._emit(request_id, events.end() if error is None else failure(error, request))

        handle.subscribe(on_delta, on_end)

    def abort(self, request_id: str) -> None:
        """Abort a request; do nothing if it has ended."""
        handle = self._handles.get(request_id)
        if handle is not None:
            handle.abort()

    def stats(self) -> dict[str, float]:
        """Return the engine's Stats by name, and the shares of the machine's limits that its steps reach."""
        stats = {**dataclasses.asdict(self._engine.stats()), "num_replicas": 1}
        if self._limits is not None:
            read_limit, gemm_limit = self._limits
            stats |= {"read_limit_bytes_per_s": read_limit, "gemm_limit_flops_per_s": gemm_limit}
            stats |= {"read_share": stats["read_bytes_per_s"] / read_limit}
            stats |= {"gemm_share": stats["flops_per_s"] / gemm_limit}
        return stats

    def _submit(self, request: EngineRequest) -> Handle:
        sampling = dict(request.sampling)
        if request.messages is not None:
            return self._engine.submit_chat(
                request.messages,
                tools=request.tools,
                template_arguments=request.template_arguments,
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=request.continue_final_message,
                use_audio_in_video=request.use_audio_in_video,
                **sampling,
            )
        return self._engine.submit_prompt(text=request.text, token_ids=request.token_ids, **sampling)


class _Events:
    """Makes the events of one request."""

    def __init__(self, tokenizer: Tokenizer, handle: Handle, request: EngineRequest, read_limit: float | None) -> None:
        self._tokenizer = tokenizer
        self._handle = handle
        self._request = request
        self._read_limit = read_limit
        self._has_started = False

    def of_delta(self, delta: Delta) -> list[Event]:
        events: list[Event] = []
        if not self._has_started:
            self._has_started = True
            events.append(Started(len(self._handle.prompt_token_ids), self._handle.opens_reasoning))
        logprobs = None if delta.logprobs is None else tuple(self._decoded(item) for item in delta.logprobs)
        audio = b"" if delta.audio is None else to_pcm16(delta.audio)
        events.append(AnswerDelta(delta.index, delta.text, len(delta.token_ids), delta.finish_reason, logprobs, audio))
        return events

    def end(self) -> Ended:
        completions = self._handle.result(timeout_s=0)
        first, last = completions[0], max(completions, key=lambda completion: completion.timings.total_s)
        read_speed = last.timings.decode_bytes_per_s
        return Ended(
            num_prompt_tokens=first.num_prompt_tokens,
            num_cached_tokens=first.num_cached_tokens,
            num_output_tokens=sum(len(completion.token_ids) for completion in completions),
            timings=dataclasses.replace(
                last.timings, queued_s=first.timings.queued_s, first_token_s=first.timings.first_token_s
            ),
            prompt=self._prompt(),
            prompt_logprobs=self._prompt_logprobs(first),
            bandwidth_share=None if self._read_limit is None or read_speed is None else read_speed / self._read_limit,
        )

    def _prompt(self) -> str | None:
        if not self._request.returns_prompt:
            return None
        if self._request.text is not None:
            return self._request.text
        return self._tokenizer.decode(self._handle.prompt_token_ids, skip_special_tokens=False)

    def _prompt_logprobs(self, completion: Completion) -> tuple[DecodedLogprob, ...] | None:
        if completion.prompt_logprobs is None:
            return None
        return tuple(
            DecodedLogprob(self._tokenizer.token_bytes(token_id), None, ()) if item is None else self._decoded(item)
            for token_id, item in zip(self._handle.prompt_token_ids, completion.prompt_logprobs, strict=True)
        )

    def _decoded(self, item: TokenLogprob) -> DecodedLogprob:
        token_bytes = self._tokenizer.token_bytes
        top = tuple((token_bytes(token_id), logprob) for token_id, logprob in item.top)
        return DecodedLogprob(token_bytes(item.token_id), item.logprob, top)


def failure(error: BaseException, request: EngineRequest) -> Failed:
    """Return the event of an error. An internal error is logged, and the client sees no details."""
    if isinstance(error, RequestError):
        # An error without a field is about the prompt: its media, its placeholders, its length.
        param = param_of(error) or "prompt"
        return Failed("request", str(error), request.names.get(param, param), error.code)
    if isinstance(error, EngineLostError):
        return Failed("unavailable", f"{error}; the engine is being restarted, send the request again")
    if isinstance(error, TransientError):
        _log.warning("a request failed and may succeed if sent again: %s", error)
        return Failed("unavailable", f"{error}; send the request again")
    _log.error("a request failed", exc_info=error)
    return Failed("engine", "the engine could not compute this request; the server's log has the reason")


# Measurement of the machine's limits, with which /metrics compares the engine: 0.7 s of the start, buffers included.
# The message that the engine is ready has them, and the options of a restarted engine.
MEASURE_S = 0.2
KNOWN_LIMITS = "known_limits"


def serve(channel: Channel, options: dict[str, Any]) -> None:
    """Serve requests until the other end closes."""
    from tilewright.engine.measure import machine

    known_limits = options.pop(KNOWN_LIMITS, None)
    try:
        engine = make_engine(**{**options, "media_limits": MediaLimits(**options["media_limits"])})
    except RequestError as error:
        channel.send({"refused": str(error)})
        return
    outbox = Outbox(lambda events: channel.send({"events": [[id, event_to_json(event)] for id, event in events]}))
    engine.loop.after_step = outbox.flush
    if known_limits is None:
        measured = machine.measure(MEASURE_S)
        gemm_tflops = measured.fp32_tflops if options.get("dtype") == "float32" else measured.bf16_tflops
        known_limits = (measured.read_gb_s * 1e9, gemm_tflops * 1e12)
    service = EngineService(engine, outbox.put, known_limits)
    with engine:
        channel.send({"ready": dataclasses.asdict(service.model()), KNOWN_LIMITS: known_limits})
        while (message := channel.receive()) is not None:
            _handle(message, service, channel)
            outbox.flush()


def _handle(message: dict[str, Any], service: EngineService, channel: Channel) -> None:
    if "submit" in message:
        service.submit(message["submit"], request_from_json(message["request"]))
    elif "abort" in message:
        service.abort(message["abort"])
    elif "stats" in message:
        channel.send({"stats": message["stats"], "values": service.stats()})
    else:
        raise ValueError(f"unknown message with {sorted(message)}")
