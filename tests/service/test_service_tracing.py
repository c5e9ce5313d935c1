"""OpenTelemetry spans of the service, as a collector receives them."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from service_collector import PARENT, TRACE, Collector, attributes_of

from twinop.deploy.service import spans
from twinop.deploy.service.request import Request, Result
from twinop.deploy.service.settings import SettingsError

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    pytest.importorskip(
        "opentelemetry.exporter.otlp.proto.http.trace_exporter", reason="spans are sent by this exporter"
    )
    for name in ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_SERVICE_NAME", "OTEL_TRACES_SAMPLER"):
        monkeypatch.delenv(name, raising=False)
    found = Collector()
    monkeypatch.setenv(ENDPOINT, found.url)
    yield found
    spans.shutdown(0.1)
    found.close()


FROM_CLIENT = f"00-{TRACE}-{PARENT}-01"
PATH = "/v2/models/m/infer"
NAME = f"POST {PATH}"


def traced(traceparent: str = FROM_CLIENT, path: str = PATH) -> dict[str, str]:
    """Trace one request, and return its ids for log lines."""
    found: dict[str, str] = {}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        spans.note(request_id="r1")
        found.update(spans.ids())
        arrived = time.monotonic() - 60
        spans.record_run(Request("m", {}, arrived=arrived), Result("m", 2, {}, "r1", 0.02, 0.03, 4))

    headers = [(b"traceparent", traceparent.encode("latin-1"))]
    scope: Any = {"type": "http", "method": "POST", "path": path, "headers": headers}
    asyncio.run(spans.around(app)(scope, None, None))  # type: ignore[arg-type]
    return found


def test_spans_of_a_request(collector: Collector) -> None:
    spans.configure()
    before = time.time_ns()
    ids = traced()
    spans.shutdown()
    assert collector.paths == ["/v1/traces"]
    assert collector.resources[0]["service.name"] == "twinop"
    assert len(collector.received) == 3
    request, queue, compute = (collector.spans[name] for name in (NAME, "queue", "compute"))
    assert {each.trace_id.hex() for each in (request, queue, compute)} == {TRACE}
    assert request.parent_span_id.hex() == PARENT
    assert queue.parent_span_id == compute.parent_span_id == request.span_id
    ours = {key: value for key, value in attributes_of(request).items() if key.startswith("twinop.")}
    assert ours == {
        "twinop.request_id": "r1", "twinop.model": "m", "twinop.version": 2, "twinop.batch_size": 4,
    }  # fmt: skip
    assert queue.end_time_unix_nano - queue.start_time_unix_nano == 20_000_000
    assert compute.start_time_unix_nano == queue.end_time_unix_nano
    assert compute.end_time_unix_nano - compute.start_time_unix_nano == 30_000_000
    assert ids == {"trace_id": TRACE, "span_id": request.span_id.hex()}
    assert queue.start_time_unix_nano < before  # the spans begin when the request arrived


def test_a_client_decides_what_is_sampled(collector: Collector) -> None:
    spans.configure()
    traced(f"00-{TRACE}-{PARENT}-00")
    spans.shutdown()
    assert collector.spans == {}


@pytest.mark.parametrize("path", ["/v2/health/live", "/v2/health/ready", "/metrics"])
def test_probes_have_no_spans(collector: Collector, path: str) -> None:
    spans.configure()
    assert traced(path=path) == {}
    spans.shutdown()
    assert NAME not in collector.spans


@pytest.mark.parametrize("sent", ["", "00-zz-1-01", f"00-{'0' * 32}-{PARENT}-01", "\u00e9" * 100])
def test_a_broken_traceparent_is_none(collector: Collector, sent: str) -> None:
    spans.configure()
    traced(sent)
    spans.shutdown()
    assert collector.spans[NAME].parent_span_id == b""


def test_the_service_has_the_name_of_the_variable(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "relu-service")
    spans.configure()
    traced()
    spans.shutdown()
    assert collector.resources[0]["service.name"] == "relu-service"


def test_a_collector_that_hangs_does_not_hold_the_end_up(
    collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    collector.silent.set()
    spans.configure()
    traced()
    spans.shutdown(0.3)
    assert not collector.closed.is_set()  # the collector has not answered yet
    assert "the collector did not take the last spans within 0.3 s" in caplog.text


@pytest.mark.parametrize("endpoint", ["localhost:4318", "grpc://localhost:4317", "http://", "nonsense"])
@pytest.mark.parametrize("name", [ENDPOINT, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"])
def test_an_endpoint_that_is_none(monkeypatch: pytest.MonkeyPatch, name: str, endpoint: str) -> None:
    monkeypatch.setenv(name, endpoint)
    with pytest.raises(
        SettingsError, match=f"{name}: '{endpoint}' is not the URL of a collector, such as http:"
    ):
        spans.configure()


def test_an_endpoint_without_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.setenv(ENDPOINT, "http://localhost:4318")
    with pytest.raises(SettingsError, match=f"{missing} is not installed: pip install opentelemetry-sdk"):
        spans.configure()


def test_off_it_imports_nothing() -> None:
    program = """
import sys
from twinop.deploy.service import spans
spans.configure()
assert spans.around(print) is print and spans.interceptors() == [] and spans.ids() == {}
spans.note(request_id="r")
spans.shutdown()
print([name for name in sys.modules if name.startswith("opentelemetry")])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env={
        "PYTHONPATH": ":".join(sys.path)
    })  # fmt: skip
    assert done.stdout == "[]\n"
