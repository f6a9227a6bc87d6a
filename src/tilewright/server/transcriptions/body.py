"""The form of a transcription or a translation, and what it asks of the model."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import Request
from pydantic import BeforeValidator, Field, ValidationError

from tilewright.server.bodies import GenerationBody
from tilewright.server.errors import ApiError, validation_error
from tilewright.server.fields import NO_TIMES, TRANSCRIPTION
from tilewright.server.multipart import is_multipart, parse_multipart

FILE = "file"
MAX_PROMPT_CHARACTERS = 10_000
_TIMED_FORMATS = ("verbose_json", "srt", "vtt", "diarized_json")
# Whisper's codes of the languages that models hear most; others are passed on as they are given.
_LANGUAGES = {
    "ar": "Arabic", "de": "German", "en": "English", "es": "Spanish", "fr": "French", "id": "Indonesian",
    "it": "Italian", "ja": "Japanese", "ko": "Korean", "ms": "Malay", "nl": "Dutch", "pt": "Portuguese",
    "ru": "Russian", "th": "Thai", "tr": "Turkish", "ur": "Urdu", "vi": "Vietnamese", "yue": "Cantonese",
    "zh": "Chinese",
}  # fmt: skip


def _is_true(value: object) -> object:
    """A form has text alone."""
    return {"true": True, "false": False}.get(value.lower(), value) if isinstance(value, str) else value


class TranscriptionBody(GenerationBody):
    others = TRANSCRIPTION

    stream: Annotated[bool, BeforeValidator(_is_true)] = False
    language: str | None = Field(default=None, max_length=40, description="of the sound, such as en")
    prompt: str | None = Field(default=None, max_length=MAX_PROMPT_CHARACTERS, description="what came before, or names")
    response_format: Literal["json", "text"] = "json"
    temperature: float | None = Field(default=None, ge=0, le=2)
    seed: int | None = None
    max_completion_tokens: int | None = Field(default=None, ge=1)
    data: bytes = Field(default=b"", exclude=True)  # of the file

    @property
    def num_answers(self) -> int:
        return 1

    @property
    def instruction(self) -> str:
        """What the model is asked, after the sound."""
        return self._with_context(f"Transcribe the {self._spoken('audio')} into text.")

    def _spoken(self, what: str) -> str:
        """The word with the sound's language in front, if it is said."""
        language = self.language and _LANGUAGES.get(self.language.lower(), self.language)
        return f"{language} {what}" if language else what

    def _with_context(self, task: str) -> str:
        return f"{task} Context: {self.prompt}" if self.prompt else task


class TranslationBody(TranscriptionBody):
    @property
    def instruction(self) -> str:
        return self._with_context(f"Translate the {self._spoken('speech')} in the audio into English text.")


async def read_form(kind: type[TranscriptionBody], request: Request) -> TranscriptionBody:
    """The body with its file; 400 for a form without one, or with a field that would be ignored."""
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
        return kind.model_validate({**fields, "data": files[0]}, strict=False)  # a form has text alone
    except ValidationError as error:
        raise validation_error(error.errors()) from None


def _check(fields: dict[str, Any]) -> None:
    if fields.get("response_format") in _TIMED_FORMATS:
        message = f"response_format is {fields['response_format']!r}, expected json or text: {NO_TIMES}"
        raise ApiError(400, message, param="response_format", code="unsupported_parameter")
