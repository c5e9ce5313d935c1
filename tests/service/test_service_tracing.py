"""Spans of requests over HTTP and gRPC, which OpenTelemetry's own program makes around the service."""

import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import service_models as models
from service_fixtures import serve
from service_rows import QUICK, ROW, message

pytest.importorskip("opentelemetry.instrumentation.starlette", reason="opentelemetry-instrument uses it")

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def collector() -> Iterator[tuple[str, list[Any]]]:
    """The address of an OTLP/HTTP collector, and the spans that it has received."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    spans: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = ExportTraceServiceRequest.FromString(
                self.rfile.read(int(self.headers["content-length"]))
            )
            spans.extend(
                span
                for resource in request.resource_spans
                for scope in resource.scope_spans
                for span in scope.spans
            )
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", spans
    server.shutdown()
    server.server_close()


def test_requests_have_spans_of_their_clients_traces(
    tmp_path: Path, collector: tuple[str, list[Any]]
) -> None:
    models.place(tmp_path, "relu", models.relu())
    address, spans = collector
    env = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": address,
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        "OTEL_METRICS_EXPORTER": "none",
        "OTEL_LOGS_EXPORTER": "none",
        "OTEL_PYTHON_EXCLUDED_URLS": "v2/health,metrics",
    }
    python, program = (
        Path(sys.executable).with_name("opentelemetry-instrument"),
        (sys.executable, "-m", "twinop"),
    )
    with serve(tmp_path, *QUICK, env=env, python=python, program=program) as served:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        body = {"inputs": [ROW]}
        assert served.ask("POST", "/v2/models/relu/infer", body, headers).status == 200
        with served.stub() as stub:
            other = {"traceparent": f"00-{TRACE[::-1]}-{PARENT}-01"}
            assert stub.ModelInfer(message("relu", -1, 2, -3, 4), metadata=tuple(other.items())).outputs
        assert served.ask("GET", "/v2/health/live").status == 200
        assert served.stop() == 0  # sends the remaining spans
    ours = [span for span in spans if span.kind == span.SPAN_KIND_SERVER]
    assert {span.trace_id.hex() for span in ours} == {TRACE, TRACE[::-1]}
    assert all(span.parent_span_id.hex() == PARENT for span in ours)
