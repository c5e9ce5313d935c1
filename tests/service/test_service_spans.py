"""OpenTelemetry spans of requests to a real server over HTTP and gRPC."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import service_models as models
from service_collector import PARENT, TRACE, Collector, attributes_of
from service_fixtures import Served, serve, tensor

from twinop.deploy.service.protocol import pb

ROW = tensor("x", "FP32", [1, 4], [-1, 2, -3, 4])
PARENTS = {"HTTP": TRACE, "gRPC": TRACE[::-1]}  # the client's trace for each protocol


@pytest.fixture
def collector() -> Iterator[Collector]:
    pytest.importorskip(
        "opentelemetry.exporter.otlp.proto.http.trace_exporter", reason="spans are sent by this exporter"
    )
    found = Collector()
    yield found
    found.close()


def metadata(protocol: str, number: str) -> dict[str, str]:
    return {"traceparent": f"00-{PARENTS[protocol]}-{PARENT}-01", "x-request-id": number}


def ask_over_both(served: Served, model: str) -> None:
    """Send a request over each protocol, with the id <protocol>-<model>."""
    served.ask(
        "POST", f"/v2/models/{model}/infer", {"inputs": [ROW]}, metadata("HTTP", f"HTTP-{model}")
    )  # fmt: skip
    request = pb.ModelInferRequest(model_name=model)
    request.inputs.add(name="x", datatype="FP32", shape=[1, 4]).contents.fp32_contents.extend(ROW["data"])
    with served.stub() as stub:
        call = stub.ModelInfer.future(
            request, metadata=tuple(metadata("gRPC", f"gRPC-{model}").items()), timeout=60
        )
        assert call.exception() is None or model == "nope"


def test_spans_of_http_and_grpc(tmp_path: Path, collector: Collector) -> None:
    models.place(tmp_path, "relu", models.relu(), version=3, settings="max_batch_size = 8")
    env = {"OTEL_SERVICE_NAME": "of-the-test", "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
    with serve(tmp_path, "--provider", "cpu", "--access-log", env=env) as served:
        for model in ("relu", "nope"):
            ask_over_both(served, model)
        assert served.stop() == 0  # sends the remaining spans

    assert set(collector.paths) == {"/v1/traces"}
    assert {each["service.name"] for each in collector.resources} == {"of-the-test"}
    spans: dict[str, Any] = {}
    for span in collector.received:
        spans.setdefault(span.trace_id.hex(), []).append(span)
    assert spans.keys() == set(PARENTS.values())
    for protocol, trace in PARENTS.items():
        requests = {
            told["twinop.request_id"]: (span, told)
            for span in spans[trace]
            if "twinop.request_id" in (told := attributes_of(span))
        }
        (answered, told), (failed, why) = (requests[f"{protocol}-{model}"] for model in ("relu", "nope"))
        for span in (answered, failed):
            assert span.parent_span_id.hex() == PARENT and span.kind == span.SPAN_KIND_SERVER
        assert (told["twinop.model"], told["twinop.version"], told["twinop.batch_size"]) == ("relu", 3, 1)
        assert answered.status.code == answered.status.STATUS_CODE_UNSET
        assert why["twinop.failure"] == "not_found"
        inner = {span.name: span for span in spans[trace] if span not in (answered, failed)}
        assert inner.keys() == {"queue", "compute"}
        for span in inner.values():
            assert span.parent_span_id == answered.span_id
            assert answered.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
            assert span.end_time_unix_nano <= answered.end_time_unix_nano
