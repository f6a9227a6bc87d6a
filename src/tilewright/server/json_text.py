"""JSON that every client can read, whatever the fields of a request that are echoed hold."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse


def to_json(data: Mapping[str, Any]) -> bytes:
    try:
        text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except ValueError:  # NaN, which Python's parser accepts and JSON does not have
        return to_json(json.loads(json.dumps(data), parse_constant=lambda name: None))
    # A lone surrogate cannot be written as UTF-8; escaped it can.
    return text.encode("utf-8", "backslashreplace")


class JsonResponse(JSONResponse):
    """An object as the whole answer."""

    def render(self, content: Any) -> bytes:
        return to_json(content)
