"""The memory for requests: bytes are counted before they are kept, and given back once they are answered."""

from typing import Any

from .errors import OVER_BUDGET, ServiceError
from .request import LARGE


class Budget:
    """The bytes of all requests that are being read or answered. An eighth is kept for small requests."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.used = 0


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
