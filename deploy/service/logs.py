"""Write the server's log to stderr as JSON lines, with the request's id on each line about a request.

The C++ messages of ONNX Runtime and gRPC do not pass through here: they stay plain lines on stderr.
"""

import json
import logging
import logging.config
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime, timezone
from types import MappingProxyType
from typing import Any

_request: ContextVar[Mapping[str, Any]] = ContextVar("_request", default=MappingProxyType({}))

_KNOWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}
"""The attributes of every record. All others come from `extra`."""


def configure(level: str, access_log: bool = False, **fields: Any) -> None:
    """Send the logs of Python, this package, uvicorn and gRPC to stderr.

    Args:
        level: debug, info, warning or error, for this package and the servers. Others log from warning on.
        access_log: log a line for each HTTP request.
        fields: what each line has, such as process=1.
    """
    level = level.upper()
    own: dict[str, Any] = {"level": level}
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"json": {"()": JsonFormatter, "fields": fields}},
            "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "json"}},
            "root": {"level": level if level in ("DEBUG", "ERROR") else "WARNING", "handlers": ["stderr"]},
            "loggers": {
                "twinop": own,
                "uvicorn": own,
                # uvicorn makes no access records without a handler
                "uvicorn.access": {"level": "INFO", "propagate": access_log},
                "grpc": own,
                "opentelemetry.exporter": {"level": "ERROR"},  # each retry is a warning
            },
        }
    )
    logging.captureWarnings(True)


def begin(**fields: Any) -> None:
    """Start a request: every record of the current task gets these fields and no earlier ones.

    The servers run each request in a task of its own, so the fields need no reset.
    """
    _request.set(fields)


def bind(**fields: Any) -> None:
    """Add fields to every record of the current task, such as request_id, model and version."""
    _request.set({**_request.get(), **fields})


@contextmanager
def about(**fields: Any) -> Iterator[None]:
    """Give every record inside the block exactly these fields, for work outside of a request's task."""
    before = _request.set(fields)
    try:
        yield
    finally:
        _request.reset(before)


class JsonFormatter(logging.Formatter):
    """Formats a record as a line of JSON: time, level, logger, message, fields, extras, traceback."""

    def __init__(self, fields: Mapping[str, Any] = MappingProxyType({})) -> None:
        """`fields` are those that each line has."""
        super().__init__()
        self._fields = fields

    def format(self, record: logging.LogRecord) -> str:
        """Return the line for a record."""
        made = datetime.fromtimestamp(record.created, timezone.utc)
        line: dict[str, Any] = {
            "time": made.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._fields,
            **_request.get(),
        }
        if record.name == "uvicorn.access" and isinstance(record.args, tuple) and len(record.args) == 5:
            client, method, path, _, status = record.args
            line |= {"client": client, "method": method, "path": path, "status": status}
        for name, value in vars(record).items():
            if name not in _KNOWN:
                line.setdefault(name, value)
        if record.exc_info and record.exc_info[0] is not None:
            line["traceback"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = record.stack_info
        return json.dumps(line, default=str)  # ASCII only: no character can end the line early
