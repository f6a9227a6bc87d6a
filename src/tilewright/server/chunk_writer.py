"""What the writers of chat and of plain completions have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from tilewright.server.bodies import SamplingBody
from tilewright.server.errors import ApiError


class ChunkWriter(ABC):
    """A `respond.Writer` whose stream is of chunks, with the tokens that were used at the end if the body asks."""

    names_events = False

    def __init__(self, body: SamplingBody) -> None:
        self._wants_usage = body.stream_options is not None and body.stream_options.include_usage
        # Where it is wanted, the other chunks say that they do not have it.
        self.no_usage: dict[str, None] = {"usage": None} if self._wants_usage else {}

    @abstractmethod
    def usage_chunk(self) -> dict[str, Any]:
        """A chunk without choices that tells the tokens used."""

    def closing_chunks(self) -> Iterator[dict[str, Any]]:
        """What comes after the last chunk of the answers."""
        if self._wants_usage:
            yield self.usage_chunk()

    def failure_chunks(self, error: ApiError) -> Iterator[dict[str, Any]]:
        """What tells, in a stream, that no more will come."""
        yield error.body()
