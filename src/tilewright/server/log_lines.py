"""Lines of the log: JSON, or name=value on a terminal."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any


class LineFormatter(logging.Formatter):
    """One line per record; the `fields` of a record are written as name and value."""

    def __init__(self, is_json: bool) -> None:
        super().__init__()
        self._is_json = is_json

    def format(self, record: logging.LogRecord) -> str:
        fields: Mapping[str, Any] = getattr(record, "fields", None) or {"message": record.getMessage()}
        head = {"time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"), "level": record.levelname.lower()}
        fields = {**head, "logger": record.name, **fields}
        if record.exc_info:
            fields["trace"] = self.formatException(record.exc_info)
        if self._is_json:
            return json.dumps(fields)
        return " ".join(f"{name}={_quoted(value)}" for name, value in fields.items() if name not in ("logger", "level"))


def configure(is_json: bool, level: int) -> None:
    """Sends the log to standard error: our own from `level` on, warnings of other packages."""
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter(is_json))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("tilewright").setLevel(level)


def _quoted(value: object) -> str:
    text = str(value)
    return json.dumps(text) if not text or set(' "=\n\r\t') & set(text) else text
