"""What the writers of chat and of plain completions have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from tilewright.server.bodies import SamplingBody
from tilewright.server.errors import ApiError


class ChunkWriter(ABC):
    """A `respond.Writer` that streams chunks, with the usage at the end if stream_options.include_usage is set."""

    names_events = False
    has_sound = False

    def __init__(self, body: SamplingBody) -> None:
        self._wants_usage = body.stream_options is not None and body.stream_options.include_usage
        # With include_usage, all other chunks have "usage": null, as OpenAI's do.
        self.no_usage: dict[str, None] = {"usage": None} if self._wants_usage else {}

    @abstractmethod
    def usage_chunk(self) -> dict[str, Any]:
        """A chunk without choices that has the numbers of tokens."""

    def closing_chunks(self) -> Iterator[dict[str, Any]]:
        """The chunks after the last one of the answers."""
        if self._wants_usage:
            yield self.usage_chunk()

    def failure_chunks(self, error: ApiError) -> Iterator[dict[str, Any]]:
        """The chunks that end a stream with an error."""
        yield error.body()
