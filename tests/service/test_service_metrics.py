"""Metrics: what Prometheus reads."""

from types import SimpleNamespace

from prometheus_client import REGISTRY, generate_latest

from twinop.deploy.service.errors import OVERLOADED
from twinop.deploy.service.metrics import ModelMetrics
from twinop.deploy.service.request import Result

ANSWER = Result("m", 1, {}, "id", 0.002, 3)


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"twinop_{name}", labels)


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
