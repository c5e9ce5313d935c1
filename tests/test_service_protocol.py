"""The Open Inference Protocol against the real server, by clients that others wrote and by hand."""

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import service_models as models
import service_triton
import tritonclient.http as triton_http
from service_fixtures import Served, receive, serve, split, tensor, wait_until

from twinop.deploy.service._kserve import pb, pb_grpc

DATATYPES = list(models.ELEMENTS)
NUMBERS = [name for name in DATATYPES if name != "BYTES"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("models")
    for datatype in DATATYPES:
        models.place(folder, f"id_{datatype.lower()}", models.identity(datatype))
    models.place(folder, "relu", models.relu())
    models.place(folder, "two_versions", models.relu())
    models.place(folder, "two_versions", models.identity("FP32"), 2, settings='versions = "all"')
    models.place(folder, "two_outputs", models.two_outputs())
    models.place(folder, "log", models.log())
    models.place(folder, "slow", models.slow(3000))
    with serve(folder, "--control", "explicit") as server:
        yield server


@pytest.fixture(scope="module")
def triton_grpc() -> Iterator[Callable[..., Any]]:
    with service_triton.triton_grpc() as call:
        yield call


@pytest.fixture(scope="module")
def stub(served: Served) -> Iterator[Any]:
    with grpc.insecure_channel(f"127.0.0.1:{served.grpc_port}") as channel:
        yield pb_grpc.GRPCInferenceServiceStub(channel)


def values(datatype: str, seed: int = 0) -> np.ndarray:
    """7 x 11 of any bits: NaN with payloads, infinities, -0, subnormals; strings of all kinds."""
    random = np.random.default_rng(seed)
    dtype = models.NUMPY[datatype]
    if datatype == "BYTES":
        texts = ["", "a", "zwei\n", "\0", "\N{SNOWMAN}", "\N{PILE OF POO}", '"quoted\\"']
        array = np.empty((7, 11), object)
        array[:] = random.choice(np.array(texts, object), (7, 11))
        return array
    if datatype == "BOOL":
        return random.integers(0, 2, (7, 11)).astype(bool)
    array = np.frombuffer(random.bytes(77 * dtype.itemsize), dtype).reshape(7, 11).copy()
    if array.dtype.kind not in "iu":
        array[0, :4] = [np.nan, np.inf, -np.inf, -0.0]
    return array


def finite(datatype: str) -> np.ndarray:
    array = values(datatype)
    with np.errstate(invalid="ignore"):
        return array if datatype == "BYTES" else np.where(np.isfinite(array), array, array.dtype.type(-0.0))


def raw(array: np.ndarray) -> bytes:
    """As the protocol sends it."""
    if array.dtype == object:
        texts = [text.encode() if isinstance(text, str) else text for text in array.ravel()]
        return b"".join(len(text).to_bytes(4, "little") + text for text in texts)
    return array.tobytes()


# -------------------------------------------------------------------------------- datatypes and clients


@pytest.mark.parametrize("is_binary", [True, False], ids=["binary", "json"])
@pytest.mark.parametrize("datatype", DATATYPES)
def test_tritonclient_http(served: Served, datatype: str, is_binary: bool) -> None:
    if not is_binary and datatype in ("FP16", "BF16"):
        pytest.skip("tritonclient sends these only as binary data")
    array = values(datatype) if is_binary else finite(datatype)
    with triton_http.InferenceServerClient(f"127.0.0.1:{served.http_port}") as client:
        given = triton_http.InferInput("x", list(array.shape), datatype)
        given.set_data_from_numpy(array, binary_data=is_binary)
        wanted = [triton_http.InferRequestedOutput("y", binary_data=is_binary)]
        result = client.infer(f"id_{datatype.lower()}", [given], outputs=wanted, request_id="7")
    answer = result.get_response()
    assert (answer["id"], answer["model_version"]) == ("7", "1")
    assert answer["outputs"][0]["datatype"] == datatype
    assert raw(result.as_numpy("y")) == raw(array)


@pytest.mark.parametrize("datatype", DATATYPES)
def test_tritonclient_grpc(served: Served, triton_grpc: Callable[..., Any], datatype: str) -> None:
    array = values(datatype)
    model = f"id_{datatype.lower()}"
    kind, output = triton_grpc(service_triton.echoed, served.grpc_port, model, datatype, array)
    assert kind == datatype and raw(output) == raw(array)


@pytest.mark.parametrize("datatype", DATATYPES)
def test_a_request_by_hand(served: Served, datatype: str) -> None:
    array = values(datatype)
    data = raw(array)
    header = json.dumps(
        {
            "inputs": [
                {
                    "name": "x",
                    "datatype": datatype,
                    "shape": [7, 11],
                    "parameters": {"binary_data_size": len(data)},
                }
            ],
            "outputs": [{"name": "y", "parameters": {"binary_data": True}}],
        }
    ).encode()
    head = (
        f"POST /v2/models/id_{datatype.lower()}/versions/1/infer HTTP/1.1\r\n"
        f"Host: here\r\nContent-Type: application/octet-stream\r\nConnection: close\r\n"
        f"Inference-Header-Content-Length: {len(header)}\r\nContent-Length: {len(header) + len(data)}\r\n\r\n"
    )
    answer = split(served.exchange(head.encode() + header + data))
    assert (answer.status, answer.headers["connection"]) == (200, "close")
    assert answer.headers["content-type"] == "application/octet-stream"
    length = int(answer.headers["inference-header-content-length"])
    assert answer.content[length:] == data
    assert json.loads(answer.content[:length]) == {
        "model_name": f"id_{datatype.lower()}",
        "model_version": "1",
        "outputs": [
            {
                "name": "y",
                "datatype": datatype,
                "shape": [7, 11],
                "parameters": {"binary_data_size": len(data)},
            }
        ],
    }


@pytest.mark.parametrize("datatype", DATATYPES)
def test_json(served: Served, datatype: str) -> None:
    array = finite(datatype)
    plain = array.astype(np.float32) if datatype in ("FP16", "BF16") else array
    answer = served.infer(f"id_{datatype.lower()}", tensor("x", datatype, [7, 11], plain.tolist()))
    output = answer.json["outputs"][0]
    assert (output["name"], output["datatype"], output["shape"]) == ("y", datatype, [7, 11])
    wide = np.float64 if datatype in ("FP16", "BF16") else array.dtype
    again = np.array(output["data"], wide)
    assert raw(again.astype(array.dtype)) == raw(array)


@pytest.mark.parametrize("datatype", DATATYPES)
def test_grpc_typed(stub: Any, datatype: str) -> None:
    array = finite(datatype)
    given: dict[str, Any] = {"name": "x", "datatype": datatype, "shape": [7, 11]}
    request = pb.ModelInferRequest(model_name=f"id_{datatype.lower()}", inputs=[given])
    field = {
        "FP32": "fp32",
        "FP64": "fp64",
        "BOOL": "bool",
        "BYTES": "bytes",
        "INT64": "int64",
        "UINT64": "uint64",
    }
    if datatype in ("FP16", "BF16"):
        request.raw_input_contents.append(raw(array))
    else:
        name = field.get(datatype, "uint" if datatype.startswith("U") else "int")
        items = [text.encode() for text in array.ravel()] if datatype == "BYTES" else array.ravel().tolist()
        getattr(request.inputs[0].contents, f"{name}_contents").extend(items)
    answer = stub.ModelInfer(request)
    if datatype in ("FP16", "BF16"):
        assert answer.raw_output_contents[0] == raw(array)
    else:
        assert answer.outputs[0].contents == request.inputs[0].contents


def test_curl(served: Served) -> None:
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    body = '{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [-1, 0, 1, 2.5]}]}'
    url = f"http://127.0.0.1:{served.http_port}/v2/models/relu/infer"
    for options in ((), ("--http1.0",), ("-H", "Expect: 100-continue")):
        command = ["curl", "-s", "--fail", *options, "--json", body, url]
        output = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=60).stdout)
        assert output["outputs"] == [
            {"name": "y", "datatype": "FP32", "shape": [1, 4], "data": [0, 0, 1, 2.5]}
        ]


@pytest.mark.parametrize("datatype", DATATYPES)
def test_curl_binary(served: Served, datatype: str, tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    data = raw(values(datatype))
    given = {
        "name": "x",
        "datatype": datatype,
        "shape": [7, 11],
        "parameters": {"binary_data_size": len(data)},
    }
    header = json.dumps({"inputs": [given], "parameters": {"binary_data_output": True}}).encode()
    (tmp_path / "body").write_bytes(header + data)
    command = [
        *("curl", "-s", "--fail", "-D", str(tmp_path / "head"), "--data-binary", f"@{tmp_path / 'body'}"),
        *("-H", "Content-Type: application/octet-stream"),
        *("-H", f"Inference-Header-Content-Length: {len(header)}"),
        f"http://127.0.0.1:{served.http_port}/v2/models/id_{datatype.lower()}/infer",
    ]
    answer = subprocess.run(command, check=True, capture_output=True, timeout=60).stdout
    lines = [line.partition(": ") for line in (tmp_path / "head").read_text().lower().splitlines()]
    length = int({name: value for name, _, value in lines}["inference-header-content-length"])
    output = json.loads(answer[:length])["outputs"][0]
    assert output == given | {"name": "y"}
    assert answer[length:] == data


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compressed_requests(served: Served, algorithm: str) -> None:
    array = values("FP32")
    with triton_http.InferenceServerClient(f"127.0.0.1:{served.http_port}") as client:
        given = triton_http.InferInput("x", list(array.shape), "FP32")
        given.set_data_from_numpy(array)
        result = client.infer("id_fp32", [given], request_compression_algorithm=algorithm)
    assert result.as_numpy("y").tobytes() == array.tobytes()


# -------------------------------------------------------------------------------- what can be asked for


def test_outputs_are_chosen_by_name_and_come_in_that_order(served: Served, stub: Any) -> None:
    x = tensor("x", "FP32", [1, 4], [-1, 0, 1, 2])
    both = served.infer("two_outputs", x).json["outputs"]
    assert [output["name"] for output in both] == ["positive", "sign"]
    turned = served.infer("two_outputs", x, outputs=[{"name": "sign"}, {"name": "positive"}]).json["outputs"]
    assert turned == [both[1], both[0]]
    one = served.infer("two_outputs", x, outputs=[{"name": "sign"}]).json["outputs"]
    assert one == [{"name": "sign", "datatype": "INT32", "shape": [1, 4], "data": [-1, 0, 1, 1]}]
    request = pb.ModelInferRequest(model_name="two_outputs", outputs=[{"name": "sign"}])
    request.inputs.add(name="x", datatype="FP32", shape=[1, 4]).contents.fp32_contents.extend([-1, 0, 1, 2])
    assert [list(each.contents.int_contents) for each in stub.ModelInfer(request).outputs] == [[-1, 0, 1, 1]]


def test_versions(served: Served, stub: Any) -> None:
    x = tensor("x", "FP32", [1, 4], [-1, 0, 1, 2])
    for version, expected in (("", -1), ("/versions/2", -1), ("/versions/1", 0)):
        answer = served.ask("POST", f"/v2/models/two_versions{version}/infer", {"inputs": [x]}).json
        assert answer["outputs"][0]["data"][0] == expected
        assert answer["model_version"] == ("1" if version.endswith("1") else "2")
    request = pb.ModelInferRequest(model_name="two_versions", model_version="1")
    request.inputs.add(name="x", datatype="FP32", shape=[1, 4]).contents.fp32_contents.extend([-1, 0, 1, 2])
    assert stub.ModelInfer(request).outputs[0].contents.fp32_contents[0] == 0
    assert served.ask("GET", "/v2/models/two_versions/versions/1/ready").json["ready"]
    metadata = served.ask("GET", "/v2/models/two_versions/versions/1").json
    assert metadata["versions"] == ["1", "2"]
    assert stub.ModelMetadata(pb.ModelMetadataRequest(name="two_versions")).versions == ["1", "2"]


def test_json_says_no_null_for_what_is_not_finite(served: Served) -> None:
    x = tensor("x", "FP32", [1, 4], [-1, 0, 1, 2])
    answer = served.infer("log", x)
    assert answer.status == 400
    assert "output y holds NaN or infinity" in answer.error and '"binary_data": true' in answer.error
    answer = served.infer("log", x, parameters={"binary_data_output": True})
    numbers = np.frombuffer(answer.content[-16:], np.float32)
    assert np.isnan(numbers[0]) and numbers[1] == -np.inf


def test_metadata(served: Served) -> None:
    metadata = served.ask("GET", "/v2/models/relu").json
    assert set(metadata) == {"name", "versions", "platform", "inputs", "outputs", "parameters"}
    assert (metadata["name"], metadata["versions"], metadata["platform"]) == (
        "relu",
        ["1"],
        "onnxruntime_onnx",
    )
    assert metadata["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]
    assert metadata["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [-1, 4]}]
    assert metadata["parameters"]["custom_nodes"] == "CustomRelu x1"
    assert served.ask("GET", "/v2").json["extensions"] == ["binary_tensor_data", "model_repository"]
    assert "relu" in served.ask("GET", "/v2/models").json["models"]


def test_a_model_s_life_over_http(served: Served) -> None:
    with triton_http.InferenceServerClient(f"127.0.0.1:{served.http_port}") as client:
        assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("relu", "1")
        index = {each["name"]: each for each in client.get_model_repository_index()}
        assert index["relu"] == {"name": "relu", "version": "1", "state": "READY", "reason": ""}
        client.unload_model("id_int8")
        assert not client.is_model_ready("id_int8")
        client.load_model("id_int8")
        assert client.is_model_ready("id_int8")


def test_a_model_s_life_over_grpc(served: Served, triton_grpc: Callable[..., Any]) -> None:
    seen = triton_grpc(service_triton.repository, served.grpc_port, "id_uint8")
    assert seen == {
        "extensions": ["binary_tensor_data", "model_repository"],
        "live": True,
        "ready": True,
        "model ready": (True, True),
        "metadata": ("onnxruntime_onnx", ["1"], [("x", "UINT8", [-1, -1])]),
        "unloaded": "StatusCode.NOT_FOUND",
        "index": ("1", "UNAVAILABLE", "not loaded"),
        "index of the ready": False,
        "loaded with parameters": (
            "StatusCode.INVALID_ARGUMENT",
            "a model is loaded from its folder as it is: parameters are not taken",
        ),
        "loaded": True,
        "index of the ready, loaded": True,
    }


# -------------------------------------------------------------------------------- ids, connections


def test_request_ids(served: Served, stub: Any) -> None:
    x = tensor("x", "FP32", [1, 4], [0, 0, 0, 0])
    path = "/v2/models/relu/infer"
    answer = served.ask("POST", path, {"inputs": [x], "id": "own"}, {"X-Request-Id": "header"})
    assert (answer.headers["x-request-id"], answer.json["id"]) == ("header", "own")
    assert served.infer("relu", x, id="own").headers["x-request-id"] == "own"
    fresh = served.infer("relu", x)
    assert len(fresh.headers["x-request-id"]) == 32 and "id" not in fresh.json
    odd = served.infer("relu", x, id="a\r\nset-cookie: b")  # must not end the header
    assert len(odd.headers["x-request-id"]) == 32 and "set-cookie" not in odd.headers
    assert served.ask("GET", "/nowhere", None, {"x-request-id": "lost"}).headers["x-request-id"] == "lost"
    request = pb.ModelInferRequest(model_name="relu", id="own")
    request.inputs.add(name="x", datatype="FP32", shape=[1, 4]).contents.fp32_contents.extend([0] * 4)
    for metadata, expected in (((), "own"), ((("x-request-id", "header"),), "header")):
        answer, call = stub.ModelInfer.with_call(request, metadata=metadata)
        assert dict(call.trailing_metadata())["x-request-id"] == expected
        assert answer.id == "own"
    request.ClearField("id")
    _, call = stub.ModelInfer.with_call(request)
    assert "x-request-id" not in dict(call.trailing_metadata())  # made here: only a failure tells it


def test_requests_may_follow_each_other_without_waiting(served: Served) -> None:
    body = json.dumps({"inputs": [tensor("x", "FP32", [1, 4], [1, 2, 3, 4])]})
    one = f"POST /v2/models/relu/infer HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    last = one.replace("Host: h", "Host: h\r\nConnection: close")
    answers = served.exchange((one * 20 + last).encode())
    assert answers.count(b"HTTP/1.1 200 OK") == 21 and answers.count(b'"data":[1.0,2.0,3.0,4.0]') == 21


def test_chunked_bodies(served: Served) -> None:
    body = json.dumps({"inputs": [tensor("x", "FP32", [1, 4], [1, 2, 3, 4])]}).encode()
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:5], body[5:30], body[30:]))
    head = b"POST /v2/models/relu/infer HTTP/1.1\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert split(served.exchange(head + chunks + b"0\r\n\r\n")).status == 200


# -------------------------------------------------------------------------------- clients that do not wait


def slow_request(**rest: Any) -> bytes:
    body = json.dumps({"inputs": [tensor("x", "FP32", [1, 4], [1, 2, 3, 4])], **rest})
    head = f"POST /v2/models/slow/infer HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n"
    return (head + body).encode()


def cancelled(served: Served) -> float:
    return served.metric("twinop_failures_total", model="slow", reason="cancelled")


def test_work_of_a_client_that_has_gone_is_dropped(served: Served) -> None:
    before, runs = cancelled(served), served.metric("twinop_compute_seconds_count", model="slow")
    with served.connect() as first:
        first.sendall(slow_request())
        time.sleep(0.05)
        for _ in range(5):  # these wait for the first
            with served.connect() as other:
                other.sendall(slow_request())
                time.sleep(0.02)
        wait_until(lambda: cancelled(served) == before + 5)
        assert receive(first).status == 200
        first.sendall(slow_request())  # is run behind what was not dropped
        assert receive(first).status == 200
    assert served.metric("twinop_compute_seconds_count", model="slow") == runs + 2


def test_work_that_a_client_has_sent_ahead_goes_with_it(served: Served) -> None:
    before, runs = cancelled(served), served.metric("twinop_compute_seconds_count", model="slow")
    with served.connect() as first:
        first.sendall(slow_request())
        time.sleep(0.05)
        for _ in range(3):
            with served.connect() as other:
                other.sendall(slow_request() * 2)  # the second is not begun before the first is answered
                time.sleep(0.02)
        wait_until(lambda: cancelled(served) == before + 3)
        assert receive(first).status == 200
    time.sleep(0.1)
    assert served.metric("twinop_compute_seconds_count", model="slow") == runs + 1


def test_a_client_with_a_large_request_that_has_gone_is_noticed(served: Served) -> None:
    before = cancelled(served)
    shape = [50_000, 4]
    body = json.dumps({"inputs": [tensor("x", "FP32", shape, [0] * 200_000)]}).encode()
    head = b"POST /v2/models/slow/infer HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % len(body)
    with served.connect() as first:
        first.sendall(slow_request())
        time.sleep(0.05)
        with served.connect() as other:
            other.sendall(head + body)
            time.sleep(0.1)
        wait_until(lambda: cancelled(served) == before + 1)
        assert receive(first).status == 200


def test_a_cancelled_grpc_call_is_dropped(served: Served, stub: Any) -> None:
    before, runs = cancelled(served), served.metric("twinop_compute_seconds_count", model="slow")
    request = pb.ModelInferRequest(model_name="slow")
    request.inputs.add(name="x", datatype="FP32", shape=[1, 4]).contents.fp32_contents.extend([0] * 4)
    first = stub.ModelInfer.future(request)
    time.sleep(0.05)
    others = [stub.ModelInfer.future(request) for _ in range(5)]
    time.sleep(0.05)
    for other in others:
        other.cancel()
    wait_until(lambda: cancelled(served) == before + 5)
    assert first.result(60).model_name == "slow"
    assert stub.ModelInfer(request).model_name == "slow"  # is run behind what was not dropped
    assert served.metric("twinop_compute_seconds_count", model="slow") == runs + 2


def test_deadlines(served: Served, stub: Any) -> None:
    request = pb.ModelInferRequest(model_name="slow")
    request.inputs.add(name="x", datatype="FP32", shape=[1, 4]).contents.fp32_contents.extend([0] * 4)
    first = stub.ModelInfer.future(request)
    time.sleep(0.05)
    answer = split(
        served.exchange(
            slow_request(parameters={"timeout": 20_000}).replace(b"Host: h", b"Connection: close")
        )
    )
    assert answer.status == 504 and "time was over" in answer.error
    with pytest.raises(grpc.RpcError) as error:
        stub.ModelInfer(request, timeout=0.02)
    assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    request.parameters["timeout"].int64_param = 20_000
    with pytest.raises(grpc.RpcError) as error:
        stub.ModelInfer(request)
    assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert first.result(60).model_name == "slow"
