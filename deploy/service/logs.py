"""Write the server's log to stderr as JSON lines, with the request's id on each line about a request.

The C++ messages of ONNX Runtime and gRPC do not pass through here: they stay plain lines on stderr.
"""

import logging
import logging.config
import re
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime, timezone
from types import MappingProxyType
from typing import Any

from pythonjsonlogger.core import RESERVED_ATTRS
from pythonjsonlogger.json import JsonFormatter
from starlette.types import Scope

_request: ContextVar[Mapping[str, Any]] = ContextVar("_request", default=MappingProxyType({}))


def configure(level: str) -> None:
    """Send the logs of Python, this package, uvicorn and gRPC to stderr.

    Args:
        level: debug, info, warning or error, for this package and the servers. Others log from warning on.
    """
    level = level.upper()
    own: dict[str, Any] = {"level": level}
    formatter = {
        "()": JsonFormatter,
        "fmt": ["time", "level", "name", "message"],
        "rename_fields": {"name": "logger", "exc_info": "traceback", "stack_info": "stack"},
        "reserved_attrs": [*RESERVED_ATTRS, "color_message", "taskName"],
        "json_default": str,
    }
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "filters": {"fields": {"()": _Fields}},
            "formatters": {"json": formatter},
            "handlers": {
                "stderr": {"class": "logging.StreamHandler", "formatter": "json", "filters": ["fields"]}
            },
            "root": {"level": level if level in ("DEBUG", "ERROR") else "WARNING", "handlers": ["stderr"]},
            "loggers": {
                "twinop": own,
                "uvicorn": own,
                "grpc": own,
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


class _Fields(logging.Filter):
    """Gives each record its time and level as texts, and the fields of its request."""

    def filter(self, record: logging.LogRecord) -> bool:
        made = datetime.fromtimestamp(record.created, timezone.utc)
        record.time = made.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        record.level = record.levelname.lower()
        vars(record).update(_request.get())
        return True


# -------------------------------------------------------------------------------- ids of requests

HEADER = "x-request-id"
_KEY = "twinop.request_id"

_USABLE = re.compile(r"[!-~]{1,128}").fullmatch  # visible ASCII is safe in headers and log lines


def request_id(*given: str) -> str:
    """Return the first usable id of the client's, or a new one."""
    return next(filter(_USABLE, given), None) or uuid.uuid4().hex


def take_id(scope: Scope, given: str) -> None:
    """Store the client's header at the start of an HTTP request."""
    scope[_KEY] = request_id(given) if given else ""


def id_of(scope: Scope, *given: str) -> str:
    """Return the id of an HTTP request: its header's, else the first usable of `given`, else a new one."""
    number: str = scope[_KEY] or request_id(*given)
    scope[_KEY] = number
    return number
