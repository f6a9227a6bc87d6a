"""The endpoints that generate: the body of each, its EngineRequests, and the writer of its answer.

`app` serves them over HTTP, `tilewright batch` from a file.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from tilewright.inputs.media import MediaLimits
from tilewright.outputs.sound import Tempo
from tilewright.server.api.bodies import ChatBody, CompletionBody, GenerationBody, ResponsesBody
from tilewright.server.api.chat import ChatWriter, plain_messages
from tilewright.server.api.completions import CompletionWriter
from tilewright.server.api.requests import chat_request, completion_requests
from tilewright.server.api.responses.request import ResponseHistory, chat_body
from tilewright.server.api.responses.writer import ResponsesWriter
from tilewright.server.api.speech import SpeechBody, SpeechWriter, speech_request
from tilewright.server.api.transcriptions import TranscriptionBody, TranslationBody, transcription_request
from tilewright.server.http.admission import ReserveMemory
from tilewright.server.link.backend import AUDIO_RATE, EngineRequest, ModelInfo
from tilewright.types import RequestError

if TYPE_CHECKING:
    from tilewright.server.api.served import Kind
    from tilewright.server.http.respond import Writer


class Gate(Protocol):
    """Turns the media of messages into bytes: `media.gate.MediaGate`, or a gate in front of it."""

    async def resolve(self, messages: list[dict[str, Any]], hold: ReserveMemory) -> list[dict[str, Any]]: ...


@dataclass(frozen=True)
class Context:
    """The model, media gate, history and limits that prepare a request."""

    model: ModelInfo
    gate: Gate
    history: ResponseHistory
    limits: MediaLimits = field(default_factory=MediaLimits)
    hold: ReserveMemory = lambda num_bytes: None  # reserves memory for media, or raises; negative: releases some


class PreparedRequest(NamedTuple):
    """A request's EngineRequests, and a function that makes the writer of its answer."""

    requests: list[EngineRequest]
    make_writer: Callable[[], Writer]


async def prepare_chat(body: ChatBody, context: Context, field: str = "messages") -> PreparedRequest:
    """Prepare a chat request. `field` is the request's name for its messages, for errors."""
    try:
        messages = plain_messages(body)
        body.messages = []  # the writer keeps the body: its data: URLs are not needed once decoded
        if (limits := context.model.text_limits) is not None:  # before anything is fetched, or sent to the engine
            limits.check_chat(messages, body.plain_tools, body.chat_template_kwargs)
        messages = await context.gate.resolve(messages, context.hold)
    except RequestError as error:
        error.param = error.param or field
        raise
    request = chat_request(body, messages, context.model)
    request = replace(request, names={**request.names, "prompt": field})
    return PreparedRequest([request], partial(ChatWriter, body, context.model))


async def prepare_completion(body: CompletionBody, context: Context) -> PreparedRequest:
    requests = completion_requests(body)
    if (limits := context.model.text_limits) is not None:
        for request in requests:
            limits.check_prompt(request.text, request.token_ids)
    return PreparedRequest(requests, partial(CompletionWriter, body, context.model))


async def prepare_response(body: ResponsesBody, context: Context) -> PreparedRequest:
    request = context.history.resolve(body.model_dump(exclude_unset=True, by_alias=True))
    chat = ChatBody.model_validate(chat_body(request))
    # The writer keeps the request for the history, with its data: URLs: their memory stays reserved.
    counting = replace(context, hold=lambda num_bytes: context.hold(max(num_bytes, 0)))
    requests, _ = await prepare_chat(chat, counting, field="input")
    return PreparedRequest(requests, partial(ResponsesWriter, request, chat, context.model, context.history))


async def prepare_transcription(body: TranscriptionBody, context: Context) -> PreparedRequest:
    context.hold(len(body.data))  # in addition to the form that contains it
    request, make_writer = transcription_request(body, context.model, context.limits)
    return PreparedRequest([request], make_writer)


async def prepare_speech(body: SpeechBody, context: Context) -> PreparedRequest:
    request = speech_request(body, context.model)
    if (limits := context.model.text_limits) is not None:
        limits.check_chat(request.messages or (), None, None)
    if body.stream and body.speed != 1:  # loads a library, which must not block the event loop
        await asyncio.to_thread(Tempo, AUDIO_RATE, body.speed)
    return PreparedRequest([request], partial(SpeechWriter, body))


@dataclass(frozen=True)
class Endpoint:
    body: type[GenerationBody]
    prepare: Callable[[Any, Context], Awaitable[PreparedRequest]]
    kind: Kind = "chat"  # what it asks of a model


ENDPOINTS = {
    "/v1/chat/completions": Endpoint(ChatBody, prepare_chat),
    "/v1/completions": Endpoint(CompletionBody, prepare_completion),
    "/v1/responses": Endpoint(ResponsesBody, prepare_response),
}
# Endpoints that read or return a file, which batch requests cannot contain.
FILE_ENDPOINTS = {
    "/v1/audio/speech": Endpoint(SpeechBody, prepare_speech, "speak"),
    "/v1/audio/transcriptions": Endpoint(TranscriptionBody, prepare_transcription, "hear"),
    "/v1/audio/translations": Endpoint(TranslationBody, prepare_transcription, "hear"),
}
