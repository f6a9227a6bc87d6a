"""The log of a process, on standard error, in one of three forms."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

_PLAIN = "%(levelname)s %(name)s: %(message)s"


class LineFormatter(logging.Formatter):
    """Formats one line per record, with the record's `fields` as names and values."""

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


@dataclass(frozen=True)
class LogSettings:
    """The form and level of a process's log. Lines of json and text have the time, plain ones a prefix."""

    form: Literal["json", "text", "plain"] = "text"
    level: int = logging.WARNING  # of Tilewright's log; other packages log warnings

    def configure(self) -> None:
        """Send the log of this process to standard error."""
        handler = logging.StreamHandler()
        is_plain = self.form == "plain"
        handler.setFormatter(logging.Formatter(_PLAIN) if is_plain else LineFormatter(self.form == "json"))
        logging.basicConfig(level=logging.WARNING, handlers=[handler])
        logging.getLogger("tilewright").setLevel(self.level)


TEXT, PLAIN = LogSettings("text"), LogSettings("plain")  # warnings only


def _quoted(value: object) -> str:
    text = str(value)
    return json.dumps(text) if not text or set(' "=\n\r\t') & set(text) else text
