"""Types shared by all stages: requests, model inputs, outputs. Imports no torch."""

from __future__ import annotations

import difflib
import itertools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

MediaKind = Literal["image", "video", "audio"]
MEDIA_KINDS: tuple[MediaKind, ...] = ("image", "video", "audio")
FinishReason = Literal["stop", "length", "abort"]


class RequestError(ValueError):
    """A request that cannot be served as asked; the message names the value and what is allowed.

    `param` is the wrong field, if known, and `code` OpenAI's name of the error.
    """

    code: str | None = None

    def __init__(self, message: str = "", *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        if code is not None:
            self.code = code


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint for an error about an unknown name: the nearest known name; empty if none is near."""
    nearest = difflib.get_close_matches(name[:100], list(known), n=1)
    return f"; did you mean {nearest[0]}?" if nearest else ""


class TransientError(RuntimeError):
    """A request failed for a reason outside it, and may succeed when sent again."""


class EngineUnavailable(RuntimeError):
    """No engine is ready: it is loading, or it ended and is being restarted, or the server is shutting down.

    `code` tells these apart for clients.
    """

    def __init__(self, message: str, code: str = "engine_unavailable") -> None:
        super().__init__(message)
        self.code = code


class ContextLengthExceeded(RequestError):
    """A prompt longer than the context; `found` describes it.

    The message begins like that of OpenAI's server: litellm and others recognise the error by its words, not its code.
    """

    code = "context_length_exceeded"

    def __init__(self, max_context: int, found: str) -> None:
        super().__init__(
            f"This model's maximum context length is {max_context} tokens. However, {found}. "
            "Please reduce the length of the prompt."
        )


class UnsupportedConfig(ValueError):
    """A model config with an unsupported value; the message names the key, the value and what is supported."""


REASONING_TAGS = ("<think>", "</think>")  # around the reasoning of reasoning models


@dataclass(frozen=True)
class Constraint:
    """The required form of an answer's text. Reasoning before it is not constrained."""

    kind: Literal["json_schema", "regex", "lark"]
    source: str  # the schema as JSON, the regular expression, or the grammar in llguidance's form of Lark
    allows_reasoning: bool = False  # whether reasoning within REASONING_TAGS may come first
    subject: str = ""  # what it was made from, for errors; empty: its kind is named

    def __post_init__(self) -> None:
        if not isinstance(self.source, str):  # a schema as a dict, most likely
            raise RequestError(
                f"constraint source is {_shown(self.source)}, expected text: json.dumps makes it of a dict"
            )


@dataclass(frozen=True)
class SamplingParams:
    """Sampling and stopping of an answer, by OpenAI's names. Validated on construction."""

    max_tokens: int | None = None  # None: until the context is full
    min_tokens: int = 0
    temperature: float = 1.0  # 0: greedy
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
    logprobs: int | None = None  # likeliest tokens to list beside the chosen one; None: no log-probabilities
    prompt_logprobs: int | None = None
    constraint: Constraint | None = None
    voice: str | None = None  # voice that speaks the answer; None: text only

    def __post_init__(self) -> None:
        """Convert every field to its annotated type, numpy's numbers included: later steps rely on it."""
        checked: dict[str, Any] = {
            name: _number(name, getattr(self, name), *limits) for name, limits in _NUMBERS.items()
        }
        checked |= {name: _integer(name, getattr(self, name), *limits) for name, limits in _INTEGERS.items()}
        for name, limits in _INTEGERS_OR_NONE.items():
            value = getattr(self, name)
            checked[name] = None if value is None else _integer(name, value, *limits)
        checked |= {"logit_bias": _biases(self.logit_bias), "stop": _stops(self.stop)}
        checked["stop_token_ids"] = tuple(
            _integer("stop_token_ids", item, 0, _MAX_INT32) for item in _items("stop_token_ids", self.stop_token_ids)
        )
        if not isinstance(self.ignore_eos, bool | np.bool_):
            raise RequestError(f"ignore_eos is {_shown(self.ignore_eos)}, expected True or False")
        checked["ignore_eos"] = bool(self.ignore_eos)
        if not isinstance(self.constraint, Constraint | None):
            raise RequestError(f"constraint is {_shown(self.constraint)}, expected a tilewright.types.Constraint")
        if not isinstance(self.voice, str | None):
            raise RequestError(f"voice is {_shown(self.voice)}, expected the name of one", param="voice")
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens is {self.min_tokens}, more than max_tokens, {self.max_tokens}")


@dataclass(frozen=True)
class Span:
    """A run of placeholder tokens that rows of a medium's features replace."""

    start: int
    length: int


@dataclass(frozen=True)
class Region:
    """Consecutive rows of the media buffer."""

    first_row: int
    num_rows: int


@dataclass(frozen=True)
class Medium:
    """A medium in its places in a prompt and in the media buffer: plain data, no pixels.

    A processor makes it of a PreparedMedium; the scheduler reads it, and an encoder a MediaItem of it. Its features
    replace its spans' tokens, in order. In models with cross-attention they stay outside as states, which the tokens
    from its span on attend to.
    """

    kind: MediaKind
    key: bytes  # 16 bytes: a hash of the content and of the preprocessing; the caches' key
    grid: tuple[int, int, int]  # frame groups or tiles, rows and columns of patches, before merging
    spans: tuple[Span, ...]
    region: Region  # the encoder's input, valid as long as the medium's ModelInputs
    encoder_rows: int  # rows the encoder computes, including padding, counted in a step's encoder budget
    num_states: int = 0  # encoder states that tokens attend to; 0: features replace tokens
    tiling: tuple[int, int] = (1, 1)  # rows and columns of tiles an image is cut into
    feature_width: int = 0  # of features that came with the request instead of patches; 0: the medium is to be encoded

    @property
    def num_features(self) -> int:
        return sum(span.length for span in self.spans)


@dataclass(frozen=True)
class ModelInputs:
    """A prompt as the model reads it."""

    token_ids: tuple[int, ...]
    positions: np.ndarray  # [A, T] int64: rope positions on each of the model's axes
    next_position: int  # of the first token after the prompt, on every axis; it increases by one per token
    media: tuple[Medium, ...] = ()
    allocation: object = None  # keeps the media's regions of the media buffer; they are freed with it
    opens_reasoning: bool = False  # whether the prompt ends inside reasoning, which the answer continues


@dataclass(frozen=True)
class TokenLogprob:
    """The log-probability of a token, its rank among all (1: the likeliest), and those of the likeliest ones."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]  # (token id, log-probability), best first


@dataclass(frozen=True)
class Timings:
    """Seconds since the request was submitted."""

    queued_s: float  # until its first step
    first_token_s: float
    total_s: float
    # Bytes per second of weights, keys and values read by steps after the first token; None: no such step.
    decode_bytes_per_s: float | None = None


@dataclass(frozen=True)
class Delta:
    """Output that one step added to one answer.

    Every kind of output has its own field, empty if the step added none: text is empty, too, if tokens complete no
    character. Readers use the fields that are set, so that a step which only adds sound is a Delta like any other.
    """

    index: int  # which of the request's n answers
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    audio: np.ndarray | None = None  # fp32 samples [n], at the Completion's rate


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
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None  # None for the first token
    audio: np.ndarray | None = None  # of a spoken answer, fp32 samples [n]
    audio_rate: int | None = None  # samples per second


Message = Mapping[str, object]  # as in OpenAI's API: role, content (text or parts), tool_calls, ...
Messages = Sequence[Message]


_MAX_INT32, _MAX_INT64 = 2**31 - 1, 2**63 - 1
# A step compares each with every token of the answer.
MAX_STOPS = 256
MAX_STOP_CHARACTERS = 1024
MAX_BIASES = 4096

# The smallest and the largest value of SamplingParams' fields.
_NUMBERS = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
_INTEGERS = {"min_tokens": (0, _MAX_INT64), "top_k": (0, _MAX_INT32), "n": (1, 128)}
_INTEGERS_OR_NONE = {
    "max_tokens": (1, _MAX_INT64),
    "seed": (-(2**63), 2**64 - 1),
    "logprobs": (0, 20),
    "prompt_logprobs": (0, 20),
}


def _number(name: str, value: Any, low: float, high: float) -> float:
    """Return the value as a float within limits; text and booleans are refused."""
    try:
        number = math.nan if isinstance(value, bool | np.bool_ | str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not low <= number <= high:  # in this form NaN fails too
        raise RequestError(f"{name} is {_shown(value)}, expected a number from {low:g} to {high:g}")
    return number


def _integer(name: str, value: Any, low: int, high: int) -> int:
    """Return the value as an int within limits, from any integer type; booleans are refused."""
    try:
        integer = None if isinstance(value, bool | np.bool_) else operator.index(value)
    except TypeError:
        integer = None
    if integer is None or not low <= integer <= high:
        raise RequestError(f"{name} is {_shown(value)}, expected an integer from {low} to {high}")
    return integer


def _items(name: str, value: Any) -> tuple[Any, ...]:
    """Return the items of a list of at most MAX_STOPS entries."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise RequestError(f"{name} is {_shown(value)}, expected a list")
    items = tuple(itertools.islice(value, MAX_STOPS + 1))
    if len(items) > MAX_STOPS:
        raise RequestError(f"{name} has more than {MAX_STOPS} entries, expected at most {MAX_STOPS}")
    return items


def _stops(value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else _items("stop", value)
    for text in texts:
        if not isinstance(text, str):
            raise RequestError(f"stop has {_shown(text)}, expected strings")
        if not text:
            raise RequestError("stop has an empty string, expected at least one character")
        if len(text) > MAX_STOP_CHARACTERS:
            raise RequestError(f"stop has a string of {len(text)} characters, expected at most {MAX_STOP_CHARACTERS}")
    return texts


def _biases(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise RequestError(f"logit_bias is {_shown(value)}, expected a mapping of token ids to numbers")
    if len(value) > MAX_BIASES:
        raise RequestError(f"logit_bias has {len(value)} entries, expected at most {MAX_BIASES}")
    return {
        _integer("a token id of logit_bias", token_id, 0, _MAX_INT32): _number(
            f"logit_bias[{_shown(token_id)}]", bias, -100.0, 100.0
        )
        for token_id, bias in value.items()
    }


def _shown(value: object) -> str:
    """Return a value's text for a message: some have none (an int of 5,000 digits), others too much."""
    try:
        return f"{value!r:.100}"
    except Exception:
        return f"a {type(value).__name__} that cannot be shown"
