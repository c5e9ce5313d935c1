"""The metrics behind /metrics: requests, failures, latencies, and what runs where.

Labels are looked up once per version to keep the cost of a request low.
"""

import time
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase

from .errors import Failure, failure_of
from .request import Result

_LABELS = ("model", "version")
_SECONDS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0)

REQUESTS = Counter("twinop_requests", "Requests that ended, answered or failed.", _LABELS)
FAILURES = Counter(
    "twinop_failures",
    "Failed requests by reason; without a model label if no served model was found.",
    (*_LABELS, "reason"),
)
IN_FLIGHT = Gauge("twinop_in_flight", "Requests that were accepted and have not ended.", _LABELS)
QUEUED = Gauge("twinop_queued", "Requests that wait for an instance.", _LABELS)
REQUEST_SECONDS = Histogram(
    "twinop_request_seconds", "Time from arrival to answer of answered requests.", _LABELS, buckets=_SECONDS
)
QUEUE_SECONDS = Histogram(
    "twinop_queue_seconds", "Time that answered requests waited for an instance.", _LABELS, buckets=_SECONDS
)
COMPUTE_SECONDS = Histogram("twinop_compute_seconds", "One run of the model.", _LABELS, buckets=_SECONDS)
BATCH_SIZE = Histogram(
    "twinop_batch_size", "Rows in one run.", _LABELS, buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
)
PROVIDER = Gauge("twinop_provider", "1 for what runs the model: cpu or cuda.", (*_LABELS, "provider"))
LOADS = Counter("twinop_loads", "Versions that were loaded, or failed to load.", ("result",))

_OF_A_VERSION: tuple[MetricWrapperBase, ...] = (
    REQUESTS, FAILURES, IN_FLIGHT, QUEUED, REQUEST_SECONDS, QUEUE_SECONDS, COMPUTE_SECONDS, BATCH_SIZE,
    PROVIDER,
)  # fmt: skip

for _result in ("ok", "failed"):
    LOADS.labels(_result)  # a zero before the first load lets rate() see the first one

_owners: dict[tuple[str, str], "ModelMetrics"] = {}  # the last one, while a version is being reloaded


def loaded(ok: bool) -> None:
    LOADS.labels("ok" if ok else "failed").inc()


def failed_without_model(failure: Failure) -> None:
    """Count a failed request to no served version. Names that clients invent never become labels."""
    FAILURES.labels("", "", failure.reason).inc()


class counting:
    """Counts an inference request once, when its answer is ready or it has failed.

    A request counts for the version that ran it. If it fails earlier, for example because its body is not
    JSON, it counts for the version that it was sent to, if that is served.
    """

    def __init__(self) -> None:
        self.model: ModelMetrics | None = None
        self.result: Result | None = None
        self._arrived: float | None = None

    def accept(self, model: "ModelMetrics", arrived: float) -> None:
        """Count the request for the version that runs it, which checks it next."""
        self.model, self._arrived = model, arrived
        model.in_flight += 1

    def __enter__(self) -> "counting":
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        model, result, arrived = self.model, self.result, self._arrived
        if model is None:
            failed_without_model(failure_of(error))
            return
        model.requests.inc()
        if arrived is not None:
            model.in_flight -= 1
        if error is not None:
            FAILURES.labels(*model.labels, failure_of(error).reason).inc()
        elif result is not None and arrived is not None:
            model.request_seconds.observe(time.monotonic() - arrived)
            model.queue_seconds.observe(result.queue_seconds)


class ModelMetrics:
    """The metrics of one loaded version. `counting` counts its requests, on the event loop's thread."""

    def __init__(self, model: str, version: int, queue: Any, provider: str) -> None:
        """`queue`: the version's Batcher. `provider`: what runs the model, "cpu" or "cuda:<index>"."""
        self.labels = (model, str(version))
        self.in_flight = 0
        _owners[self.labels] = self
        self.requests = REQUESTS.labels(*self.labels)
        self.request_seconds = REQUEST_SECONDS.labels(*self.labels)
        self.queue_seconds = QUEUE_SECONDS.labels(*self.labels)
        self._compute_seconds = COMPUTE_SECONDS.labels(*self.labels)
        self._batch_size = BATCH_SIZE.labels(*self.labels)
        IN_FLIGHT.labels(*self.labels).set_function(lambda: self.in_flight)
        QUEUED.labels(*self.labels).set_function(lambda: queue.queued)
        queue.on_run = self.ran
        PROVIDER.remove_by_labels(self._set())  # left by a version that this one replaces
        PROVIDER.labels(*self.labels, provider).set(1)

    def ran(self, rows: int, seconds: float) -> None:
        """Count one run of the model, successful or not."""
        self._batch_size.observe(rows)
        self._compute_seconds.observe(seconds)

    def drop(self) -> None:
        """Remove the version's series, unless the version has been loaded again."""
        if _owners.get(self.labels) is self:
            del _owners[self.labels]
            for metric in _OF_A_VERSION:
                metric.remove_by_labels(self._set())

    def _set(self) -> dict[str, str]:
        return dict(zip(_LABELS, self.labels, strict=True))
