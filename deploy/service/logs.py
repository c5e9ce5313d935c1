"""Write the server's log to stderr as JSON lines, with the request's id on each line about a request.

The C++ messages of ONNX Runtime and gRPC do not pass through here: they stay plain lines on stderr. So does
what Python says of a crash.
"""

import faulthandler
import logging
import re
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import datetime, timezone
from types import MappingProxyType
from typing import Any

from pythonjsonlogger.core import RESERVED_ATTRS
from pythonjsonlogger.json import JsonFormatter

HEADER = "x-request-id"
_USABLE = re.compile(r"[!-~]{1,128}").fullmatch  # visible ASCII is safe in headers and log lines
_request: ContextVar[Mapping[str, Any]] = ContextVar("_request", default=MappingProxyType({}))


def configure(level: str) -> None:
    """Send all logs to stderr, those of others than this package and the servers from warning on."""
    handler = logging.StreamHandler()
    handler.addFilter(_Fields())
    handler.setFormatter(
        JsonFormatter(
            ["time", "level", "name", "message"],
            rename_fields={"name": "logger", "exc_info": "traceback", "stack_info": "stack"},
            reserved_attrs=[*RESERVED_ATTRS, "color_message", "taskName"],
            json_default=str,
        )
    )
    level = level.upper()
    logging.basicConfig(
        level=level if level in ("DEBUG", "ERROR") else "WARNING", handlers=[handler], force=True
    )
    for name in ("twinop", "uvicorn", "grpc"):
        logging.getLogger(name).setLevel(level)
    logging.captureWarnings(True)
    with suppress(OSError, RuntimeError):  # stderr may be closed
        faulthandler.enable(all_threads=False)  # says where ONNX Runtime was if it crashes


def begin(given: str) -> str:
    """Start a request: every record of the current task gets its id, which is returned: a new one, if needed.

    The servers run each request in a task of its own, so the fields need no reset.
    """
    number = given if _USABLE(given) else uuid.uuid4().hex
    _request.set({"request_id": number})
    return number


def request_id() -> str:
    """Return the id of the current task's request."""
    number: str = _request.get()["request_id"]
    return number


def bind(**fields: Any) -> None:
    """Add fields to every record of the current task, such as the model."""
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
