"""OpenAI's /v1/audio/transcriptions and translations: the form, the question, and the objects and events sent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import Request
from pydantic import BeforeValidator, Field, ValidationError

from tilewright.inputs.media import MediaLimits, check_bytes
from tilewright.server.api.bodies import ChatBody, GenerationBody, MessageBody
from tilewright.server.api.chat import make_output_parser, usage
from tilewright.server.api.fields import NO_TIMES, TRANSCRIPTION
from tilewright.server.api.requests import chat_request
from tilewright.server.http.bodies import is_multipart, parse_multipart
from tilewright.server.http.errors import ApiError, validation_error
from tilewright.server.link.backend import AnswerDelta, Ended, EngineRequest, ModelInfo, Started
from tilewright.server.output import OutputParser
from tilewright.types import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable

FILE = "file"
MAX_PROMPT_CHARACTERS = 10_000
_TIMED_FORMATS = ("verbose_json", "srt", "vtt", "diarized_json")
# Whisper's codes of common languages; other codes and names are passed on as they are.
_LANGUAGES = {
    "ar": "Arabic", "de": "German", "en": "English", "es": "Spanish", "fr": "French", "id": "Indonesian",
    "it": "Italian", "ja": "Japanese", "ko": "Korean", "ms": "Malay", "nl": "Dutch", "pt": "Portuguese",
    "ru": "Russian", "th": "Thai", "tr": "Turkish", "ur": "Urdu", "vi": "Vietnamese", "yue": "Cantonese",
    "zh": "Chinese",
}  # fmt: skip


def _is_true(value: object) -> object:
    """Convert "true" and "false" to booleans: forms contain text only."""
    return {"true": True, "false": False}.get(value.lower(), value) if isinstance(value, str) else value


class TranscriptionBody(GenerationBody):
    others = TRANSCRIPTION

    stream: Annotated[bool, BeforeValidator(_is_true)] = False
    language: str | None = Field(default=None, max_length=40, description="of the speech, such as en")
    prompt: str | None = Field(default=None, max_length=MAX_PROMPT_CHARACTERS, description="earlier text, or names")
    response_format: Literal["json", "text"] = "json"
    temperature: float | None = Field(default=None, ge=0, le=2)
    seed: int | None = None
    max_completion_tokens: int | None = Field(default=None, ge=1)
    data: bytes = Field(default=b"", exclude=True)  # the file

    @property
    def num_answers(self) -> int:
        return 1

    @property
    def instruction(self) -> str:
        """The instruction that follows the sound in the prompt."""
        return self._with_context(f"Transcribe the {self._spoken('audio')} into text.")

    def _spoken(self, what: str) -> str:
        """Return the word, after the sound's language if that is set."""
        language = self.language and _LANGUAGES.get(self.language.lower(), self.language)
        return f"{language} {what}" if language else what

    def _with_context(self, task: str) -> str:
        return f"{task} Context: {self.prompt}" if self.prompt else task


class TranslationBody(TranscriptionBody):
    @property
    def instruction(self) -> str:
        return self._with_context(f"Translate the {self._spoken('speech')} in the audio into English text.")


async def read_form(kind: type[TranscriptionBody], request: Request) -> TranscriptionBody:
    """Read the form with its file; raise a 400 for a form without one, or with a field that would be ignored."""
    data = b"".join([piece async for piece in request.stream()])
    content_type = request.headers.get("content-type", "")
    if not is_multipart(content_type):
        message = f"the content type is {content_type[:100]!r}, expected multipart/form-data with a {FILE}"
        raise ApiError(400, message)
    fields: dict[str, Any] = {}
    files: list[bytes] = []
    for part in parse_multipart(data, content_type):
        name = part.name.removesuffix("[]")
        if name == FILE:
            files.append(part.data)
        else:
            fields[name] = part.text
    if len(files) != 1:
        raise ApiError(400, f"the form has {len(files)} parts named {FILE}, expected one", param=FILE)
    _check(fields)
    try:
        return kind.model_validate({**fields, "data": files[0]}, strict=False)  # forms contain text only
    except ValidationError as error:
        raise validation_error(error.errors()) from None


def _check(fields: dict[str, Any]) -> None:
    if fields.get("response_format") in _TIMED_FORMATS:
        message = f"response_format is {fields['response_format']!r}, expected json or text: {NO_TIMES}"
        raise ApiError(400, message, param="response_format", code="unsupported_parameter")


def transcription_request(
    body: TranscriptionBody, model: ModelInfo, limits: MediaLimits
) -> tuple[EngineRequest, Callable[[], TranscriptionWriter]]:
    """Return the EngineRequest, and a function that makes the writer of its answer."""
    try:
        sound = check_bytes(body.data, FILE, limits)
    except RequestError as error:
        raise RequestError(str(error), param=FILE, code=error.code) from error
    parts = [{"type": "audio", "audio": sound}, {"type": "text", "text": body.instruction}]
    chat = ChatBody(
        messages=[MessageBody(role="user")],
        # OpenAI's default for transcriptions, unlike chats: greedy decoding.
        temperature=body.temperature or 0.0,
        seed=body.seed,
        max_completion_tokens=body.max_completion_tokens,
        enable_thinking=False,
    )
    request = chat_request(chat, [{"role": "user", "content": parts}], model)
    body.data = b""  # the request has it
    return replace(request, names={**request.names, "prompt": FILE}), partial(TranscriptionWriter, body, chat, model)


class TranscriptionWriter:
    """Writes a transcription as text, as an object, or as events with pieces of it; reasoning is left out."""

    names_events = False
    has_sound = False

    def __init__(self, body: TranscriptionBody, chat: ChatBody, model: ModelInfo) -> None:
        self._body, self._chat, self._model = body, chat, model
        self._parser: OutputParser | None = None
        self._texts: list[str] = []
        self._ended: Ended | None = None

    def add(self, prompt_index: int, event: Started | AnswerDelta | Ended) -> Iterator[dict[str, Any]]:
        if isinstance(event, Started):
            self._parser = make_output_parser(self._chat, self._model, event.opens_reasoning)
        elif isinstance(event, Ended):
            self._ended = event
        else:
            assert self._parser is not None, "a delta came before Started"
            pieces = list(self._parser.push(event.text)) if event.text else []
            if event.finish_reason is not None:
                pieces += self._parser.finish()
            text = "".join(piece.content for piece in pieces)
            if not self._texts:
                text = text.lstrip()
            if text:
                self._texts.append(text)
                yield {"type": "transcript.text.delta", "delta": text}

    def closing_chunks(self) -> Iterator[dict[str, Any]]:
        yield {"type": "transcript.text.done", "text": self._text, "usage": self._usage()}

    def failure_chunks(self, error: ApiError) -> Iterator[dict[str, Any]]:
        yield error.body()

    def result(self) -> dict[str, Any] | str:
        return self._text if self._body.response_format == "text" else {"text": self._text, "usage": self._usage()}

    @property
    def _text(self) -> str:
        return "".join(self._texts)

    def _usage(self) -> dict[str, Any]:
        assert self._ended is not None
        counted = usage([self._ended])
        return {
            "type": "tokens",
            "input_tokens": counted["prompt_tokens"],
            "output_tokens": counted["completion_tokens"],
            "total_tokens": counted["total_tokens"],
        }
