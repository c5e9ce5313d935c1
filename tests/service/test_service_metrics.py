"""Metrics: what Prometheus reads."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY, generate_latest

from twinop.deploy.service import metrics
from twinop.deploy.service.errors import CANCELLED, INVALID, NOT_FOUND, OVERLOADED
from twinop.deploy.service.metrics import ModelMetrics
from twinop.deploy.service.request import Result

ANSWER = Result("m", 1, {}, "id", 0.002, 0.02, 3)


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"twinop_{name}", labels)


@pytest.fixture
def model() -> Iterator[ModelMetrics]:
    found = ModelMetrics("m", 1)
    yield found
    found.drop()


OF_M = {"model": "m", "version": "1"}


def test_counts_requests_and_failures_by_reason(model: ModelMetrics) -> None:
    for _ in range(3):
        model.started()
        model.answered(ANSWER, 0.025)
    for failure in (INVALID, INVALID, CANCELLED):
        model.started()
        model.failed(failure)
    model.started()
    assert value("requests_total", **OF_M) == 6
    assert value("failures_total", reason="invalid", **OF_M) == 2
    assert value("failures_total", reason="cancelled", **OF_M) == 1
    assert value("in_flight", **OF_M) == 1


def test_times_requests_and_runs(model: ModelMetrics) -> None:
    model.started()
    model.answered(ANSWER, 0.025)
    model.ran(3, 0.02)
    model.ran(8, 0.04)
    assert value("request_seconds_sum", **OF_M) == 0.025
    assert value("queue_seconds_sum", **OF_M) == 0.002
    assert value("compute_seconds_sum", **OF_M) == pytest.approx(0.06)
    assert value("compute_seconds_bucket", le="0.03", **OF_M) == 1
    assert value("batch_size_bucket", le="4.0", **OF_M) == 1
    assert value("batch_size_count", **OF_M) == 2


def test_follows_a_queue(model: ModelMetrics) -> None:
    queue = SimpleNamespace(queued=4, on_run=None)
    model.watch(queue)
    assert value("queued", **OF_M) == 4
    queue.queued = 0
    assert value("queued", **OF_M) == 0
    queue.on_run(7, 0.1)
    assert value("batch_size_sum", **OF_M) == 7


def test_says_what_runs_a_model(model: ModelMetrics) -> None:
    model.provider("cuda", fallback=False)
    assert value("provider", provider="cuda", **OF_M) == 1
    assert value("fallback", **OF_M) == 0
    model.provider("cpu", fallback=True)
    assert value("provider", provider="cuda", **OF_M) is None
    assert value("provider", provider="cpu", **OF_M) == 1
    assert value("fallback", **OF_M) == 1


def test_failures_without_a_model_and_loads() -> None:
    before = [
        value("failures_total", model="", version="", reason="not_found") or 0,
        value("loads_total", result="ok"),
        value("loads_total", result="failed"),
    ]
    metrics.failed_without_model(NOT_FOUND)
    metrics.loaded(True)
    metrics.loaded(False)
    after = [
        value("failures_total", model="", version="", reason="not_found"),
        value("loads_total", result="ok"),
        value("loads_total", result="failed"),
    ]
    assert after == [each + 1 for each in before if each is not None]


def test_an_unloaded_version_leaves_nothing() -> None:
    gone = ModelMetrics("gone", 7)
    gone.provider("cpu", fallback=False)
    gone.watch(SimpleNamespace(queued=0, on_run=None))
    gone.started()
    gone.failed(OVERLOADED)
    gone.ran(1, 0.1)
    assert b'model="gone"' in generate_latest()
    gone.drop()
    assert b'model="gone"' not in generate_latest()


def test_a_version_that_is_loaded_again_keeps_its_series() -> None:
    old = ModelMetrics("again", 1)
    old.started()
    old.answered(ANSWER, 0.1)
    new = ModelMetrics("again", 1)
    new.provider("cpu", fallback=False)
    old.started()
    old.answered(ANSWER, 0.1)  # while it drains
    old.drop()
    new.started()
    new.answered(ANSWER, 0.1)
    assert value("requests_total", model="again", version="1") == 3
    assert value("provider", model="again", version="1", provider="cpu") == 1
    new.drop()
    assert value("requests_total", model="again", version="1") is None
