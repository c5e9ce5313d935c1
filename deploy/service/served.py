"""A version that is served: its sessions with a queue and metrics, and the checks of requests."""

import asyncio
from collections.abc import Callable, Collection
from pathlib import Path

from ..errors import FeedError
from .batching import Batcher
from .errors import invalid
from .loaded_model import LoadedModel
from .metrics import ModelMetrics
from .request import MOST_TENSORS, Request


class ServedVersion:
    """A loaded version with its queue and its metrics."""

    def __init__(self, loaded: LoadedModel, on_broken: Callable[[str], None]) -> None:
        """`on_broken` is told why this process cannot run models any more."""
        self.loaded = loaded
        # A GPU may be busy for longer than the event loop may wait, and custom ops may not return at all.
        # ONNX Runtime's own kernels return after a time that a steady model's shapes determine.
        is_known = not loaded.custom_nodes or loaded.settings.run_on_event_loop
        self.batcher = Batcher(
            loaded.name,
            loaded.version,
            loaded.instances,
            loaded.settings,
            may_run_on_loop=loaded.session.device == "cpu" and loaded.steady and is_known,
            rows_independent=loaded.rows_independent,
        )
        self.batcher.on_broken = on_broken
        self.most_tensors = max(MOST_TENSORS, len(loaded.session.inputs), len(loaded.session.outputs))
        device, is_fallback = loaded.session.device, loaded.fallback is not None
        self.metrics = ModelMetrics(loaded.name, loaded.version, self.batcher, device, is_fallback)

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

    def may_use(self, libraries: Collection[Path]) -> bool:
        """Return whether it has one of these libraries; any may help where function bodies run instead."""
        paths = [library.path for library in self.loaded.session.libraries]
        return self.loaded.fallback is not None or any(
            path.parent.resolve() / path.name in libraries for path in paths
        )

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
