"""Log lines of our processes: for people, or one JSON object each, with the same fields.

A line that is written during an operation carries its id, epoch, phase and rank: log_fields() says
them once for everything that is logged inside, in this task and in those it starts.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

FIELDS = ("operation_id", "epoch", "phase", "rank", "worker_id", "slot")
"""Names of what a line may carry, in the order in which it is shown."""

_Fields = Mapping[str, Any]
_fields: ContextVar[_Fields] = ContextVar("log_fields", default=MappingProxyType({}))


@contextmanager
def log_fields(**fields: Any) -> Iterator[None]:
    """Lines that are logged inside carry `fields`, besides those that were said outside."""
    outer = _fields.set({**_fields.get(), **fields})
    try:
        yield
    finally:
        _fields.reset(outer)


def change_log_fields(**fields: Any) -> None:
    """From here on, in the log_fields() that this task is in, `fields` are these."""
    _fields.set({**_fields.get(), **fields})


def configure(log_format: str) -> None:
    """Log to stderr from INFO up as `log_format` says: "text" or "json". In place of what was
    configured before."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


class TextFormatter(logging.Formatter):
    """A line for people: fields come last, in brackets."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        shown = " ".join(f"{k}={v}" for k, v in fields_of(record).items())
        return f"{line} [{shown}]" if shown else line


class JsonFormatter(logging.Formatter):
    """One object a line: time, level, logger, message, exception, and the fields."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **fields_of(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """What the line was given itself, and what was said around it."""
    around = _fields.get()
    known = {name: getattr(record, name, around.get(name)) for name in FIELDS}
    return {name: value for name, value in known.items() if value is not None}
