"""The server's log: one JSON object a line on stderr, with the request's id wherever there is a request.

ONNX Runtime's and gRPC's own C++ messages do not come through here; they stay plain lines on stderr.
"""

import json
import logging
import logging.config
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

_request: ContextVar[Mapping[str, Any]] = ContextVar("_request", default=MappingProxyType({}))

_KNOWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}
"""What every record has; the rest of a record is its `extra`."""


def configure(level: str, access_log: bool = False) -> None:
    """Sends the logs of Python, this package, KServe, uvicorn and gRPC to stderr.

    Call it before KServe's server is made: where handlers exist, it leaves logging alone.

    Args:
        level: debug, info, warning or error, for this package and the servers; others speak from warning on.
        access_log: a line for each HTTP request.
    """
    level = level.upper()
    own: dict[str, Any] = {"level": level, "handlers": [], "propagate": True}
    quiet = own if level in ("DEBUG", "ERROR") else own | {"level": "WARNING"}
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"json": {"()": JsonFormatter}},
            "handlers": {
                "stderr": {
                    "class": "logging.StreamHandler",
                    "stream": "ext://sys.stderr",
                    "formatter": "json",
                }
            },
            "root": {"level": quiet["level"], "handlers": ["stderr"]},
            "loggers": {
                "twinop": own,
                "uvicorn": own,
                "uvicorn.error": own,
                # uvicorn asks whether anybody listens, and then makes no record at all
                "uvicorn.access": own | {"level": "INFO", "propagate": access_log},
                "kserve": own,
                "kserve.trace": quiet,  # lines for every request
                "grpc": own,
                "opentelemetry.exporter": own | {"level": "ERROR"},  # each retry is a warning
            },
        }
    )
    logging.captureWarnings(True)


def begin(**fields: Any) -> None:
    """Starts a request: every record of the current task has these fields, and none of an earlier request.

    Servers run each request in a task of its own, so nothing has to be undone.
    """
    _request.set(fields)


def bind(**fields: Any) -> None:
    """Adds fields to every record of the current task, such as request_id, model and version."""
    _request.set({**_request.get(), **fields})


@contextmanager
def about(**fields: Any) -> Iterator[None]:
    """Inside, every record has these fields and no others: for what runs outside of a request's task."""
    before = _request.set(fields)
    try:
        yield
    finally:
        _request.reset(before)


class JsonFormatter(logging.Formatter):
    """A record as a line of JSON: time, level, logger, message, the request's fields, extras, traceback."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _timestamp(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
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
        return json.dumps(line, default=str)  # all ASCII: no character of a client's ends the line


def _timestamp(seconds: float) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03d}Z"
