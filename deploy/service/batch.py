"""Run the requests of one batch together in a worker thread, and each alone if that fails."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import logs
from .errors import BROKEN, DEADLINE, RUN_FAILED, RUN_TOO_LONG, ServiceError
from .instance import Instance
from .request import Request, Result
from .run_limit import RunLimit

_log = logging.getLogger(__name__)

Outcome = dict[str, np.ndarray] | ServiceError


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A request that waits or runs."""

    request: Request
    outputs: tuple[str, ...]
    rows: int
    key: Any  # requests with equal keys may share a run
    future: asyncio.Future[Result]

    @classmethod
    def of(
        cls, request: Request, outputs: tuple[str, ...], future: asyncio.Future[Result]
    ) -> "QueuedRequest":
        """Requests may share a run if they have the same inputs, dtypes, trailing shapes and outputs."""
        inputs = request.inputs
        first = next(iter(inputs.values()), None)
        rows = first.shape[0] if first is not None and first.ndim else 1
        key = outputs, frozenset((name, array.dtype, array.shape[1:]) for name, array in inputs.items())
        return cls(request, outputs, rows, key, future)

    def gone(self, now: float) -> bool:
        """Return whether nobody waits for the answer any more."""
        if self.future.done():
            return True
        deadline = self.request.deadline
        if deadline is None or now < deadline:
            return False
        self.expire()
        return True

    def expire(self) -> None:
        self.fail(ServiceError(DEADLINE, "the request's time was over before it was answered"))

    def fail(self, error: ServiceError) -> None:
        """Answer with an error, unless the request is answered or cancelled."""
        if not self.future.done():
            self.future.set_exception(error)


Batch = Sequence[QueuedRequest]


def size_of(batch: Batch) -> int:
    """Return the bytes of all inputs."""
    return sum(array.nbytes for member in batch for array in member.request.inputs.values())


class BatchRuns:
    """Runs the batches of one version, in any thread.

    Attributes:
        rows_independent: whether the outputs had a row for each row of the inputs whenever requests were
            joined.
    """

    def __init__(self, name: str, version: int, rows_independent: bool) -> None:
        self.rows_independent = rows_independent
        self._name = name
        self._version = version

    def run(self, instance: Instance, batch: Batch, limit: RunLimit | None = None) -> list[Outcome]:
        """Return the outputs of each request, or its error."""
        with logs.about(**_ids(batch), model=self._name, version=self._version):
            if limit is not None:
                limit.begin()
            try:
                parts = [member.request.inputs for member in batch]
                found = instance.run(parts, batch[0].outputs)
                if len(batch) == 1:
                    return [found]
                if self._has_all_rows(found, batch):
                    return _split(found, batch)
            except Exception as error:
                failure = self._failure(error, limit)
                if len(batch) == 1 or failure.failure in (BROKEN, RUN_TOO_LONG):
                    return [failure] * len(batch)
        # One request fails, or the outputs' rows do not match the inputs': run each request alone.
        return [outcome for member in batch for outcome in self.run(instance, [member], limit)]

    def _failure(self, error: Exception, limit: RunLimit | None) -> ServiceError:
        if limit is not None and limit.exceeded:
            _log.error("a run took longer than run_timeout_seconds (%g), and was ended", limit.seconds)
            return ServiceError(RUN_TOO_LONG, f"the run took longer than this model's {limit.seconds:g} s")
        if isinstance(error, ServiceError):
            return error
        _log.error("a run failed unexpectedly", exc_info=error)
        return ServiceError(RUN_FAILED, "the model could not be run; the server's log says why")

    def _has_all_rows(self, found: Mapping[str, np.ndarray], batch: Batch) -> bool:
        rows = sum(member.rows for member in batch)
        for name, array in found.items():
            if array.ndim == 0 or array.shape[0] != rows:
                if self.rows_independent:
                    self.rows_independent = False
                    _log.warning(
                        "model %s: output %s has shape %s for %d rows, so requests are no longer joined. Its "
                        "max_batch_size should be 0",
                        self._name, name, list(array.shape), rows,
                    )  # fmt: skip
                return False
        return True


def _split(found: Mapping[str, np.ndarray], batch: Batch) -> list[Outcome]:
    """Return each member's rows of the outputs."""
    split: list[Outcome] = []
    start = 0
    for member in batch:
        split.append({name: array[start : start + member.rows] for name, array in found.items()})
        start += member.rows
    return split


def _ids(batch: Batch) -> dict[str, Any]:
    """Return the ids for log lines about a run, which happens outside of its requests' tasks."""
    if len(batch) == 1:
        return {"request_id": batch[0].request.id}
    return {"request_ids": [member.request.id for member in batch]}
