"""One budget for the bytes of all requests: many large ones at once, over HTTP and gRPC."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import onnx
import pytest
import service_models as models
from service_fixtures import Answer, Served, serve, tensor, wait_until
from service_raw import answers_well

from twinop.deploy.service.budget import Budget
from twinop.deploy.service.errors import OVER_BUDGET, ServiceError
from twinop.deploy.service.protocol import SERVICE, pb

MIB = 1 << 20
Send = Callable[[Served, int], str]
X = tensor("x", "FP32", [1, 4], [-1, 0, 1, 2])


def largest() -> onnx.ModelProto:
    """Return a model with large inputs and a small output."""
    return onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 18]> g (float[N] x) => (float[1] y) { y = ReduceMax(x) }'
    )


# -------------------------------------------------------------------------------- counting


def test_a_request_gives_back_what_it_took() -> None:
    budget = Budget(100 * MIB)
    with budget.request(50 * MIB) as one, budget.request(40 * MIB) as other:
        one.take(50 * MIB)
        other.take(30 * MIB)
        with pytest.raises(
            ServiceError, match=r"hold 83886080 of 104857600 bytes \(max_bytes_in_flight\)"
        ) as error:
            other.take(10 * MIB)
        assert error.value.failure is OVER_BUDGET and error.value.headers == {"Retry-After": "1"}
        one.take(-20 * MIB)
        other.take(10 * MIB)
        assert budget.used == 70 * MIB
    assert budget.used == 0


def test_an_eighth_is_kept_for_small_requests() -> None:
    budget = Budget(80 * MIB)
    with budget.request(70 * MIB) as large, budget.request(70 * MIB) as other, budget.request(100) as small:
        large.take(70 * MIB)
        with pytest.raises(ServiceError):
            other.take(1)  # it announced more
        small.take(100)
        with pytest.raises(ServiceError):
            small.take(1 * MIB)  # no longer small


# -------------------------------------------------------------------------------- many clients


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


def over_grpc(served: Served, size: int) -> str:
    request = pb.ModelInferRequest(model_name="largest", raw_input_contents=[bytes(size)])
    request.inputs.add(name="x", datatype="FP32", shape=[size // 4])
    options = (("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1))
    with grpc.insecure_channel(f"127.0.0.1:{served.grpc_port}", options) as channel:
        try:
            call = channel.unary_unary(f"/{SERVICE}/ModelInfer", pb.ModelInferRequest.SerializeToString)
            assert call(request, timeout=300)
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            return str(error.details())
    return "ok"


def flood(
    folder: Path, send: Send, clients: int, size: int, budget: int, most: int | None, threads: int
) -> None:
    """Send large requests of many clients at once. Small ones are answered meanwhile."""
    models.place(folder, "largest", largest())
    models.place(folder, "relu", models.relu())
    (folder / "twinop.toml").write_text(
        f"[server]\nmax_bytes_in_flight = {budget}\nmax_request_bytes = {2 * size}\n"
    )
    with serve(folder, "--provider", "cpu") as served:
        answers_well(served)
        assert send(served, size) == "ok"  # what is allocated only once
        before, peak, done = served.memory, 0, threading.Event()

        def watch() -> None:
            nonlocal peak
            while not done.is_set():
                peak = max(peak, served.memory)
                time.sleep(0.01)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            with ThreadPoolExecutor(threads) as pool:
                outcomes = pool.map(lambda _: send(served, size), range(clients))
                answers_well(served, 30)
        finally:
            done.set()
            watcher.join()
        said = list(outcomes)
        assert said.count("ok") > 0 and len(said) == clients
        assert all(each == "ok" or "(max_bytes_in_flight)" in each for each in said)
        print(f"{said.count('ok')} of {clients} answered; {(peak - before) / MIB:.0f} MiB more memory")
        assert most is None or peak - before < most
        wait_until(lambda: send(served, size) == "ok")  # all bytes were given back
        assert [line for line in served.log if "traceback" in line] == []


def test_many_large_requests_over_http(tmp_path: Path) -> None:
    flood(tmp_path, over_http, clients=200, size=8 * MIB, budget=64 * MIB, most=128 * MIB, threads=40)


def test_many_large_requests_over_grpc(tmp_path: Path) -> None:
    """The process's memory is not compared: gRPC and the allocator keep several times the budget."""
    flood(tmp_path, over_grpc, clients=200, size=8 * MIB, budget=64 * MIB, most=None, threads=40)


# -------------------------------------------------------------------------------- slow ones


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Served]:
    """A server with room for four messages of the largest size, which waits 2 s for each."""
    models.place(tmp_path, "largest", largest())
    models.place(tmp_path, "relu", models.relu())
    (tmp_path / "twinop.toml").write_text(
        f"[server]\nmax_bytes_in_flight = {8 * MIB}\nmax_request_bytes = {2 * MIB}\nbody_seconds = 2\n"
        "limit_concurrency = 50\nmaximum_concurrent_rpcs = 20\n"
    )
    with serve(tmp_path, "--provider", "cpu") as served:
        yield served


def test_slow_bodies_give_their_bytes_back(small: Served) -> None:
    head = b"POST /v2/models/largest/infer HTTP/1.1\r\nContent-Length: %d\r\n"
    head += b"Inference-Header-Content-Length: 9\r\n\r\n"
    connections = [small.connect() for _ in range(8)]
    for connection in connections:
        connection.sendall(head % (2 * MIB) + bytes(MIB))
    wait_until(lambda: "(max_bytes_in_flight)" in over_http(small, MIB), 2)
    assert small.infer("relu", X).status == 200
    wait_until(lambda: over_http(small, MIB) == "ok")
    statuses = {connection.recv(1000).split()[1] for connection in connections}
    assert statuses == {b"408", b"503"}
    for connection in connections:
        connection.close()


def test_more_connections_than_allowed(small: Served) -> None:
    connections = [small.connect() for _ in range(60)]
    refused = small.ask("GET", "/v2/health/live")
    assert refused.status == 503
    for connection in connections:
        connection.close()
    wait_until(lambda: small.ask("GET", "/v2/health/live").status == 200)
