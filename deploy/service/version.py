"""A version of a model: ready to run, and served, with a queue, metrics and the checks of requests."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import FeedError
from ..tensor_specs import Spec
from .batching import Batcher
from .datatypes import datatype_of
from .errors import invalid
from .instance import Instance, without_paths
from .metrics import ModelMetrics
from .request import MOST_TENSORS, Request
from .settings import ModelSettings


@dataclass
class LoadedModel:
    """A version that is ready to run."""

    name: str
    version: int
    settings: ModelSettings
    session: Any  # the first one, until `close`; its inputs are those that clients may send
    instances: list[Instance]
    custom_nodes: list[str]  # the ops that the libraries' kernels run, such as "CustomRelu x3"
    difference: str | None = None  # of kernels and function bodies in the first run; None: not compared
    load_seconds: float = 0.0
    rows_independent: bool = True  # each row of the outputs depends on the same row of the inputs alone

    def summary(self) -> str:
        """Return what runs the model, and what was checked of it, in a line."""
        parts = [f"runs on {self.session.device} ({self.session.reason})"]
        if self.session.libraries:
            paths = ", ".join(str(library.path) for library in self.session.libraries)
            parts.append(f"{', '.join(self.custom_nodes)} from {paths}")
            parts.append(f"SHA-256 {', '.join(self.session.checksums)}")
            parts.append(f"difference from the function bodies: {self.difference or 'not compared'}")
        return "; ".join(parts)

    def describe(self) -> dict[str, Any]:
        """Return the inputs and outputs as the protocol lists them, and `parameters`: how the model runs."""
        parameters: dict[str, str | int | float] = {
            "device": self.session.device,
            "device_reason": without_paths(self.session.reason),
            "custom_nodes": ", ".join(self.custom_nodes),
            "difference_from_function_bodies": self.difference or "",
            "max_batch_size": self.settings.max_batch_size,
            "instances": self.settings.instances,
            "load_seconds": round(self.load_seconds, 3),
        }
        if libraries := self.session.libraries:
            parameters["library"] = ", ".join(library.path.name for library in libraries)
            parameters["library_version"] = ", ".join(library.version for library in libraries)
            parameters["library_sha256"] = ", ".join(self.session.checksums)
        return {
            "inputs": [_described(spec) for spec in self.session.inputs.values()],
            "outputs": [_described(spec) for spec in self.session.outputs.values()],
            "parameters": parameters,
        }

    def close(self) -> None:
        """Free the sessions. ONNX Runtime writes its profiles."""
        self.session = None
        for instance in self.instances:
            instance.close()


def _described(spec: Spec) -> dict[str, Any]:
    shape = [size if isinstance(size, int) else -1 for size in spec.shape or (-1,)]
    return {
        "name": spec.name,
        "datatype": datatype_of(spec.numpy_dtype),
        "shape": shape if spec.shape != () else [],
    }


class ServedVersion:
    """A loaded version with its queue and its metrics."""

    def __init__(self, loaded: LoadedModel, on_broken: Callable[[str], None]) -> None:
        """`on_broken` is told why this process cannot run models any more."""
        self.loaded = loaded
        self.batcher = Batcher(
            loaded.name, loaded.version, loaded.instances, loaded.settings, loaded.rows_independent
        )
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
