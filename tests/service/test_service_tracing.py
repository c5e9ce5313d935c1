"""OpenTelemetry spans of the service, as a collector receives them."""

import asyncio
import json
import logging
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from service_collector import PARENT, TRACE, Collector, attributes_of

from twinop.deploy.service import logs, spans
from twinop.deploy.service.errors import INVALID, ServiceError
from twinop.deploy.service.request import Request, Result
from twinop.deploy.service.settings import SettingsError


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    pytest.importorskip(
        "opentelemetry.exporter.otlp.proto.http.trace_exporter", reason="spans are sent by this exporter"
    )
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_SERVICE_NAME", "OTEL_TRACES_SAMPLER"):
        monkeypatch.delenv(name, raising=False)
    found = Collector()
    yield found
    spans.shutdown(0.1)
    found.close()


FROM_CLIENT = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


def traced(headers: Mapping[str, str], error: BaseException | None = None) -> None:
    """Trace one request in a task of its own, as the servers do."""

    async def request() -> None:
        with spans.request_span("infer", headers):
            spans.note(request_id="r1")
            if error is not None:
                raise error
            arrived = time.monotonic() - 60
            spans.record_run(Request("m", {}, arrived=arrived), Result("m", 2, {}, "r1", 0.02, 0.03, 4))

    async def main() -> None:
        await asyncio.gather(asyncio.create_task(request()), return_exceptions=True)

    asyncio.run(main())


def test_spans_of_a_request(collector: Collector) -> None:
    spans.configure(collector.url)
    before = time.time_ns()
    traced(FROM_CLIENT)
    spans.shutdown()
    assert collector.paths == ["/v1/traces"]
    assert collector.resources[0]["service.name"] == "twinop"
    infer, queue, compute = (collector.spans[name] for name in ("infer", "queue", "compute"))
    assert {each.trace_id.hex() for each in (infer, queue, compute)} == {TRACE}
    assert infer.parent_span_id.hex() == PARENT
    assert queue.parent_span_id == compute.parent_span_id == infer.span_id
    assert infer.kind == infer.SPAN_KIND_SERVER
    assert attributes_of(infer) == {
        "twinop.request_id": "r1", "twinop.model": "m", "twinop.version": 2, "twinop.batch_size": 4,
    }  # fmt: skip
    assert infer.status.code == infer.status.STATUS_CODE_UNSET
    assert queue.end_time_unix_nano - queue.start_time_unix_nano == 20_000_000
    assert compute.start_time_unix_nano == queue.end_time_unix_nano
    assert compute.end_time_unix_nano - compute.start_time_unix_nano == 30_000_000
    assert queue.start_time_unix_nano < before  # the spans begin when the request arrived


@pytest.mark.parametrize(
    ("error", "reason", "message"),
    [
        (ServiceError(INVALID, "input x is missing"), "invalid", "input x is missing"),
        (asyncio.CancelledError(), "cancelled", "cancelled"),
        (ValueError("/secret/path"), "internal", "internal"),
    ],
)
def test_spans_of_a_failure(collector: Collector, error: BaseException, reason: str, message: str) -> None:
    spans.configure(collector.url)
    traced({}, error)
    spans.shutdown()
    infer = collector.spans["infer"]
    assert attributes_of(infer)["twinop.failure"] == reason
    assert (infer.status.code, infer.status.message) == (infer.status.STATUS_CODE_ERROR, message)
    assert not infer.events and infer.parent_span_id == b""


def test_a_client_decides_what_is_sampled(collector: Collector) -> None:
    spans.configure(collector.url)
    traced({"traceparent": f"00-{TRACE}-{PARENT}-00"})
    spans.shutdown()
    assert collector.spans == {}


@pytest.mark.parametrize("sent", ["", "00-zz-1-01", f"00-{'0' * 32}-{PARENT}-01", "\u00e9" * 100])
def test_a_broken_traceparent_is_none(collector: Collector, sent: str) -> None:
    spans.configure(collector.url)
    traced({"traceparent": sent})
    spans.shutdown()
    assert collector.spans["infer"].parent_span_id == b""


def test_the_standard_variables_hold(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "relu-service")
    spans.configure(None)
    traced({})
    spans.shutdown()
    assert collector.resources[0]["service.name"] == "relu-service"


def test_logs_name_the_span(collector: Collector) -> None:
    spans.configure(collector.url)
    lines: list[dict[str, Any]] = []
    formatter, record = logs.JsonFormatter(), logging.makeLogRecord({"msg": "hello"})

    async def request() -> None:
        with spans.request_span("infer", FROM_CLIENT):
            lines.append(json.loads(formatter.format(record)))

    asyncio.run(request())
    spans.shutdown()
    assert lines[0]["trace_id"] == TRACE
    assert lines[0]["span_id"] == collector.spans["infer"].span_id.hex()


def test_a_collector_that_hangs_does_not_hold_the_end_up(
    collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    collector.silent.set()
    spans.configure(collector.url)
    traced({})
    spans.shutdown(0.3)
    assert not collector.closed.is_set()  # the collector has not answered yet
    assert "the collector did not take the last spans within 0.3 s" in caplog.text


@pytest.mark.parametrize("endpoint", ["localhost:4318", "grpc://localhost:4317", "http://", "nonsense", ""])
def test_an_endpoint_that_is_none(endpoint: str) -> None:
    with pytest.raises(SettingsError, match="is no URL of a collector, such as http://localhost:4318"):
        spans.configure(endpoint)


def test_an_endpoint_without_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SettingsError, match=f"{missing} is not installed: pip install opentelemetry-sdk"):
        spans.configure("http://localhost:4318")


def test_off_it_imports_nothing() -> None:
    program = """
import sys
from twinop.deploy.service import spans
spans.configure(None)
with spans.request_span("infer", {}):
    spans.note(request_id="r")
spans.shutdown()
print([name for name in sys.modules if name.startswith("opentelemetry")])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env={
        "PYTHONPATH": ":".join(sys.path)
    })  # fmt: skip
    assert done.stdout == "[]\n"
