"""A version of a model that is served, with a queue, metrics and the checks of requests."""

import asyncio
from collections.abc import Callable

from ..errors import FeedError
from .batching import Batcher
from .errors import invalid
from .instance import LoadedModel
from .metrics import ModelMetrics
from .request import MOST_TENSORS, Request


class ServedVersion:
    """A loaded version with its queue and its metrics."""

    def __init__(self, loaded: LoadedModel, on_broken: Callable[[str], None]) -> None:
        """`on_broken` is told why this process cannot run models any more."""
        self.loaded = loaded
        self.batcher = Batcher(loaded)
        self.batcher.on_broken = on_broken
        self.most_tensors = max(MOST_TENSORS, len(loaded.session.inputs), len(loaded.session.outputs))
        self.metrics = ModelMetrics(loaded.name, loaded.version, self.batcher, loaded.session.device)

    def check(self, request: Request) -> tuple[str, ...]:
        """Check a request, and return its outputs' names; raise ServiceError if it does not fit."""
        settings, inputs = self.loaded.settings, request.inputs
        try:
            outputs = self.loaded.session.check(inputs, request.outputs)
        except FeedError as error:
            raise invalid(str(error)) from error
        if not settings.allow_empty:
            for name, array in inputs.items():
                if array.size == 0:
                    raise invalid(
                        f"input {name} is empty: its shape is {list(array.shape)}. Send at least one "
                        "element, or set allow_empty for this model if it is made for empty inputs"
                    )
        if settings.max_batch_size and inputs:
            self._check_batch(request)
        return tuple(outputs)

    async def close(self) -> None:
        """Answer all accepted requests, then release the sessions."""
        await self.batcher.drain()
        while self.metrics.in_flight:  # answered, but not counted yet
            await asyncio.sleep(0.01)
        await asyncio.to_thread(self.loaded.close)  # freeing a session takes long
        self.metrics.drop()

    def _check_batch(self, request: Request) -> None:
        if scalars := [name for name, array in request.inputs.items() if not array.ndim]:
            raise invalid(f"input {scalars[0]} is a scalar; a batched model takes rows")
        sizes = {name: array.shape[0] for name, array in request.inputs.items()}
        if len(set(sizes.values())) > 1:
            listed = ", ".join(f"{name} has {size}" for name, size in sizes.items())
            raise invalid(f"all inputs of a batched model need the same number of rows: {listed}")
        limit = self.loaded.settings.max_batch_size
        if (rows := next(iter(sizes.values()))) > limit:
            name = self.loaded.name
            raise invalid(f"{rows} rows in one request; model {name} takes up to {limit}: split it")
