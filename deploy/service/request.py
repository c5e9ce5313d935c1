"""A request, its result and its limits, independent of the protocol: names and arrays."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from .errors import OVER_BUDGET, TOO_LARGE, ServiceError, invalid, out_of_memory

LARGE = 256 << 10  # requests and answers of more bytes are converted in a thread
Made = TypeVar("Made")

MOST_TENSORS = 64  # inputs, and outputs, of a request, unless the model has more


@dataclass(slots=True)
class Request:
    """A decoded inference request that is not checked against the model yet."""

    model: str
    inputs: Mapping[str, np.ndarray]  # BF16 is ml_dtypes.bfloat16; BYTES is an object array of str
    outputs: Sequence[str] | None = None  # None for all
    version: int | None = None  # None for the latest
    id: str = ""  # the client's, or a generated one
    deadline: float | None = None  # in seconds of time.monotonic()
    arrived: float = 0.0  # when it had been read


@dataclass(slots=True)
class Result:
    """The outputs by name in the requested order, the version that made them, and the time in the queue."""

    model: str
    version: int
    outputs: dict[str, np.ndarray]
    queue_seconds: float = 0.0

    @property
    def nbytes(self) -> int:
        """The bytes of all outputs."""
        return sum(array.nbytes for array in self.outputs.values())


async def in_thread_if_large(size: int, work: Callable[..., Made], *arguments: Any) -> Made:
    """Do the work at once for a small size, otherwise in a thread: it may take seconds, or all memory."""
    try:
        return work(*arguments) if size <= LARGE else await asyncio.to_thread(work, *arguments)
    except MemoryError as error:
        raise out_of_memory() from error


def check_names(what: str, names: Sequence[str], most: int) -> None:
    """Raise ServiceError for too many inputs or outputs, or two of one name, before work is spent on them."""
    if len(names) > most:
        raise invalid(f"{len(names)} {what}s: a request to this model has up to {most}")
    if len(set(names)) < len(names):
        twice = next(name for index, name in enumerate(names) if name in names[:index])
        raise invalid(f"{what} {twice} is named twice")


@dataclass(frozen=True)
class Limit:
    """The largest request, or the largest JSON in one. The other fields are for the message."""

    bytes: int
    setting: str = "max_request_bytes"
    what: str = "request"
    advice: str = ""

    def exceeded(self) -> ServiceError:
        said = f"the {self.what} is larger than {self.bytes} bytes ({self.setting}){self.advice}"
        return ServiceError(TOO_LARGE, said)


@dataclass
class Budget:
    """The bytes of all requests that are being read or answered. An eighth is kept for small requests."""

    most: int
    used: int = 0


class RequestMemory:
    """The memory of one request, which announces its bytes. As a context manager it gives all of it back."""

    def __init__(self, budget: Budget, announced: int = 0) -> None:
        self._budget = budget
        self._announced = announced
        self._bytes = 0

    def reserve(self, size: int) -> None:
        """Count bytes before they are kept, or give some back; raise ServiceError if too few are left."""
        budget = self._budget
        is_small = max(self._announced, self._bytes + size) <= LARGE
        most = budget.most if is_small else budget.most - budget.most // 8
        if size > 0 and budget.used + size > most:
            raise ServiceError(
                OVER_BUDGET,
                f"the requests in flight hold {budget.used} of {budget.most} bytes (max_bytes_in_flight), "
                "which leaves too few for this one: try again later",
                {"Retry-After": "1"},
            )
        self.record(size)

    def record(self, size: int) -> None:
        """Count bytes that exist already, such as an answer."""
        self._bytes += size
        self._budget.used += size

    def __enter__(self) -> "RequestMemory":
        return self

    def __exit__(self, *_: Any) -> None:
        self.record(-self._bytes)
