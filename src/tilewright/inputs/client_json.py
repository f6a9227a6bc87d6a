"""Parses clients' JSON within limits, and JSON that ends where an answer was cut off."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import jiter

from tilewright.types import RequestError

# jiter's limits. The depth limit of Python's parser varies, and Python prints no integer of more digits.
MAX_DEPTH = 201
MAX_DIGITS = 4300


def parse_json(text: bytes | str, name: str) -> Any:
    """Return the value; raise RequestError, with the text's `name`, if it is malformed, beyond a limit or ambiguous.

    An object with a duplicate key is ambiguous: parsers disagree on its value.
    """
    try:
        data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        return jiter.from_json(data, catch_duplicate_keys=True)
    except ValueError:  # Python's parser gives the reason, or accepts what jiter refuses: half a surrogate pair, UTF-16
        pass
    try:
        value = _loads(text, _unique_keys)
        _check_depth(value)
        return value
    except RequestError as error:
        raise RequestError(f"{name} {error}") from None
    except RecursionError:
        raise RequestError(f"{name} {_too_deep()}") from None
    except json.JSONDecodeError as error:
        raise RequestError(f"{name} is not JSON: {error.msg} at character {error.pos}") from None
    except ValueError as error:
        raise RequestError(f"{name} is not JSON: {error}") from None


def whole_part(text: str) -> Any:
    """Return the value of JSON that may be cut off; raise ValueError if the text is not a prefix of JSON.

    A string ends where it was cut; an incomplete last key, number or word is left out. Raise RequestError beyond a
    limit. The text is a model's, so a duplicate key is accepted and its last value counts.
    """
    closing: list[str] = []
    kept, closing_of_kept = 0, ""  # the text up to the last position that closing brackets complete
    in_string = is_escaped = False
    for index, character in enumerate(text):
        if in_string:
            in_string = is_escaped or character != '"'
            is_escaped = character == "\\" and not is_escaped
        elif character == '"':
            in_string = True
        elif character in "{[":
            closing.append("}" if character == "{" else "]")
            if len(closing) > MAX_DEPTH:
                raise _too_deep()
            kept, closing_of_kept = index + 1, "".join(reversed(closing))
        elif character in "}]" and closing:
            closing.pop()
        elif character == ",":
            kept, closing_of_kept = index, "".join(reversed(closing))
    if not closing:
        return _loads(text)
    end = text[: len(text) - is_escaped] + ('"' if in_string else "") + "".join(reversed(closing))
    try:
        return _loads(end)
    except ValueError:
        return _loads(text[:kept] + closing_of_kept)


def _loads(text: bytes | str, make_object: Callable[[list[tuple[str, Any]]], Any] = dict) -> Any:
    return json.loads(text, object_pairs_hook=make_object, parse_int=_integer)


def _integer(text: str) -> int:
    num_digits = len(text.lstrip("-"))
    if num_digits > MAX_DIGITS:
        raise RequestError(f"has an integer of {num_digits} digits, the limit is {MAX_DIGITS}")
    return int(text)


def _unique_keys(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise RequestError(f"has the key {key[:100]!r} twice in an object, expected each key once")
        found[key] = value
    return found


def _check_depth(value: object) -> None:
    level, depth = [value], 0
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise _too_deep()
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)]


def _too_deep() -> RequestError:
    return RequestError(f"has lists and objects in more than {MAX_DEPTH} levels, the limit")
