"""Responses: from the engine's events to OpenAI's objects and events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tilewright.server.bodies import ChatBody
from tilewright.server.chat_completions import output_parser, usage
from tilewright.server.errors import ApiError
from tilewright.server.link.backend import AnswerDelta, Ended, ModelInfo, Started
from tilewright.server.output import OutputParser
from tilewright.server.responses.builder import ResponseBuilder
from tilewright.server.responses.history import History


class ResponsesWriter:
    """Writes the answer to one Responses request, whose conversation is `chat`."""

    names_events = True
    has_sound = False

    def __init__(self, request: Mapping[str, Any], chat: ChatBody, model: ModelInfo, history: History) -> None:
        self._request = request
        self._chat = chat
        self._model = model
        self._history = history
        self._builder = ResponseBuilder(request, model=model.name)
        self._parser: OutputParser | None = None
        self._is_cut = False  # by max_output_tokens

    def add(self, prompt_index: int, event: Started | AnswerDelta | Ended) -> Iterator[dict[str, Any]]:
        """The events that an event of the engine makes."""
        if isinstance(event, Started):
            self._parser = output_parser(self._chat, self._model, event.opens_reasoning)
            yield from self._builder.begin()
        elif isinstance(event, AnswerDelta):
            assert self._parser is not None, "a delta came before Started"
            yield from self._builder.add(self._parser.push(event.text))
            if event.finish_reason is not None:
                yield from self._builder.add(self._parser.finish())
                self._is_cut = event.finish_reason == "length"
        else:
            yield from self._builder.finish("length" if self._is_cut else "stop", usage([event]))
            self._history.keep(self._request, self._builder.response())

    def closing_chunks(self) -> Iterator[dict[str, Any]]:
        """None: the last event is sent with the answer's end."""
        return iter(())

    def failure_chunks(self, error: ApiError) -> Iterator[dict[str, Any]]:
        """The events of an answer that failed."""
        if self._parser is None:
            yield from self._builder.begin()
        yield from self._builder.fail(error.message)

    def result(self) -> dict[str, Any]:
        """The whole answer."""
        return self._builder.response()
