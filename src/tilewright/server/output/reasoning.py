"""What a model thinks before it answers, apart from the answer."""

from __future__ import annotations

from tilewright.server.output.cursor import Cursor, Ends, HeldEnd, Steps
from tilewright.server.output.pieces import Output
from tilewright.types import REASONING_TAGS

_OPENING, _CLOSING = REASONING_TAGS
_ENDS = Ends(_CLOSING)


def thinks(template_source: str) -> bool:
    """Whether answers of this template's model may have thoughts."""
    return _CLOSING in template_source


def read_thoughts(text: Cursor, output: Output, *, is_open: bool, splits: bool) -> Steps[None]:
    """Reads up to where the answer itself begins.

    Thoughts begin at once if the prompt opened them (`is_open`; a tag that the model writes nevertheless is no part of
    them), else with a tag that nothing but white space comes before. Line breaks beside the tags belong to neither
    side. Without `splits`, all of it is content, tags included.
    """
    space = yield from text.take_space()
    has_tag = yield from text.take_if(_OPENING)
    if not has_tag and not is_open:
        output.content(space)
    elif splits:
        space = (yield from text.take_space()) if has_tag else space
        yield from _split(text, output, space.lstrip("\n"))
    else:
        output.content(space + _OPENING if has_tag else space)
        if (yield from text.read_until(_ENDS, output.content)):
            output.content(text.take(len(_CLOSING)))


def _split(text: Cursor, output: Output, beginning: str) -> Steps[None]:
    held = HeldEnd("\n")
    output.reasoning(held.push(beginning))
    if (yield from text.read_until(_ENDS, lambda piece: output.reasoning(held.push(piece)))):
        text.take(len(_CLOSING))
        yield from text.take_all("\n")
    else:
        output.reasoning(held.release())
