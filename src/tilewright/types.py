"""The nouns that cross stages: what is asked, what a model reads, what comes out. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length", "abort"]


class RequestError(ValueError):
    """A request that cannot be served as asked; the message names the value and what is allowed.

    `param` is the field that is wrong, where it is known, and `code` what OpenAI's clients know the fault by.
    """

    def __init__(self, message: str = "", *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class UnsupportedConfig(ValueError):
    """A model config that asks for something not built here; names the key, its value and what is there."""


REASONING_TAGS = ("<think>", "</think>")  # what a model that thinks puts around its thoughts


@dataclass(frozen=True)
class Constraint:
    """What the text of an answer must be. Thoughts before it are free where the model thinks."""

    kind: Literal["json_schema", "regex", "lark"]
    source: str  # the schema as JSON, the regular expression, or the grammar as llguidance reads Lark's form
    allows_reasoning: bool = False  # whether thoughts within REASONING_TAGS may come before
    subject: str = ""  # what it was made of, for errors; empty: told by its kind


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen and when to stop, by OpenAI's names. Checked when made."""

    max_tokens: int | None = None  # None: up to the context's end
    min_tokens: int = 0
    temperature: float = 1.0  # 0: the likeliest token
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None  # how many of the best tokens to list beside the chosen one; None: no log-probabilities
    prompt_logprobs: int | None = None
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        _require("temperature", self.temperature, 0.0, 2.0)
        _require("top_p", self.top_p, 0.0, 1.0)
        _require("min_p", self.min_p, 0.0, 1.0)
        _require("top_k", self.top_k, 0, 2**31 - 1)
        _require("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _require("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _require("n", self.n, 1, 128)
        _require("min_tokens", self.min_tokens, 0, None)
        _require("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        if self.max_tokens is not None:
            _require("max_tokens", self.max_tokens, 1, None)
            if self.min_tokens > self.max_tokens:
                raise RequestError(f"min_tokens is {self.min_tokens}, more than max_tokens, {self.max_tokens}")
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None:
                _require(name, count, 0, 20)
        for token_id, bias in self.logit_bias.items():
            _require(f"logit_bias[{token_id}]", bias, -100.0, 100.0)
        if any(not text for text in self.stop):
            raise RequestError("stop has an empty string, expected at least one character")


def _require(name: str, value: float, low: float, high: float | None) -> None:
    # Written so that NaN fails too.
    if not (value >= low and (high is None or value <= high)):
        raise RequestError(f"{name} is {value}, expected {f'{low} or more' if high is None else f'{low} to {high}'}")


@dataclass(frozen=True)
class Span:
    """A run of placeholder tokens that rows of a medium's features take the place of."""

    start: int
    length: int


@dataclass(frozen=True)
class Medium:
    """A picture or a video within a prompt. Its features fill its spans in order.

    In models with cross-attention they stay outside as states, which the tokens from its span on attend to.
    """

    kind: Literal["image", "video"]
    key: bytes  # 16 bytes: a hash of the content and of the preprocessing; caches go by it
    grid: tuple[int, int, int]  # frame groups or tiles, rows and columns of patches, before merging
    spans: tuple[Span, ...]
    load: Callable[[], Tensor]  # the patches [N, C * frames * P * P] the encoder reads; called when they are needed
    num_states: int = 0  # encoder states that tokens attend to; 0: features take the place of tokens
    tiling: tuple[int, int] = (1, 1)  # rows and columns of tiles a picture is cut into

    @property
    def num_features(self) -> int:
        return sum(span.length for span in self.spans)


@dataclass(frozen=True)
class ModelInputs:
    """A prompt as the model reads it."""

    token_ids: tuple[int, ...]
    positions: np.ndarray  # [A, T] int64: rope positions on each of the model's axes
    next_position: int  # of the first token after the prompt, on every axis; later ones count on from it
    media: tuple[Medium, ...] = ()
    opens_reasoning: bool = False  # whether it ends within the thoughts that the answer goes on with


@dataclass(frozen=True)
class TokenLogprob:
    """The log-probability of a token, its rank among all (1: the likeliest), and those of the likeliest ones."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]  # (token id, log-probability), best first


@dataclass(frozen=True)
class Timings:
    """Seconds, from the moment the request was submitted."""

    queued_s: float  # until its first step
    first_token_s: float
    total_s: float
    # Weights, keys and values read by the engine's steps after the first token, per second in them; None: no such step.
    decode_bytes_per_s: float | None = None


@dataclass(frozen=True)
class Delta:
    """What one step added to one answer."""

    index: int  # which of the request's n answers
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None


@dataclass(frozen=True)
class Completion:
    """One answer."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int  # of the prompt, found in the prefix cache
    timings: Timings
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None  # the first token has none


Message = Mapping[str, object]  # as OpenAI's: role, content (text or parts), tool_calls, ...
Messages = Sequence[Message]
