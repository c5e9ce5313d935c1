"""One budget for the bytes of all requests, and limits on connections and calls."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import grpc
import onnx
import pytest
import service_models as models
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub
from service_fixtures import Answer, Served, serve, tensor, wait_until
from tritonclient.grpc import service_pb2 as pb

from twinop.deploy.service.codec_grpc import SERVICE
from twinop.deploy.service.errors import OVER_BUDGET, ServiceError
from twinop.deploy.service.request import Budget, RequestMemory
from twinop.deploy.service.settings import ServerSettings

MIB = 1 << 20
X = tensor("x", "FP32", [1, 4], [-1, 0, 1, 2])


def largest() -> onnx.ModelProto:
    """Return a model with large inputs and a small output."""
    return onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 18]> g (float[N] x) => (float[1] y) { y = ReduceMax(x) }'
    )


# -------------------------------------------------------------------------------- counting


def test_a_request_gives_back_what_it_took() -> None:
    budget = Budget(100 * MIB)
    with RequestMemory(budget, 50 * MIB) as one, RequestMemory(budget, 40 * MIB) as other:
        one.reserve(50 * MIB)
        other.reserve(30 * MIB)
        with pytest.raises(
            ServiceError, match=r"hold 83886080 of 104857600 bytes \(max_bytes_in_flight\)"
        ) as error:
            other.reserve(10 * MIB)
        assert error.value.failure is OVER_BUDGET and error.value.headers == {"Retry-After": "1"}
        one.reserve(-20 * MIB)
        other.reserve(10 * MIB)
        assert budget.used == 70 * MIB
    assert budget.used == 0


def test_an_eighth_is_kept_for_small_requests() -> None:
    budget = Budget(80 * MIB)
    with (
        RequestMemory(budget, 70 * MIB) as large,
        RequestMemory(budget, 70 * MIB) as other,
        RequestMemory(budget, 100) as small,
    ):
        large.reserve(70 * MIB)
        with pytest.raises(ServiceError):
            other.reserve(1)  # it announced more
        small.reserve(100)
        with pytest.raises(ServiceError):
            small.reserve(1 * MIB)  # no longer small


# -------------------------------------------------------------------------------- many and slow ones


def over_http(served: Served, size: int) -> str:
    """Send a binary request for `largest`; return "ok", or the error."""
    given = {"name": "x", "datatype": "FP32", "shape": [size // 4], "parameters": {"binary_data_size": size}}
    head = json.dumps({"inputs": [given], "parameters": {"binary_data_output": True}}).encode()
    length = {"inference-header-content-length": str(len(head))}
    answer: Answer = served.ask("POST", "/v2/models/largest/infer", head + bytes(size), length)
    if answer.status == 200:
        assert answer.content.endswith(bytes(4))
        return "ok"
    assert answer.status == 503 and answer.headers["retry-after"] == "1"
    return answer.error


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with room for four messages of the largest size, which waits 2 s for each."""
    folder = tmp_path_factory.mktemp("models")
    models.place(folder, "largest", largest())
    models.place(folder, "relu", models.relu())
    (folder / "twinop.toml").write_text(
        f"[server]\nmax_bytes_in_flight = {8 * MIB}\nmax_request_bytes = {2 * MIB}\nbody_seconds = 2\n"
        "limit_concurrency = 50\n"
    )
    with serve(folder, "--provider", "cpu") as served:
        yield served


def test_slow_bodies_give_their_bytes_back(small: Served) -> None:
    head = b"POST /v2/models/largest/infer HTTP/1.1\r\nContent-Length: %d\r\n"
    head += b"Inference-Header-Content-Length: 9\r\n\r\n"
    connections: list[socket.socket] = []

    def is_refused() -> bool:
        """Each holds its bytes for 2 s, in which a busy machine may send few of them."""
        connections.append(small.connect(60))
        connections[-1].sendall(head % (2 * MIB) + bytes(MIB))
        return "(max_bytes_in_flight)" in over_http(small, MIB)

    wait_until(is_refused, 60)
    assert small.infer("relu", X).status == 200
    wait_until(lambda: over_http(small, MIB) == "ok", 60)
    statuses = [connection.recv(1000).split()[1] for connection in connections]
    assert b"408" in statuses and {*statuses} <= {b"408", b"503"}
    for connection in connections:
        connection.close()


def test_more_connections_than_allowed(small: Served) -> None:
    connections = [small.connect() for _ in range(60)]
    refused = small.ask("GET", "/v2/health/live")
    assert refused.status == 503
    for connection in connections:
        connection.close()
    wait_until(lambda: small.ask("GET", "/v2/health/live").status == 200)


def test_a_grpc_message_that_does_not_arrive(small: Served) -> None:
    """Others are answered meanwhile."""
    end = threading.Event()

    def nothing() -> Iterator[bytes]:
        end.wait(60)
        yield from ()

    with grpc.insecure_channel(f"127.0.0.1:{small.grpc_port}") as channel:
        silent = channel.stream_unary(f"/{SERVICE}/ModelInfer").future(nothing())
        assert small.infer("relu", X).status == 200
        error = silent.exception(60)
        end.set()
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "did not arrive within 2 s (body_seconds)" in error.details()


def test_more_calls_than_allowed(small: Served) -> None:
    """Calls of Watch stay open until the client ends them."""
    with grpc.insecure_channel(f"127.0.0.1:{small.grpc_port}") as channel:
        health = HealthStub(channel)
        most = ServerSettings().maximum_concurrent_rpcs
        calls = [health.Watch(HealthCheckRequest(), timeout=60) for _ in range(most)]
        for call in calls:
            next(call)  # each was accepted
        with pytest.raises(grpc.RpcError) as error:
            health.Check(HealthCheckRequest())
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for call in calls:
            call.cancel()

    def is_allowed() -> bool:
        with small.stub() as stub, suppress(grpc.RpcError):
            return bool(stub.ServerLive(pb.ServerLiveRequest()).live)
        return False

    wait_until(is_allowed)
