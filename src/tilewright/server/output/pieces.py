"""The pieces of an answer: content, reasoning and tool calls."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from itertools import groupby

from tilewright.server.output.cursor import SPACE, Cursor, HeldEnd


@dataclass(frozen=True)
class ToolCallDelta:
    """A piece of one tool call."""

    index: int
    arguments: str  # a piece of the JSON text of the arguments
    id: str | None = None  # only in the first delta of a call, like the name
    name: str | None = None


@dataclass(frozen=True)
class Piece:
    """A piece of an answer. Exactly one field is set."""

    content: str = ""
    reasoning: str = ""
    tool_call: ToolCallDelta | None = None


class PieceBuffer:
    """Collects the pieces of an answer until `flush`.

    If calls are possible, white space at the end of content is held back: it is dropped if a call follows.
    """

    def __init__(self, *, expects_calls: bool) -> None:
        self.num_calls = 0
        self._pieces: list[Piece] = []
        self._content = HeldEnd(SPACE if expects_calls else "")

    def content(self, text: str) -> None:
        """Append content."""
        if text := self._content.push(text):
            self._pieces.append(Piece(content=text))

    def content_unless_cut(self, text: Cursor) -> None:
        """Append the marked text, which was no call, as content; drop it if it is a later call that the end cut off."""
        marked = text.since_mark()
        if self.num_calls == 0:
            self.content(marked)
        elif not text.is_exhausted:
            self.content(marked.lstrip(SPACE))

    def reasoning(self, text: str) -> None:
        """Append reasoning."""
        if text:
            self._pieces.append(Piece(reasoning=text))

    def begin_call(self, name: str) -> None:
        """Begin a call, to which the next arguments belong."""
        self._content.release()
        call_id = f"call_{secrets.token_hex(12)}"
        self._pieces.append(Piece(tool_call=ToolCallDelta(self.num_calls, "", id=call_id, name=name)))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Append to the arguments of the last call."""
        if text:
            self._pieces.append(Piece(tool_call=ToolCallDelta(self.num_calls - 1, text)))

    def end(self) -> None:
        """End the answer: text that was held back is content."""
        if text := self._content.release():
            self._pieces.append(Piece(content=text))

    def flush(self) -> list[Piece]:
        """Return the pieces so far and remove them; neighbours of the same kind are joined."""
        pieces, self._pieces = self._pieces, []
        return _joined(pieces)


def _joined(pieces: list[Piece]) -> list[Piece]:
    joined = []
    for _, group in groupby(pieces, key=_kind):
        first, *others = group
        if first.tool_call is not None:
            texts = [piece.tool_call.arguments for piece in (first, *others) if piece.tool_call is not None]
            joined.append(Piece(tool_call=replace(first.tool_call, arguments="".join(texts))))
        else:
            text = "".join(piece.content or piece.reasoning for piece in (first, *others))
            joined.append(Piece(content=text) if first.content else Piece(reasoning=text))
    return joined


def _kind(piece: Piece) -> tuple[str, int]:
    if piece.tool_call is not None:
        # A call's name is sent alone, as OpenAI does.
        return "arguments" if piece.tool_call.name is None else "name", piece.tool_call.index
    return "content" if piece.content else "reasoning", 0
