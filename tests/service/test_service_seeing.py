"""What the service tells about itself: metrics, logs, and what the status page is made of."""

import asyncio
import json
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY, generate_latest
from starlette.requests import Request as HttpRequest

from twinop.deploy.service import metrics
from twinop.deploy.service.errors import CANCELLED, INVALID, NOT_FOUND, OVERLOADED
from twinop.deploy.service.metrics import ModelMetrics
from twinop.deploy.service.request import Result
from twinop.deploy.service.status import (
    ServerStatus,
    VersionStatus,
    count,
    moment,
    page,
    short,
    span,
    sparkline,
    status_page,
)

ANSWER = Result("m", 1, {}, "id", 0.002, 0.02, 3)


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"twinop_{name}", labels)


# ------------------------------------------------------------------------------------ metrics


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
    assert (model.requests, model.failures) == (6, {"invalid": 2, "cancelled": 1})


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
    assert model.mean_batch() == 5.5


def test_follows_a_queue(model: ModelMetrics) -> None:
    queue = SimpleNamespace(queued=4, on_run=None)
    model.watch(queue)
    assert value("queued", **OF_M) == 4
    queue.queued = 0
    assert value("queued", **OF_M) == 0
    queue.on_run(7, 0.1)
    assert model.mean_batch() == 7


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


def test_quantiles_of_the_latest_thousand(model: ModelMetrics) -> None:
    assert model.quantile(0.5) is None and model.mean_batch() is None
    for number in range(1500):
        model.answered(ANSWER, number / 1000)
    assert len(model.latencies) == 1000
    assert [model.quantile(q) for q in (0, 0.5, 0.99, 1)] == [0.5, 1.0, 1.49, 1.499]


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


def test_a_version_that_is_loaded_anew_keeps_its_series() -> None:
    old = ModelMetrics("anew", 1)
    old.started()
    old.answered(ANSWER, 0.1)
    new = ModelMetrics("anew", 1)
    new.provider("cpu", fallback=False)
    old.started()
    old.answered(ANSWER, 0.1)  # it drains
    old.drop()
    new.started()
    new.answered(ANSWER, 0.1)
    assert value("requests_total", model="anew", version="1") == 3
    assert value("provider", model="anew", version="1", provider="cpu") == 1
    assert new.requests == 1
    new.drop()
    assert value("requests_total", model="anew", version="1") is None


# ------------------------------------------------------------------------------------ logs


def logged(script: str, level: str = "info", access_log: bool = False) -> list[dict[str, Any]]:
    """The log of a Python script that has configured it; it must be JSON lines and nothing else."""
    program = f"""
import logging, warnings
from twinop.deploy.service import logs
logs.configure({level!r}, {access_log})
log = logging.getLogger("twinop.deploy.service.test")
{textwrap.dedent(script)}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    return [json.loads(line) for line in done.stderr.splitlines()]


def test_a_line_of_json_for_each_record() -> None:
    (line,) = logged('log.info("ready on %s", "cpu", extra={"http_port": 8080, "where": [1, 2]})')
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
    assert line == {
        "level": "info",
        "logger": "twinop.deploy.service.test",
        "message": "ready on cpu",
        "http_port": 8080,
        "where": [1, 2],
    }


def test_nothing_ends_a_line_early() -> None:
    hostile = "a\nb\r\n\x1b[31m{}\u2028\x85\ud800"
    (line,) = logged(f"log.warning('%s', {hostile!r}, extra={{'path': {hostile!r}, 'other': object}})")
    assert line["message"] == line["path"] == hostile
    assert line["other"] == "<class 'object'>"


def test_a_traceback_is_a_field() -> None:
    (line,) = logged("""
        try:
            1 / 0
        except ZeroDivisionError:
            log.exception("failed")
    """)
    assert line["message"] == "failed" and line["level"] == "error"
    assert line["traceback"].startswith("Traceback (most recent call last):\n")
    assert line["traceback"].endswith("ZeroDivisionError: division by zero")


def test_requests_keep_their_fields_apart() -> None:
    lines = logged("""
        import asyncio

        async def request(number):
            logs.bind(request_id=f"r{number}")
            await asyncio.sleep(0)
            logs.bind(model="m", version=number)
            log.info("answered")

        async def main():
            await asyncio.gather(*(asyncio.create_task(request(number)) for number in range(3)))
            log.info("outside")

        asyncio.run(main())
    """)
    found = [(line.get("request_id"), line.get("model"), line.get("version")) for line in lines]
    assert found == [("r0", "m", 0), ("r1", "m", 1), ("r2", "m", 2), (None, None, None)]


SPEAKING = """
    for name in ("twinop.a", "uvicorn.error", "kserve", "kserve.trace", "grpc._cython", "somebody"):
        for level in ("debug", "info", "warning", "error"):
            getattr(logging.getLogger(name), level)(level)
"""


@pytest.mark.parametrize(
    ("level", "own", "others"),
    [
        ("debug", 4, 4),
        ("info", 3, 2),
        ("warning", 2, 2),
        ("error", 1, 1),
    ],
)
def test_levels(level: str, own: int, others: int) -> None:
    lines = [line["logger"] for line in logged(SPEAKING, level)]
    assert [lines.count(name) for name in ("twinop.a", "uvicorn.error", "kserve", "grpc._cython")] == [
        own
    ] * 4
    assert [lines.count(name) for name in ("kserve.trace", "somebody")] == [others] * 2


def test_warnings_are_logged() -> None:
    (line,) = logged('warnings.warn("old\\nthing", DeprecationWarning)')
    assert line["logger"] == "py.warnings" and "DeprecationWarning: old\nthing" in line["message"]


ACCESS = """
    access = logging.getLogger("uvicorn.access")
    if access.hasHandlers():  # as uvicorn asks
        args = ("127.0.0.1:1", "POST", "/v2/models/m/infer", "1.1", 200)
        access.info('%s - "%s %s HTTP/%s" %d', *args)
"""


def test_the_access_log_has_fields() -> None:
    assert logged(ACCESS) == []
    (line,) = logged(ACCESS, access_log=True)
    assert (line["client"], line["method"], line["path"], line["status"]) == (
        "127.0.0.1:1", "POST", "/v2/models/m/infer", 200,
    )  # fmt: skip
    assert line["message"] == '127.0.0.1:1 - "POST /v2/models/m/infer HTTP/1.1" 200'


# ------------------------------------------------------------------------------------ the status page

SERVER = ServerStatus(version="0.1.0", state="ready", started=time.time(), control="poll")


def test_the_page_escapes() -> None:
    hostile = "<b>\"'&"
    html = page(SERVER, [VersionStatus(name=hostile, version=1, state="unavailable", message=hostile)])
    assert "<b>" not in html and "&lt;b&gt;&#34;&#39;&amp;" in html


def test_the_page_holds_nothing_from_elsewhere() -> None:
    html = page(SERVER, [])
    assert not re.search(r"https?://", html)
    assert "No models yet" in html


@pytest.mark.parametrize(("number", "said"), [(None, "–"), (0, "0"), (41250, "41,250"), (3.25, "3.2")])
def test_count(number: float | None, said: str) -> None:
    assert count(number) == said


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (None, "–"), (0, "0 µs"), (1.23e-5, "12 µs"), (4.1e-4, "0.41 ms"), (0.0353, "35.3 ms"),
        (0.84, "840 ms"), (1.2, "1.20 s"), (75, "75.00 s"),
    ],
)  # fmt: skip
def test_short(seconds: float | None, said: str) -> None:
    assert short(seconds) == said


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (-1, "0 s"), (0, "0 s"), (42.9, "42 s"), (190, "3 min 10 s"), (3605, "1 h"),
        (18_120, "5 h 2 min"), (1_047_600, "12 d 3 h"),
    ],
)  # fmt: skip
def test_span(seconds: float, said: str) -> None:
    assert span(seconds) == said


def test_moment() -> None:
    assert moment(0) == "1970-01-01 00:00:00 UTC"


def test_sparkline() -> None:
    assert sparkline([], 10, 10) == sparkline([1], 10, 10) == ""
    assert sparkline([0, 0], 10, 10) == "0.0,10.0 10.0,10.0"
    assert sparkline([1, 4, 2], 10, 8) == "0.0,6.0 5.0,0.0 10.0,4.0"
    peak = sparkline([1.0] * 500 + [9.0] + [1.0] * 499, 100, 9, most=10)
    assert len(peak.split()) == 10 and ",0.0" in peak


ASKED = HttpRequest({"type": "http"})


class FakeRepository:
    """What the page asks of a `repository.Repository`."""

    draining = False
    started = 0.0
    ready = True
    settings = SimpleNamespace(server=SimpleNamespace(control="explicit"))

    def __init__(self, loaded: Any, seen: ModelMetrics) -> None:
        served = SimpleNamespace(loaded=loaded, batcher=SimpleNamespace(queued=2), metrics=seen)
        self.models = {"m": SimpleNamespace(versions={1: served})}

    async def index(self) -> list[dict[str, str]]:
        return [
            {"name": "m", "version": "1", "state": "READY", "reason": ""},
            {"name": "m", "version": "2", "state": "UNAVAILABLE", "reason": "no model.onnx"},
        ]


def test_status_page_of_a_repository(model: ModelMetrics) -> None:
    settings = SimpleNamespace(
        max_batch_size=8, preferred_batch_sizes=(), max_queue_delay_us=0, max_queue=256
    )
    told = {"device_reason": "no GPU here", "fallback": "", "library": "libcustom_relu.so"}
    loaded = SimpleNamespace(
        settings=settings, device="cpu", reason="no GPU in /dev", custom_nodes=("CustomRelu x3",),
        body_nodes=(), difference=None, instances=[1, 2], load_seconds=0.5,
        describe=lambda: {"parameters": told},
    )  # fmt: skip
    repository: Any = FakeRepository(loaded, model)
    answer = asyncio.run(status_page(repository, ASKED))
    html = bytes(answer.body).decode()
    assert "libcustom_relu.so" in html and "no GPU here" in html and "/dev" not in html
    assert "up to 8 rows a run" in html and "2 waiting" in html and "no model.onnx" in html
    assert answer.headers["cache-control"] == "no-store"
    (nonce,) = set(re.findall(r"nonce-([\w-]+)", answer.headers["content-security-policy"]))
    assert html.count(f'nonce="{nonce}"') == 2
    repository.draining = True
    answer = asyncio.run(status_page(repository, ASKED))
    assert "<title>twinop: draining</title>" in bytes(answer.body).decode()
