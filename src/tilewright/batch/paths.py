"""Media that the requests of a batch name by path."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tilewright.server.endpoints import Gate, Hold

_KINDS = ("image", "video", "audio")
_MAX_PATH = 4096  # characters; longer text is base64 without its "data:"


class PathGate:
    """Turns paths into file:// URLs for the gate behind it; relative paths are relative to `folder`."""

    def __init__(self, gate: Gate, folder: Path) -> None:
        self._gate = gate
        self._folder = folder

    async def resolve(self, messages: list[dict[str, Any]], hold: Hold) -> list[dict[str, Any]]:
        return await self._gate.resolve([self._in_message(message) for message in messages], hold)

    def _in_message(self, message: dict[str, Any]) -> dict[str, Any]:
        content = message.get("content")
        if not isinstance(content, list):
            return message
        return {**message, "content": [self._in_part(part) for part in content]}

    def _in_part(self, part: Any) -> Any:
        if not isinstance(part, Mapping):
            return part
        for kind in _KINDS:
            for name in (kind, f"{kind}_url"):
                value = part.get(name)
                path = value.get("url") if isinstance(value, Mapping) else value
                if part.get("type") in (None, name) and isinstance(path, str) and _is_path(path):
                    rest = {key: item for key, item in part.items() if key not in ("type", name)}
                    return {**rest, "type": f"{kind}_url", f"{kind}_url": {"url": (self._folder / path).as_uri()}}
        return part


def _is_path(text: str) -> bool:
    return 0 < len(text) <= _MAX_PATH and not re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", text)
