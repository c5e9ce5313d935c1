"""Metrics: what Prometheus reads."""

import time
from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY, generate_latest

from twinop.deploy.service.errors import OVERLOADED, ServiceError
from twinop.deploy.service.metrics import ModelMetrics, counting
from twinop.deploy.service.request import Result


def metrics(model: str, version: int) -> ModelMetrics:
    return ModelMetrics(model, version, SimpleNamespace(queued=0, on_run=None), "cpu")


def answer(model: ModelMetrics) -> None:
    with counting() as count:
        count.accept(model, time.monotonic())
        count.result = Result("m", 1, {}, 0.002, 3)


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"twinop_{name}", labels)


def test_an_unloaded_version_leaves_nothing() -> None:
    gone = metrics("gone", 7)
    with pytest.raises(ServiceError), counting() as count:
        count.accept(gone, time.monotonic())
        raise ServiceError(OVERLOADED, "later")
    gone.ran(1, 0.1)
    assert b'model="gone"' in generate_latest()
    gone.drop()
    assert b'model="gone"' not in generate_latest()


def test_a_version_that_is_loaded_again_keeps_its_series() -> None:
    old = metrics("again", 1)
    answer(old)
    new = metrics("again", 1)
    answer(old)  # while it drains
    old.drop()
    answer(new)
    assert value("requests_total", model="again", version="1") == 3
    assert value("provider", model="again", version="1", provider="cpu") == 1
    new.drop()
    assert value("requests_total", model="again", version="1") is None
