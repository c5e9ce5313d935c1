"""The Open Inference Protocol against the real server, also with Triton's clients."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import service_models as models
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from service_codecs import raw, values
from service_fixtures import Served, split, tensor, wait_until
from service_rows import ROW, in_flight, message
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import InferenceServerException


def test_outputs_are_chosen_by_name_and_come_in_that_order(served: Served, stub: Any) -> None:
    x = tensor("x", "FP32", [1, 4], [-1, 0, 1, 2])
    both = served.infer("two_outputs", x).json["outputs"]
    assert [output["name"] for output in both] == ["positive", "sign"]
    turned = served.infer("two_outputs", x, outputs=[{"name": "sign"}, {"name": "positive"}]).json["outputs"]
    assert turned == [both[1], both[0]]
    one = served.infer("two_outputs", x, outputs=[{"name": "sign"}]).json["outputs"]
    assert one == [{"name": "sign", "datatype": "INT32", "shape": [1, 4], "data": [-1, 0, 1, 1]}]
    request = message("two_outputs", -1, 0, 1, 2, outputs=[{"name": "sign"}])
    assert [list(each.contents.int_contents) for each in stub.ModelInfer(request).outputs] == [[-1, 0, 1, 1]]


def test_versions(served: Served, stub: Any) -> None:
    x = tensor("x", "FP32", [1, 4], [-1, 0, 1, 2])
    for version, expected in (("", -1), ("/versions/2", -1), ("/versions/1", 0)):
        answer = served.ask("POST", f"/v2/models/two_versions{version}/infer", {"inputs": [x]}).json
        assert answer["outputs"][0]["data"][0] == expected
        assert answer["model_version"] == ("1" if version.endswith("1") else "2")
    answer = served.ask("POST", "/v2/models/two_versions/versions/3/infer", {"inputs": [x]})
    assert answer.status == 404 and "it has: 1, 2" in answer.error
    request = message("two_versions", -1, 0, 1, 2, model_version="1")
    assert stub.ModelInfer(request).outputs[0].contents.fp32_contents[0] == 0
    assert served.ask("GET", "/v2/models/two_versions/versions/1/ready").json["ready"]
    metadata = served.ask("GET", "/v2/models/two_versions/versions/1").json
    assert metadata["versions"] == ["1", "2"]
    assert stub.ModelMetadata(pb.ModelMetadataRequest(name="two_versions")).versions == ["1", "2"]


def test_metadata(served: Served) -> None:
    metadata = served.ask("GET", "/v2/models/relu").json
    assert set(metadata) == {"name", "versions", "platform", "inputs", "outputs", "parameters"}
    assert (metadata["name"], metadata["versions"]) == ("relu", ["1"])
    assert metadata["platform"] == "onnxruntime_onnx"
    assert metadata["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]
    assert metadata["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [-1, 4]}]
    assert metadata["parameters"]["custom_nodes"] == "CustomRelu x1"
    assert served.ask("GET", "/v2").json["extensions"] == ["binary_tensor_data"]
    assert "relu" in served.ask("GET", "/v2/models").json["models"]


def test_request_ids(served: Served, stub: Any) -> None:
    x = tensor("x", "FP32", [1, 4], [0, 0, 0, 0])
    path = "/v2/models/relu/infer"
    answer = served.ask("POST", path, {"inputs": [x], "id": "own"}, {"X-Request-Id": "header"})
    assert (answer.headers["x-request-id"], answer.json["id"]) == ("header", "own")
    fresh = served.infer("relu", x)
    assert len(fresh.headers["x-request-id"]) == 32 and "id" not in fresh.json
    odd = served.ask("POST", path, {"inputs": [x]}, {"X-Request-Id": "a b"})
    assert len(odd.headers["x-request-id"]) == 32
    assert served.ask("GET", "/nowhere", None, {"x-request-id": "lost"}).headers["x-request-id"] == "lost"
    request = message("relu", id="own")
    answer, call = stub.ModelInfer.with_call(request, metadata=(("x-request-id", "header"),))
    assert dict(call.trailing_metadata())["x-request-id"] == "header" and answer.id == "own"
    request.ClearField("id")
    _, call = stub.ModelInfer.with_call(request)
    assert "x-request-id" not in dict(call.trailing_metadata())  # generated ids are sent with failures only


def test_chunked_bodies(served: Served) -> None:
    body = json.dumps({"inputs": [tensor("x", "FP32", [1, 4], [1, 2, 3, 4])]}).encode()
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:5], body[5:30], body[30:]))
    head = b"POST /v2/models/relu/infer HTTP/1.1\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert split(served.exchange(head + chunks + b"0\r\n\r\n")).status == 200


def test_a_full_queue_says_when_to_come_back(served: Served, stub: Any, held_file: Path) -> None:
    assert served.ask("GET", "/v2/models/full").json["parameters"]["instances"] == 2
    held_file.touch()
    with ThreadPoolExecutor() as pool:
        waiting = []
        for number in (1, 2, 3):
            waiting.append(pool.submit(served.infer, "full", ROW))
            wait_until(partial(in_flight, served, number, "full"))
            assert served.metric("twinop_queued", model="full") == max(number - 2, 0)
        full = served.infer("full", ROW)  # two requests run and one waits
        assert full.status == 429 and "requests waiting" in full.error
        assert int(full.headers["retry-after"]) >= 1
        with pytest.raises(grpc.RpcError) as error:
            stub.ModelInfer(message("full"))
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.value.details() == full.error
        assert int(dict(error.value.trailing_metadata())["retry-after"]) >= 1
        assert served.metric("twinop_failures_total", model="full", reason="overloaded") == 2
        held_file.unlink()
    assert [each.result().status for each in waiting] == [200] * 3


@pytest.fixture
def release(served: Served, stub: Any, held_file: Path) -> Iterator[Callable[[], None]]:
    """The model `held` runs one request until this is called. Later ones wait behind it."""
    held_file.touch()
    first = stub.ModelInfer.future(message("held"))
    wait_until(lambda: in_flight(served, 1, "held"))

    def release() -> None:
        held_file.unlink(missing_ok=True)
        assert first.result(60).model_name == "held"

    yield release
    release()


def http_request(rows: int) -> bytes:
    body = json.dumps({"inputs": [tensor("x", "FP32", [rows, 4], [0] * 4 * rows)]})
    head = f"POST /v2/models/held/infer HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n"
    return (head + body).encode()


@pytest.mark.parametrize("kind", ["HTTP", "large, HTTP", "gRPC"])
def test_work_of_clients_that_left_is_dropped(served: Served, stub: Any, release: Any, kind: str) -> None:
    def counts() -> tuple[float, float]:
        cancelled = served.metric("twinop_failures_total", model="held", reason="cancelled")
        return cancelled, served.metric("twinop_compute_seconds_count", model="held")

    before, runs = counts()
    with ExitStack() as stack:
        for _ in range(5):
            if kind == "gRPC":
                stack.callback(stub.ModelInfer.future(message("held")).cancel)
            else:
                rows = 50_000 if kind.startswith("large") else 1
                stack.enter_context(served.connect()).sendall(http_request(rows))
        wait_until(lambda: in_flight(served, 6, "held"))
    wait_until(lambda: counts() == (before + 5, runs))
    release()
    assert stub.ModelInfer(message("held")).outputs  # runs after all requests that were not dropped
    assert counts() == (before + 5, runs + 2)


def test_deadlines(served: Served, stub: Any, release: Callable[[], None]) -> None:
    answer = served.infer("held", ROW, parameters={"timeout": 20_000})
    assert answer.status == 504 and "time was over" in answer.error
    assert served.metric("twinop_failures_total", model="held", reason="deadline") == 1
    limited = message("held")
    limited.parameters["timeout"].int64_param = 20_000
    for request, seconds in ((message("held"), 0.02), (limited, 60)):
        with pytest.raises(grpc.RpcError) as error:
            stub.ModelInfer(request, timeout=seconds)
        assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


DATATYPES = list(models.ELEMENTS)


@pytest.fixture(scope="module", params=["http", "grpc"])
def client(served: Served, request: pytest.FixtureRequest) -> Iterator[Any]:
    kinds = {"http": (triton_http, served.http_port), "grpc": (triton_grpc, served.grpc_port)}
    kind, port = kinds[request.param]
    with kind.InferenceServerClient(f"127.0.0.1:{port}") as found:
        yield found


def echoed(client: Any, datatype: str, array: np.ndarray, **options: Any) -> np.ndarray:
    """Return y of the identity model of the datatype."""
    kind = triton_http if isinstance(client, triton_http.InferenceServerClient) else triton_grpc
    given = kind.InferInput("x", list(array.shape), datatype)
    given.set_data_from_numpy(array, **options)
    wanted = [kind.InferRequestedOutput("y", **options)]
    result = client.infer(f"id_{datatype.lower()}", [given], outputs=wanted, request_id="7")
    answer = result.get_response(as_json=True) if kind is triton_grpc else result.get_response()
    assert answer["id"] == "7" and answer["outputs"][0]["datatype"] == datatype
    found: np.ndarray = result.as_numpy("y")
    return found


@pytest.mark.parametrize("datatype", DATATYPES)
def test_tritonclient(client: Any, datatype: str) -> None:
    array = values(datatype, 7, 11)
    assert raw(echoed(client, datatype, array)) == raw(array)


def test_health_and_the_list_of_models(client: Any, served: Served) -> None:
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("relu", "1")
    listed = client.get_model_repository_index()
    entries = (
        [(each.name, each.state) for each in listed.models]
        if hasattr(listed, "models")
        else [(each["name"], each["state"]) for each in listed]
    )
    states = dict(entries)
    assert states.pop("broken") == "UNAVAILABLE" and set(states.values()) == {"READY"}
    ready = served.ask("GET", "/v2/health/ready")
    assert ready.status == 200 and ready.json == {"ready": True, "unavailable": ["broken"]}
    assert served.ask("GET", "/v2/models/broken/ready").status == 503
    assert {*states, "broken"} == {path.name for path in served.root.iterdir() if path.is_dir()}
    with pytest.raises(InferenceServerException):
        client.unload_model("relu")
    assert client.is_model_ready("relu")
