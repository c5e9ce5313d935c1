"""The id that a request has in the logs, in its answer's x-request-id, and in messages of internal errors."""

import re
import uuid

from starlette.types import Scope

HEADER = "x-request-id"
_KEY = "twinop.request_id"

_USABLE = re.compile(r"[!-~]{1,128}").fullmatch  # visible ASCII: safe in a header and in a log line


def request_id(*given: str) -> str:
    """The first of the client's that is usable, else a new one."""
    return next(filter(_USABLE, given), None) or uuid.uuid4().hex


def take(scope: Scope, given: str) -> None:
    """Notes what the client's header says, at the start of an HTTP request."""
    scope[_KEY] = request_id(given) if given else ""


def of(scope: Scope, *given: str) -> str:
    """The id of an HTTP request, from here on the same: its header's, else of `given`, else a new one."""
    number: str = scope[_KEY] or request_id(*given)
    scope[_KEY] = number
    return number
