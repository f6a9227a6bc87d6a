"""The engine as the server sees it: what is asked of it, and what it tells while it answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from tilewright.inputs.text_limits import TextLimits
from tilewright.types import FinishReason, RequestError, Timings


@dataclass(frozen=True)
class EngineRequest:
    """A request for the engine: a conversation, a text or token ids, and how to sample. Of JSON's types and bytes."""

    messages: Sequence[Mapping[str, Any]] | None = None
    text: str | None = None
    token_ids: Sequence[int] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    template_args: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)  # by the names of SamplingParams
    wants_prompt: bool = False  # whether the prompt's text is to be told with its end
    # The fields of the request that the prompt and the constraint came from: errors name them.
    names: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SpelledLogprob:
    """A TokenLogprob whose tokens are spelled out; the server has no tokenizer."""

    token: bytes
    logprob: float | None  # None: the first token of a prompt
    top: tuple[tuple[bytes, float], ...]


@dataclass(frozen=True)
class AnswerDelta:
    """What one step added to one of the n answers."""

    index: int
    text: str
    num_tokens: int
    finish_reason: FinishReason | None = None
    logprobs: tuple[SpelledLogprob, ...] | None = None


@dataclass(frozen=True)
class Started:
    """The prompt was read, and the first token is there."""

    num_prompt_tokens: int
    opens_reasoning: bool


@dataclass(frozen=True)
class Ended:
    """All n answers are complete."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int  # of all n
    timings: Timings  # of the answer that took longest
    prompt: str | None = None
    prompt_logprobs: tuple[SpelledLogprob, ...] | None = None
    bandwidth_share: float | None = None  # of the machine's, reached in the steps after the first token


@dataclass(frozen=True)
class Failed:
    """There is no answer, or no more of it."""

    kind: Literal["request", "engine", "unavailable"]
    message: str
    param: str | None = None
    code: str | None = None

    def error(self) -> Exception:
        if self.kind == "request":
            return RequestError(self.message, param=self.param, code=self.code)
        return {"engine": EngineFailure, "unavailable": EngineUnavailable}[self.kind](self.message)


Event = Started | AnswerDelta | Ended | Failed


class EngineFailure(RuntimeError):
    """The engine could not compute a request, through no fault of the request's."""


class EngineUnavailable(RuntimeError):
    """There is no engine right now: it is loading, or was lost and is being started again."""


@dataclass(frozen=True)
class ModelInfo:
    """What the server must know of the model that is loaded."""

    name: str
    max_context: int
    max_sequences: int
    template: str | None  # the source of its chat template
    accepts: Sequence[str] = ()  # the kinds of media it takes beside text: image, video, audio
    text_limits: TextLimits | None = None  # None: the engine alone knows

    def is_meant_by(self, name: str) -> bool:
        """Whether it is what a client calls `name`: its name, with or without the owner's before it."""
        return name.split("/")[-1] == self.name or name == self.name


Listener = Callable[[Event], None]  # called on the event loop
Abort = Callable[[], None]  # frees what a request holds; harmless when it has ended


class Backend(Protocol):
    """An engine that answers."""

    @property
    def model(self) -> ModelInfo:
        """The model; EngineUnavailable while there is none."""

    @property
    def num_restarts(self) -> int:
        """How often an engine was lost and another started."""

    def submit(self, request: EngineRequest, listener: Listener) -> Abort:
        """Begins a request, whose events go to the listener; EngineUnavailable if nobody would answer it."""

    async def stats(self) -> Mapping[str, float]:
        """How the engine is doing, by the names of `engine.stats.Stats`."""

    async def close(self) -> None:
        """Ends the engine; what it was computing is dropped."""
