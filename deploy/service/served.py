"""One served model: its versions, and the checks of requests against them."""

import asyncio
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from ..tensor_specs import Spec
from .batching import Batcher
from .datatypes import OF_DTYPE
from .errors import NOT_FOUND, NOT_READY, ServiceError, invalid
from .loaded_model import LoadedModel
from .metrics import ModelMetrics
from .newer_python import StrEnum
from .request import MOST_TENSORS, Request, Result
from .spans import record_run


class State(StrEnum):
    """The state of a version, as the repository extension names it."""

    LOADING = "LOADING"
    READY = "READY"
    UNAVAILABLE = "UNAVAILABLE"


class Version:
    """A loaded version with its queue and its metrics."""

    def __init__(self, loaded: LoadedModel, on_broken: Callable[[str], None]) -> None:
        """`on_broken` is told why this process cannot run models any more."""
        self.loaded = loaded
        # A GPU may be busy for longer than the event loop may wait, and custom ops may not return at all.
        # ONNX Runtime's own kernels return after a time that a steady model's shapes determine.
        is_known = not loaded.custom_nodes or loaded.settings.run_on_event_loop
        may_block = loaded.device == "cpu" and loaded.steady and is_known
        self.batcher = Batcher(
            loaded.name,
            loaded.version,
            loaded.instances,
            loaded.settings,
            may_block=may_block,
            may_join=loaded.joins,
        )
        self.batcher.on_broken = on_broken
        self.metrics = ModelMetrics(loaded.name, loaded.version)
        self.metrics.watch(self.batcher)
        self.metrics.provider(loaded.device, loaded.fallback is not None)
        self._name = loaded.name
        self._outputs = tuple(loaded.outputs)

    async def answer(self, request: Request) -> Result:
        """Check and run a request, which the caller's `metrics.counting` counts.

        Raises:
            ServiceError: the request does not fit the model, or could not be run.
        """
        self.metrics.started()
        request.metrics = self.metrics
        result = await self.batcher.submit(request, self._checked(request))
        record_run(request, result)
        return result

    def may_use(self, libraries: Collection[Path]) -> bool:
        """Return whether it has one of these libraries; any may help where function bodies run instead."""
        paths = [library.path for library in self.loaded.libraries]
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

    # -------------------------------------------------------------------------------- a request

    def _checked(self, request: Request) -> tuple[str, ...]:
        """Check a request, and return the outputs to compute.

        Raises:
            ServiceError: a name, a dtype, a rank or a size does not fit.
        """
        loaded, inputs = self.loaded, request.inputs
        for name, array in inputs.items():
            spec = loaded.inputs.get(name)
            if spec is None:
                raise invalid(
                    f"model {self._name} has no input {name!r}; its inputs: {_listed(loaded.inputs.values())}"
                )
            if array.dtype != spec.numpy_dtype or not spec.accepts(array.shape):
                raise invalid(str(spec.mismatch(OF_DTYPE[array.dtype].name, array.shape)))
            if spec.right_padded and (error := spec.padding_error(array)) is not None:
                raise invalid(str(error))
            if array.size == 0 and not loaded.settings.allow_empty:
                raise invalid(
                    f"input {name} is empty: its shape is {list(array.shape)}. Send at least one element, or "
                    "set allow_empty for this model if it is made for empty inputs"
                )
        missing = [spec for spec in loaded.required if spec.name not in inputs]
        if missing:
            raise invalid(f"input missing: {_listed(missing)}; given: {', '.join(inputs) or 'none'}")
        self._check_equal_sizes(request)
        if loaded.settings.max_batch_size and inputs:
            self._check_batch(request)
        if request.outputs is None:
            return self._outputs
        for name in request.outputs:
            if name not in loaded.outputs:
                known = ", ".join(loaded.outputs)
                raise invalid(f"model {self._name} has no output {name!r}; its outputs: {known}")
        return tuple(request.outputs)

    def _check_equal_sizes(self, request: Request) -> None:
        """Check that dimensions of one name have one size, which ONNX Runtime does not always notice."""
        sizes: dict[str, tuple[str, int]] = {}
        for name, array in request.inputs.items():
            for dimension, size in zip(self.loaded.inputs[name].shape or (), array.shape, strict=False):
                if not isinstance(dimension, str):
                    continue
                other, expected = sizes.setdefault(dimension, (name, size))
                if size != expected:
                    raise invalid(
                        f"dimension {dimension} is {expected} in input {other} and {size} in {name}: "
                        "it must be the same in all inputs"
                    )

    def _check_batch(self, request: Request) -> None:
        if scalars := [name for name, array in request.inputs.items() if not array.ndim]:
            raise invalid(f"input {scalars[0]} is a scalar; a batched model takes rows")
        sizes = {name: array.shape[0] for name, array in request.inputs.items()}
        if len(set(sizes.values())) > 1:
            listed = ", ".join(f"{name} has {size}" for name, size in sizes.items())
            raise invalid(f"all inputs of a batched model need the same number of rows: {listed}")
        limit = self.loaded.settings.max_batch_size
        if (rows := next(iter(sizes.values()))) > limit:
            raise invalid(f"{rows} rows in one request; model {self._name} takes up to {limit}: split it")


class ServedModel:
    """All versions of one model. A request without a version goes to the latest that is ready."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.versions: dict[int, Version] = {}

    @property
    def most_tensors(self) -> int:
        """The largest number of inputs, and of outputs, that a request is parsed with."""
        each_loaded = (version.loaded for version in self.versions.values())
        return max([MOST_TENSORS, *(max(len(each.inputs), len(each.outputs)) for each in each_loaded)])

    def find(self, version: int | None) -> Version:
        """Return a version; the latest for None.

        Raises:
            ServiceError: there is no such version, or none is ready.
        """
        if version is None:
            if not self.versions:
                raise ServiceError(NOT_READY, f"model {self.name} is not ready")
            return self.versions[max(self.versions)]
        found = self.versions.get(version)
        if found is None:
            known = ", ".join(map(str, sorted(self.versions))) or "none"
            raise ServiceError(NOT_FOUND, f"model {self.name} has no version {version}; it has: {known}")
        return found


def _listed(specs: Iterable[Spec]) -> str:
    return ", ".join(f"{spec.name} ({spec})" for spec in specs)
