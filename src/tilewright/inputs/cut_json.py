"""JSON that was cut off, as an answer at its limit of tokens leaves it."""

from __future__ import annotations

import json
from typing import Any


def whole_part(text: str) -> Any:
    """The value that the text is a prefix of, as far as it goes; ValueError if it is a prefix of none.

    A string that was cut ends where it was cut; of the last key, number or word, what is not whole is left out.
    """
    closing: list[str] = []
    kept, closing_of_kept = 0, ""  # up to the last place behind which nothing need follow
    in_string = is_escaped = False
    for index, character in enumerate(text):
        if in_string:
            in_string = is_escaped or character != '"'
            is_escaped = character == "\\" and not is_escaped
        elif character == '"':
            in_string = True
        elif character in "{[":
            closing.append("}" if character == "{" else "]")
            kept, closing_of_kept = index + 1, "".join(reversed(closing))
        elif character in "}]" and closing:
            closing.pop()
        elif character == ",":
            kept, closing_of_kept = index, "".join(reversed(closing))
    if not closing:
        return json.loads(text)
    end = text[: len(text) - is_escaped] + ('"' if in_string else "") + "".join(reversed(closing))
    try:
        return json.loads(end)
    except ValueError:
        return json.loads(text[:kept] + closing_of_kept)
