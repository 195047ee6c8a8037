"""Logging: one line per lifecycle event, none per token. Importing this configures nothing."""

from __future__ import annotations

import json
import logging
import sys
from typing import Literal

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def get_logger(name: str) -> logging.Logger:
    """A logger under the `moesaic` root."""
    return logging.getLogger(name if name.startswith("moesaic") else f"moesaic.{name}")


class JsonFormatter(logging.Formatter):
    """One JSON object a line; fields given by `extra=` become keys."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its newline."""
        line: dict[str, object] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        line.update({k: v for k, v in vars(record).items() if k not in _STANDARD})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure(*, style: Literal["text", "json"] = "text", level: str = "INFO") -> None:
    """Send the project's log lines to stderr. Called by the CLI only."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonFormatter()
        if style == "json"
        else logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")
    )
    root = logging.getLogger("moesaic")
    root.handlers[:] = [handler]
    root.setLevel(level)
    root.propagate = False
