"""Earlier responses, for requests with previous_response_id."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from tilewright.types import RequestError

MAX_HISTORY_BYTES = 64 << 20


class History:
    """The items of recent responses, in memory; the least recently used are evicted when they exceed the limit."""

    def __init__(self, max_size_bytes: int = MAX_HISTORY_BYTES) -> None:
        self._max_size_bytes = max_size_bytes
        self._size_bytes = 0
        self._entries: OrderedDict[str, tuple[list[object], int]] = OrderedDict()

    def resolve(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The request with the items of the previous response in front of its input."""
        previous_id = request.get("previous_response_id")
        if previous_id is None:
            return dict(request)
        entry = self._entries.get(previous_id) if isinstance(previous_id, str) else None
        if entry is None:
            raise RequestError(f"previous_response_id is {previous_id!r:.100}, expected the id of a stored response")
        self._entries.move_to_end(previous_id)
        return {**request, "input": [*entry[0], *_items(request.get("input"))]}

    def keep(self, request: Mapping[str, Any], response: Mapping[str, Any]) -> None:
        """Keeps the input and output of a response, unless the request says "store": false."""
        if request.get("store") is False or response["status"] not in ("completed", "incomplete"):
            return
        items = [*_items(request.get("input")), *response["output"]]
        size_bytes = len(json.dumps(items))
        if size_bytes > self._max_size_bytes:
            return
        self._entries[response["id"]] = items, size_bytes
        self._size_bytes += size_bytes
        while self._size_bytes > self._max_size_bytes:
            _, (_, freed_bytes) = self._entries.popitem(last=False)
            self._size_bytes -= freed_bytes


def _items(given: object) -> Sequence[object]:
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    if isinstance(given, list | tuple):
        return given
    raise RequestError(f"input is {given!r:.100}, expected text or a list of items")
