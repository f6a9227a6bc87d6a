"""Messages between the server and the engine process: JSON, with media as raw bytes behind it.

A frame is HEAD, the JSON text, and the blobs that the text gives the sizes of.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tilewright.server.link.backend import AnswerDelta, Ended, EngineRequest, Event, Failed, SpelledLogprob, Started
from tilewright.types import Constraint, Timings

HEAD = struct.Struct("<Q")  # bytes of the JSON text
_TYPES = (Started, AnswerDelta, Ended, Failed)


class Envelope(NamedTuple):
    """A message whose blobs have not been read yet."""

    message: dict[str, Any]
    paths: list[list[str | int]]  # where each blob belongs
    sizes: list[int]

    def fill(self, blobs: Sequence[bytes]) -> dict[str, Any]:
        """The message with its blobs in place."""
        for (*path, last), blob in zip(self.paths, blobs, strict=True):
            holder: Any = self.message
            for key in path:
                holder = holder[key]
            holder[last] = blob
        return self.message


def encode(message: Mapping[str, Any]) -> list[bytes]:
    """The frame of a message of JSON's types and bytes, as buffers to write one after the other: no blob is copied."""
    blobs: list[bytes] = []
    paths: list[list[str | int]] = []
    value = _lift(message, [], paths, blobs)
    text = json.dumps([value, paths, [len(blob) for blob in blobs]], separators=(",", ":")).encode()
    return [HEAD.pack(len(text)) + text, *blobs]


def decode(text: bytes) -> Envelope:
    """The JSON of a frame; the reader then reads each blob into bytes of its own, which saves a copy."""
    return Envelope(*json.loads(text))


def _lift(value: Any, path: list[str | int], paths: list[list[str | int]], blobs: list[bytes]) -> Any:
    """The value without its bytes, which go to `blobs`, and their paths to `paths`.

    A marker in their place could be forged by the text of a request; a path cannot.
    """
    if isinstance(value, bytes):
        paths.append(path)
        blobs.append(value)
        return None
    if isinstance(value, Mapping):
        return {key: _lift(item, [*path, key], paths, blobs) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_lift(item, [*path, index], paths, blobs) for index, item in enumerate(value)]
    return value


def request_to_json(request: EngineRequest) -> dict[str, Any]:
    """An EngineRequest as `encode` takes it."""
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
    """An event as a list: its type's number, then its fields. Most are AnswerDeltas without log-probabilities."""
    if isinstance(event, AnswerDelta):
        logprobs = _spelled_to_json(event.logprobs)
        fields = [1, event.index, event.text, event.num_tokens, event.finish_reason, logprobs]
        return [*fields, event.audio] if event.audio else fields
    if isinstance(event, Ended):
        timings = dataclasses.astuple(event.timings)
        counts = [event.num_prompt_tokens, event.num_cached_tokens, event.num_output_tokens]
        return [2, *counts, timings, event.prompt, _spelled_to_json(event.prompt_logprobs), event.bandwidth_share]
    return [_TYPES.index(type(event)), *dataclasses.astuple(event)]


def event_from_json(fields: Sequence[Any]) -> Event:
    kind, *values = fields
    if _TYPES[kind] is AnswerDelta:
        index, text, num_tokens, finish_reason, logprobs, *audio = values
        return AnswerDelta(index, text, num_tokens, finish_reason, _spelled_from_json(logprobs), *audio)
    if _TYPES[kind] is Ended:
        num_prompt_tokens, num_cached_tokens, num_output_tokens, timings, prompt, logprobs, bandwidth_share = values
        counts = (num_prompt_tokens, num_cached_tokens, num_output_tokens)
        return Ended(*counts, Timings(*timings), prompt, _spelled_from_json(logprobs), bandwidth_share)
    return _TYPES[kind](*values)


def _spelled_to_json(logprobs: Sequence[SpelledLogprob] | None) -> list[Any] | None:
    # Latin-1 has a character for every byte.
    if logprobs is None:
        return None
    return [
        [item.token.decode("latin-1"), item.logprob, [[token.decode("latin-1"), value] for token, value in item.top]]
        for item in logprobs
    ]


def _spelled_from_json(items: Sequence[Any] | None) -> tuple[SpelledLogprob, ...] | None:
    if items is None:
        return None
    return tuple(
        SpelledLogprob(
            token.encode("latin-1"), logprob, tuple((other.encode("latin-1"), value) for other, value in top)
        )
        for token, logprob, top in items
    )
