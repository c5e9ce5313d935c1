"""Read the messages of gRPC calls within the budget of memory."""

import asyncio
from typing import Any

from .budget import Budget, Held
from .errors import TOO_SLOW, ServiceError, invalid
from .settings import ServerSettings

MOMENT_SECONDS = 0.02  # a message that takes longer is not small
LAST_SECONDS = 0.2  # for one that the budget has no room for: it may be small, and the loop busy


class Messages:
    """Reads the message of each call.

    gRPC does not tell the size of a message before it is complete. So only as many are read at once as fit an
    eighth of the budget, whatever their sizes. One that is still arriving after a moment makes room for the
    next: it takes as many bytes from the budget as a message can have.
    """

    def __init__(self, settings: ServerSettings, budget: Budget) -> None:
        self._most, self._seconds = settings.max_request_bytes, settings.body_seconds
        self._budget = budget
        self._turns = asyncio.Semaphore(max(budget.most // 8 // self._most, 1))
        self._reading: set[asyncio.Task[Any]] = set()

    async def read(self, context: Any, held: Held) -> bytes:
        """Return the message of a call, with twice its bytes in `held`: protobuf copies it.

        Raises:
            ServiceError: the budget has no room for it, it does not arrive in time, or there is none.
        """
        async with self._turns:
            reading = self._start(context)
            is_here = await _arrives(reading, MOMENT_SECONDS)
            if not is_here and not held.fits(self._most):
                is_here = await _arrives(reading, LAST_SECONDS)
                if not is_here:
                    raise held.refusal()
            if not is_here:
                held.add(self._most)
        if not is_here and not await _arrives(reading, self._seconds):
            said = f"the message did not arrive within {self._seconds:g} s (body_seconds)"
            raise ServiceError(TOO_SLOW, said)
        data: Any = reading.result()
        if not isinstance(data, bytes):
            raise invalid("the call has no message")
        held.take(2 * len(data) - held.bytes)
        return data

    def _start(self, context: Any) -> asyncio.Task[Any]:
        """Read in a task that ends with the call.

        gRPC never frees a message that arrives for a coroutine which was cancelled.
        """

        async def read() -> Any:
            data = await context.read()
            if isinstance(data, bytes):
                self._budget.moved(2 * len(data))  # gRPC has freed its buffers
            return data

        def ended(task: asyncio.Task[Any]) -> None:
            self._reading.discard(task)
            if not task.cancelled():
                task.exception()  # asyncio would log it

        task = asyncio.create_task(read())
        self._reading.add(task)
        task.add_done_callback(ended)
        return task


async def _arrives(reading: asyncio.Task[Any], seconds: float) -> bool:
    done, _ = await asyncio.wait({reading}, timeout=seconds)
    return bool(done)
