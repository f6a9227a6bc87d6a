"""The interface between the server and an engine: requests, events and model information, with their JSON forms."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from tilewright.inputs.messages import TextLimits
from tilewright.types import Constraint, EngineUnavailable, FinishReason, RequestError, Timings


@dataclass(frozen=True)
class EngineRequest:
    """A request to the engine: messages, a text or token ids, with sampling parameters. JSON types and bytes only."""

    messages: Sequence[Mapping[str, Any]] | None = None
    text: str | None = None
    token_ids: Sequence[int] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    template_arguments: Mapping[str, Any] = field(default_factory=dict)  # of the chat template
    add_generation_prompt: bool = True
    continue_final_message: bool = False  # the answer continues the last message
    use_audio_in_video: bool = False
    sampling: Mapping[str, Any] = field(default_factory=dict)  # fields of SamplingParams
    returns_prompt: bool = False  # Ended includes the prompt's text
    # The client's names for the prompt and the constraint, for errors.
    names: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class DecodedLogprob:
    """A TokenLogprob with the bytes of its tokens; the server has no tokenizer."""

    token: bytes
    logprob: float | None  # None: the first token of a prompt
    top: tuple[tuple[bytes, float], ...]


AUDIO_RATE = 24_000  # samples per second, of all voices


@dataclass(frozen=True)
class AnswerDelta:
    """The tokens that one step added to one of the n answers."""

    index: int
    text: str
    num_tokens: int
    finish_reason: FinishReason | None = None
    logprobs: tuple[DecodedLogprob, ...] | None = None
    audio: bytes = b""  # speech: 16-bit mono samples, AUDIO_RATE per second


@dataclass(frozen=True)
class Started:
    """The prompt is computed, and the first token is sampled."""

    num_prompt_tokens: int
    opens_reasoning: bool


@dataclass(frozen=True)
class Ended:
    """A prompt's n answers are complete."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int  # of all n answers
    timings: Timings  # of the longest answer
    prompt: str | None = None
    prompt_logprobs: tuple[DecodedLogprob, ...] | None = None
    bandwidth_share: float | None = None  # of the machine's read bandwidth, in the steps after the first token


# What answers that the server's end cuts off are told, and the code of that error.
SHUTTING_DOWN, SERVER_ENDING = "the server is shutting down before the answer is complete", "server_ending"


@dataclass(frozen=True)
class Failed:
    """The request failed; no more events follow."""

    kind: Literal["request", "engine", "unavailable"]
    message: str
    param: str | None = None
    code: str | None = None

    def error(self) -> Exception:
        if self.kind == "request":
            return RequestError(self.message, param=self.param, code=self.code)
        if self.kind == "engine":
            return EngineFailure(self.message)
        return EngineUnavailable(self.message) if self.code is None else EngineUnavailable(self.message, self.code)


@dataclass(frozen=True)
class Restarted:
    """All events so far are void: another replica starts the request again, and its answer may differ."""


Event = Started | AnswerDelta | Ended | Failed | Restarted


class EngineFailure(RuntimeError):
    """An internal error of the engine; the request is not at fault."""


@dataclass(frozen=True)
class ModelInfo:
    """Properties of the loaded model that the server needs."""

    name: str
    max_context: int
    max_sequences: int
    template: str | None  # source of the chat template
    accepts: Sequence[str] = ()  # accepted kinds of media: image, video, audio
    text_limits: TextLimits | None = None  # None: the engine checks them
    voices: Sequence[str] = ()  # voices of spoken answers, the default first; empty: text only
    voice_aliases: Mapping[str, str] = field(default_factory=dict)  # OpenAI's names of `voices`

    def is_meant_by(self, name: str) -> bool:
        """Return whether `name` is the model's name, with or without an owner's name before it."""
        return names_model(name, self.name)


def names_model(name: str, model: str) -> bool:
    """Return whether `name` is `model`, with or without an owner's name before it."""
    return model in (name, name.split("/")[-1])


Listener = Callable[[Event], None]  # called on the event loop
Abort = Callable[[], None]  # aborts a request; no effect if it has ended


class Backend(Protocol):
    """The server's side of an engine."""

    @property
    def model(self) -> ModelInfo:
        """The model; raises EngineUnavailable while none is loaded."""

    @property
    def num_restarts(self) -> int:
        """The number of times that the engine was restarted."""

    def submit(self, request: EngineRequest, listener: Listener) -> Abort:
        """Submit a request whose events go to the listener; raise EngineUnavailable if no engine is ready."""

    async def stats(self) -> Mapping[str, float]:
        """Return the engine's stats under the names of `engine.stats.Stats`."""

    async def close(self) -> None:
        """End the engine; running requests are dropped."""


_EVENTS = (Started, AnswerDelta, Ended, Failed)  # indexed by the number that stands for each in JSON


def request_to_json(request: EngineRequest) -> dict[str, Any]:
    """Return an EngineRequest as JSON's types and bytes."""
    fields = {field.name: getattr(request, field.name) for field in dataclasses.fields(request)}
    constraint = request.sampling.get("constraint")
    if constraint is not None:
        fields["sampling"] = {**request.sampling, "constraint": dataclasses.asdict(constraint)}
    return fields


def request_from_json(fields: Mapping[str, Any]) -> EngineRequest:
    sampling = dict(fields["sampling"])
    if sampling.get("constraint") is not None:
        sampling["constraint"] = Constraint(**sampling["constraint"])
    if sampling.get("logit_bias"):
        sampling["logit_bias"] = {int(token_id): bias for token_id, bias in sampling["logit_bias"].items()}
    return EngineRequest(**{**fields, "sampling": sampling})


def event_to_json(event: Event) -> list[Any]:
    """Return an event as a list: its type's number, then its fields."""
    if isinstance(event, AnswerDelta):
        logprobs = _logprobs_to_json(event.logprobs)
        fields = [1, event.index, event.text, event.num_tokens, event.finish_reason, logprobs]
        return [*fields, event.audio] if event.audio else fields
    if isinstance(event, Ended):
        timings = dataclasses.astuple(event.timings)
        counts = [event.num_prompt_tokens, event.num_cached_tokens, event.num_output_tokens]
        return [2, *counts, timings, event.prompt, _logprobs_to_json(event.prompt_logprobs), event.bandwidth_share]
    return [_EVENTS.index(type(event)), *dataclasses.astuple(event)]


def event_from_json(fields: Sequence[Any]) -> Event:
    kind, *values = fields
    if _EVENTS[kind] is AnswerDelta:
        index, text, num_tokens, finish_reason, logprobs, *audio = values
        return AnswerDelta(index, text, num_tokens, finish_reason, _logprobs_from_json(logprobs), *audio)
    if _EVENTS[kind] is Ended:
        num_prompt_tokens, num_cached_tokens, num_output_tokens, timings, prompt, logprobs, bandwidth_share = values
        counts = (num_prompt_tokens, num_cached_tokens, num_output_tokens)
        return Ended(*counts, Timings(*timings), prompt, _logprobs_from_json(logprobs), bandwidth_share)
    return _EVENTS[kind](*values)


def _logprobs_to_json(logprobs: Sequence[DecodedLogprob] | None) -> list[Any] | None:
    # Latin-1 has a character for every byte.
    if logprobs is None:
        return None
    return [
        [item.token.decode("latin-1"), item.logprob, [[token.decode("latin-1"), value] for token, value in item.top]]
        for item in logprobs
    ]


def _logprobs_from_json(items: Sequence[Any] | None) -> tuple[DecodedLogprob, ...] | None:
    if items is None:
        return None
    return tuple(
        DecodedLogprob(
            token.encode("latin-1"), logprob, tuple((other.encode("latin-1"), value) for other, value in top)
        )
        for token, logprob, top in items
    )
