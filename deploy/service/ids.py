"""The id of a request in logs, in the x-request-id header, and in messages about internal errors."""

import re
import uuid

from starlette.types import Scope

HEADER = "x-request-id"
_KEY = "twinop.request_id"

_USABLE = re.compile(r"[!-~]{1,128}").fullmatch  # visible ASCII is safe in headers and log lines


def request_id(*given: str) -> str:
    """Return the first usable id of the client's, or a new one."""
    return next(filter(_USABLE, given), None) or uuid.uuid4().hex


def take(scope: Scope, given: str) -> None:
    """Store the client's header at the start of an HTTP request."""
    scope[_KEY] = request_id(given) if given else ""


def of(scope: Scope, *given: str) -> str:
    """Return the id of an HTTP request: its header's, else the first usable of `given`, else a new one."""
    number: str = scope[_KEY] or request_id(*given)
    scope[_KEY] = number
    return number
