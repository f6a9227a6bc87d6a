"""Messages between the server and the engine's process: frames of JSON, with media beside it as they are."""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from tilewright.server.link.backend import AnswerDelta, Ended, EngineRequest, Event, Failed, SpelledLogprob, Started
from tilewright.types import Constraint, Timings

HEAD = struct.Struct("<QI")  # bytes that follow, how many of them are JSON
_TYPES = (Started, AnswerDelta, Ended, Failed)


def encode(message: Mapping[str, Any]) -> bytes:
    """A frame of a message of JSON's types and bytes."""
    blobs: list[bytes] = []
    places: list[list[str | int]] = []
    value = _lift(message, [], places, blobs)
    text = json.dumps([value, places, [len(blob) for blob in blobs]], separators=(",", ":")).encode()
    return b"".join([HEAD.pack(len(text) + sum(map(len, blobs)), len(text)), text, *blobs])


def decode(body: bytes, text_bytes: int) -> dict[str, Any]:
    """The message of a frame, whose HEAD was read already."""
    message, places, sizes = json.loads(body[:text_bytes])
    end = text_bytes
    for (*path, last), size in zip(places, sizes, strict=True):
        holder = message
        for key in path:
            holder = holder[key]
        holder[last] = body[end : end + size]
        end += size
    return message


def _lift(value: Any, path: list[str | int], places: list[list[str | int]], blobs: list[bytes]) -> Any:
    """The value without its bytes, which go to `blobs`, and their paths to `places`.

    By path and not by a mark in their place: a mark could be forged by the text of a request.
    """
    if isinstance(value, bytes):
        places.append(path)
        blobs.append(value)
        return None
    if isinstance(value, Mapping):
        return {key: _lift(item, [*path, key], places, blobs) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_lift(item, [*path, index], places, blobs) for index, item in enumerate(value)]
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
    """An event as a list: its type's number, then its fields. Most are Chunks without log-probabilities."""
    if isinstance(event, AnswerDelta):
        return [1, event.index, event.text, event.num_tokens, event.finish_reason, _spelled_to_json(event.logprobs)]
    if isinstance(event, Ended):
        timings = dataclasses.astuple(event.timings)
        counts = [event.num_prompt_tokens, event.num_cached_tokens, event.num_output_tokens]
        return [2, *counts, timings, event.prompt, _spelled_to_json(event.prompt_logprobs), event.bandwidth_share]
    return [_TYPES.index(type(event)), *dataclasses.astuple(event)]


def event_from_json(fields: Sequence[Any]) -> Event:
    kind, *values = fields
    if _TYPES[kind] is AnswerDelta:
        index, text, num_tokens, finish_reason, logprobs = values
        return AnswerDelta(index, text, num_tokens, finish_reason, _spelled_from_json(logprobs))
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
