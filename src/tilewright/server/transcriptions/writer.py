"""Transcriptions: from the engine's events to OpenAI's objects and events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tilewright.server.bodies import ChatBody
from tilewright.server.chat_completions import output_parser, usage
from tilewright.server.errors import ApiError
from tilewright.server.link.backend import AnswerDelta, Ended, ModelInfo, Started
from tilewright.server.output import OutputParser
from tilewright.server.transcriptions.body import TranscriptionBody


class TranscriptionWriter:
    """Writes what was heard: a text, an object, or events with pieces of it. Reasoning is no part of it."""

    names_events = False
    has_sound = False

    def __init__(self, body: TranscriptionBody, chat: ChatBody, model: ModelInfo) -> None:
        self._body, self._chat, self._model = body, chat, model
        self._parser: OutputParser | None = None
        self._texts: list[str] = []
        self._ended: Ended | None = None

    def add(self, prompt_index: int, event: Started | AnswerDelta | Ended) -> Iterator[dict[str, Any]]:
        if isinstance(event, Started):
            self._parser = output_parser(self._chat, self._model, event.opens_reasoning)
        elif isinstance(event, Ended):
            self._ended = event
        else:
            assert self._parser is not None, "an answer starts before it goes on"
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
