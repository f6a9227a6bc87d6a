"""The reasoning in front of an answer."""

from __future__ import annotations

from tilewright.server.output.cursor import Cursor, Ends, HeldEnd, Steps
from tilewright.server.output.pieces import Output
from tilewright.types import REASONING_TAGS

_OPENING, _CLOSING = REASONING_TAGS
_ENDS = Ends(_CLOSING)


def has_reasoning(template_source: str) -> bool:
    """Whether answers of a model with this chat template may begin with reasoning."""
    return _CLOSING in template_source


def read_reasoning(text: Cursor, output: Output, *, is_open: bool, splits: bool) -> Steps[None]:
    """Reads the reasoning, up to where the answer itself begins.

    It begins at once if the prompt has opened it (`is_open`; an opening tag of the model's is then dropped), else with
    a tag after nothing but white space. Line breaks beside the tags are dropped. Without `splits`, all of it is
    content, tags included.
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
