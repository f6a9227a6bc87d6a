"""Plain completions: from the engine's events to OpenAI's objects and chunks."""

from __future__ import annotations

import codecs
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tilewright.server.api.bodies import CompletionBody
from tilewright.server.api.chat import finite, usage
from tilewright.server.http.respond import ChunkWriter
from tilewright.server.link.backend import AnswerDelta, DecodedLogprob, Ended, ModelInfo, Started


@dataclass
class _Choice:
    """The part of one answer to one prompt that is generated so far."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[DecodedLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    offsets: Offsets = field(default_factory=lambda: Offsets())


class CompletionWriter(ChunkWriter):
    """Writes the answers to one completion request: n per prompt, numbered consecutively over all prompts.

    With echo, a stream sends each answer when all answers to its prompt are complete: the prompt's text and
    log-probabilities arrive with their end.
    """

    def __init__(self, body: CompletionBody, model: ModelInfo) -> None:
        super().__init__(body)
        self._body = body
        self._model = model
        self._n = body.n or 1
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._choices: dict[int, _Choice] = {}
        self._ended: dict[int, Ended] = {}

    def add(self, prompt_index: int, event: Started | AnswerDelta | Ended) -> Iterator[dict[str, Any]]:
        """Record an event and yield its stream chunks, which are ignored without `stream`."""
        if isinstance(event, Ended):
            self._ended[prompt_index] = event
            if self._body.echo:
                for index in self._indices_of(prompt_index):
                    yield self._chunk([self._whole(index)], **self.no_usage)
        elif isinstance(event, AnswerDelta):
            index = prompt_index * self._n + event.index
            choice = self._choices.setdefault(index, _Choice())
            choice.texts.append(event.text)
            choice.logprobs.extend(event.logprobs or ())
            choice.finish_reason = event.finish_reason
            if not self._body.echo:
                logprobs = None if event.logprobs is None else _logprobs(event.logprobs, choice.offsets)
                yield self._chunk([_choice(index, event.text, logprobs, event.finish_reason)], **self.no_usage)

    def usage_chunk(self) -> dict[str, Any]:
        return self._chunk([], usage=self._usage())

    def result(self) -> dict[str, Any]:
        """Return the complete answer."""
        choices = [self._whole(index) for index in sorted(self._choices)]
        return {**self._chunk(choices), "usage": self._usage()}

    def _whole(self, index: int) -> dict[str, Any]:
        choice, ended = self._choices[index], self._ended[index // self._n]
        text, logprobs = "".join(choice.texts), choice.logprobs
        if self._body.max_tokens == 0:
            text, logprobs = "", []
        if self._body.echo:
            text = (ended.prompt or "") + text
            logprobs = [*(ended.prompt_logprobs or ()), *logprobs]
        logprobs_object = None if self._body.logprobs is None else _logprobs(logprobs, Offsets())
        reason = "length" if self._body.max_tokens == 0 else choice.finish_reason
        return _choice(index, text, logprobs_object, reason)

    def _indices_of(self, prompt_index: int) -> range:
        return range(prompt_index * self._n, (prompt_index + 1) * self._n)

    def _chunk(self, choices: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
        head = {"id": self._id, "object": "text_completion", "created": self._created, "model": self._model.name}
        return {**head, "choices": choices, **more}

    def _usage(self) -> dict[str, Any]:
        counted = usage(list(self._ended.values()))
        if self._body.max_tokens == 0:
            counted |= {"completion_tokens": 0, "total_tokens": counted["prompt_tokens"]}
        return counted


def _choice(index: int, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


class Offsets:
    """Counts the text offset of each token; a token within a character has the offset of that character."""

    def __init__(self) -> None:
        self._num_characters = 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def next(self, token: bytes) -> int:
        begin = self._num_characters
        self._num_characters += len(self._utf8.decode(token))
        return begin


def _logprobs(items: Sequence[DecodedLogprob], offsets: Offsets) -> dict[str, Any]:
    """Return log-probabilities in the parallel lists of plain completions."""
    return {
        "tokens": [item.token.decode("utf-8", "replace") for item in items],
        "token_logprobs": [finite(item.logprob) for item in items],
        "top_logprobs": [
            None
            if item.logprob is None
            else {token.decode("utf-8", "replace"): finite(logprob) for token, logprob in item.top}
            for item in items
        ],
        "text_offset": [offsets.next(item.token) for item in items],
    }
