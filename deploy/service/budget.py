"""The memory for requests: bytes are counted before they are kept, and given back once they are answered."""

import ctypes
import threading
from typing import Any

from .errors import OVER_BUDGET, ServiceError
from .request import LARGE

# glibc would keep freed memory, and the process grow to several times the budget.
_libc = ctypes.CDLL(None)
_trim = getattr(_libc, "malloc_trim", None)
_M_ARENA_MAX = -8


def use_one_heap() -> None:
    """Have later threads allocate from the main heap: `malloc_trim` does not shrink the ends of others."""
    if (mallopt := getattr(_libc, "mallopt", None)) is not None:
        mallopt(_M_ARENA_MAX, 1)


class Budget:
    """The bytes of all requests that are being read or answered. An eighth is kept for small requests."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.used = 0
        self._moved = 0  # bytes since the last trim

    def add(self, size: int) -> None:
        """Count bytes; a negative number gives some back."""
        self.used += size
        self.moved(abs(size))

    def moved(self, size: int) -> None:
        """Note that bytes were taken or freed; free memory returns to the system after some of them."""
        self._moved += size
        if self._moved > self.most // 16 and _trim is not None:
            threading.Thread(target=_trim, args=(0,), daemon=True).start()  # it takes milliseconds
            self._moved = 0

    def request(self, announced: int = 0) -> "Held":
        """Return the account of one request, which announces this many bytes."""
        return Held(self, announced)


class Held:
    """What one request holds. As a context manager it gives all of it back."""

    def __init__(self, budget: Budget, announced: int) -> None:
        self._budget = budget
        self._announced = announced
        self.bytes = 0

    def take(self, size: int) -> None:
        """Count bytes before they are kept; a negative number gives some back.

        Raises:
            ServiceError: they are more than the budget has left.
        """
        if not self.fits(size):
            raise self.refusal()
        self.add(size)

    def fits(self, size: int) -> bool:
        """Return whether the budget has this many bytes left for the request."""
        budget = self._budget
        is_small = max(self._announced, self.bytes + size) <= LARGE
        most = budget.most if is_small else budget.most - budget.most // 8
        return size <= 0 or budget.used + size <= most

    def refusal(self) -> ServiceError:
        """Return the error for a request that does not fit."""
        return ServiceError(
            OVER_BUDGET,
            f"the requests in flight hold {self._budget.used} of {self._budget.most} bytes "
            "(max_bytes_in_flight), which leaves too few for this one: try again later",
            {"Retry-After": "1"},
        )

    def add(self, size: int) -> None:
        """Count bytes that are there already, such as an answer."""
        self.bytes += size
        self._budget.add(size)

    def __enter__(self) -> "Held":
        return self

    def __exit__(self, *_: Any) -> None:
        self.add(-self.bytes)
