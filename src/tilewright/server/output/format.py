"""The interface of tool-call formats: how calls are parsed, and the grammar that forces them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from tilewright.server.output.cursor import Cursor, Steps
from tilewright.server.output.grammar import Tool
from tilewright.server.output.pieces import Output


class ToolFormat(ABC):
    """How a model writes tool calls."""

    @abstractmethod
    def read(self, text: Cursor, output: Output, tools: Mapping[str, Mapping[str, Any]]) -> Steps[None]:
        """Reads an answer from the end of its reasoning on. `tools`: schemas of parameters by name."""

    @abstractmethod
    def grammar(self, tools: Sequence[Tool], *, parallel: bool) -> list[str]:
        """The rules of an answer that is a call of one of the tools, or several calls, and nothing else."""
