"""Bad input gets a precise answer and disturbs nothing else; expensive requests are refused early."""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import grpc
import numpy as np
import pytest
from service_fixtures import Answer, Served, receive, tensor
from service_rows import LIMIT, binary, message, refused
from tritonclient.grpc import service_pb2 as pb

from twinop.deploy.service.codec_grpc import SERVICE

CODES = grpc.StatusCode
INVALID = CODES.INVALID_ARGUMENT
GOOD = tensor("x", "FP32", [1, 4], [-1, 0, 1, 2])


@pytest.fixture(autouse=True)
def _it_goes_on(served: Served) -> Iterator[None]:
    """Check that the server still answers after the test, and logged no unexpected error."""
    logged = len(served.log)
    yield
    answer = served.infer("relu", GOOD)
    assert answer.status == 200 and answer.json["outputs"][0]["data"] == [0, 0, 1, 2]
    assert [line for line in served.log[logged:] if "traceback" in line] == []


class Misfit(NamedTuple):
    """A request that does not fit the model, and a part of the message."""

    message: str
    inputs: list[dict[str, Any]]
    model: str = "relu"
    status: int = 400
    code: grpc.StatusCode = INVALID
    outputs: tuple[str, ...] = ()


def of_shape(*shape: int, data: list[Any] | None = None, datatype: str = "FP32") -> list[dict[str, Any]]:
    return [tensor("x", datatype, list(shape), [1, 2, 3, 4] if data is None else data)]


Z = GOOD | {"name": "z"}
NOT_FITTING = {
    "unknown model": Misfit("no model 'nope'; models: add, batched", [GOOD], "nope", 404, CODES.NOT_FOUND),
    "path for a model": Misfit("no model '..'", [GOOD], "..", 404, CODES.NOT_FOUND),
    "unknown input": Misfit("the model has no input 'z'; its inputs: x", [GOOD, Z]),
    "unknown output": Misfit("the model has no output 'z'; its outputs: y", [GOOD], outputs=("z",)),
    "padding": Misfit("input x, row 0: expected ones, then", of_shape(1, 4, data=[0, 1, 1, 0]), "padded"),
    "input missing": Misfit("input missing: b (FP32[N, 4]); given: a", [GOOD | {"name": "a"}], "add"),
    "no input": Misfit("input missing: a (FP32[N, 4]), b (FP32[N, 4]); given: none", [], "add"),
    "text for numbers": Misfit(
        "input x is BYTES[1, 4], the model takes FP32[N, 4]: convert it to FP32",
        of_shape(1, 4, data=["1", "2", "3", "4"], datatype="BYTES"),
    ),
    "rank": Misfit("input x is FP32[4], the model takes FP32[N, 4]: it must have 2 dimensions", of_shape(4)),
    "fixed dimension": Misfit("takes FP32[N, 4]: dimension 1 must be 4", of_shape(1, 3, data=[1, 2, 3])),
    "empty batch": Misfit("input x is empty: its shape is [0, 4]", of_shape(0, 4, data=[])),
    "data too short": Misfit("shape [1, 4] has 4", of_shape(1, 4, data=[1, 2, 3])),
    "unknown datatype": Misfit("datatype 'FLOAT' is not one of", of_shape(1, 4, datatype="FLOAT")),
    "batch too large": Misfit("5 rows in one request", of_shape(5, 4, data=[0] * 20), "batched"),
}


@pytest.mark.parametrize("case", NOT_FITTING.values(), ids=NOT_FITTING)
def test_not_fitting(served: Served, stub: Any, case: Misfit) -> None:
    outputs = [{"name": name} for name in case.outputs]
    answer = served.infer(case.model, *case.inputs, outputs=outputs)
    assert answer.status == case.status and case.message in answer.error
    assert answer.headers["x-request-id"]
    request = pb.ModelInferRequest(model_name=case.model, outputs=outputs)
    for each in case.inputs:
        given = request.inputs.add(name=each["name"], datatype=each["datatype"], shape=each["shape"])
        if each["datatype"] == "BYTES":
            given.contents.bytes_contents.extend(text.encode() for text in each["data"])
        else:
            given.contents.fp32_contents.extend(each["data"])
    found, details = refused(stub, request)
    assert found is case.code and case.message in details


@pytest.mark.parametrize("version", ["2", "x"])
def test_unknown_version(served: Served, stub: Any, version: str) -> None:
    answer = served.ask("POST", f"/v2/models/relu/versions/{version}/infer", {"inputs": [GOOD]})
    assert answer.status == 404 and "model relu has no version" in answer.error
    for what in ("", "/ready"):
        assert served.ask("GET", f"/v2/models/relu/versions/{version}{what}").status == 404
    code, details = refused(stub, pb.ModelInferRequest(model_name="relu", model_version=version))
    assert code is CODES.NOT_FOUND and "model relu has no version" in details
    with pytest.raises(grpc.RpcError) as error:
        stub.ModelReady(pb.ModelReadyRequest(name="relu", version=version))
    assert error.value.code() is CODES.NOT_FOUND


def post(served: Served, body: bytes, model: str = "relu", **headers: str) -> Answer:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return served.ask("POST", f"/v2/models/{model}/infer", body, names)


BODIES: dict[str, tuple[bytes, dict[str, str], int, str]] = {
    "compressed": (b"{}", {"Content_Encoding": "gzip"}, 415, "encoding 'gzip': send the body as it is"),
    "too large": (bytes(LIMIT + 1), {"Inference_Header_Content_Length": "2"}, 413, "(max_request_bytes)"),
}


@pytest.mark.parametrize(("body", "headers", "status", "said"), BODIES.values(), ids=BODIES)
def test_no_request(served: Served, body: bytes, headers: dict[str, str], status: int, said: str) -> None:
    answer = post(served, body, **headers)
    assert answer.status == status and said in answer.error


def test_too_large_in_chunks(served: Served) -> None:
    head = b"POST /v2/models/relu/infer HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n"
    head += b"Inference-Header-Content-Length: 2\r\n\r\n"
    chunk = b"10000\r\n" + bytes(0x10000) + b"\r\n"
    with served.connect() as connection:
        connection.sendall(head + chunk * (LIMIT // 0x10000 + 1))
        answer = receive(connection)
        assert answer.status == 413 and "(max_request_bytes)" in answer.error
        connection.sendall(chunk + b"0\r\n\r\nGET /v2/health/live HTTP/1.1\r\nHost: h\r\n\r\n")
        assert receive(connection).status == 200  # the rest was read, and the connection stays open


def test_a_large_body_is_not_asked_for(served: Served) -> None:
    head = b"POST /v2/models/relu/infer HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 999999999\r\n\r\n"
    with served.connect() as connection:
        connection.sendall(head)
        assert receive(connection).status == 413


def test_too_large_over_grpc(served: Served, stub: Any) -> None:
    request = pb.ModelInferRequest(model_name="relu", raw_input_contents=[bytes(LIMIT + 1)])
    request.inputs.add(name="x", datatype="FP32", shape=[LIMIT // 16, 4])
    with pytest.raises(grpc.RpcError) as error:
        stub.ModelInfer(request)
    assert error.value.code() is CODES.RESOURCE_EXHAUSTED and "larger than max" in error.value.details()


@pytest.mark.parametrize("method", ["ModelInfer", "ModelMetadata"])
def test_no_message_over_grpc(served: Served, stub: Any, method: str) -> None:
    before = served.metric("twinop_failures_total", reason="invalid")
    address = f"127.0.0.1:{served.grpc_port}"
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as error:
        channel.unary_unary(f"/inference.GRPCInferenceService/{method}")(b"\xff" * 40, timeout=60)
    assert error.value.code() is INVALID and "not a protobuf message" in error.value.details()
    assert dict(error.value.trailing_metadata())["x-request-id"]
    assert served.metric("twinop_failures_total", reason="invalid") == before + 1


LONG_NAMES = {"ASCII": "a" * 20_000, "other": "\N{PILE OF POO}" * 20_000}


@pytest.mark.parametrize("name", LONG_NAMES.values(), ids=LONG_NAMES)
def test_long_names_are_quoted_in_short(served: Served, stub: Any, name: str) -> None:
    """gRPC clients accept at most 8 KiB of metadata, in which the message is percent-encoded."""
    answer = served.infer("relu", GOOD | {"name": name})
    assert answer.status == 400 and len(answer.content) < 4000
    assert answer.error.startswith(f"the model has no input '{name[:100]}")
    assert answer.error.endswith("its inputs: x")
    request = message("relu", name=name)
    assert refused(stub, request) == (INVALID, answer.error)
    request.model_name = name
    code, said = refused(stub, request)
    assert code is CODES.NOT_FOUND and said.startswith("there is no model ") and len(said) < 4000


def test_wrong_routes_and_methods(served: Served) -> None:
    answer = served.ask("GET", "/v2/models/relu/infer")
    assert answer.status == 405 and answer.headers["allow"] == "POST" and "takes POST" in answer.error
    for path in ("/nowhere", "/v2/models/relu/infer/", "/docs", "//"):
        answer = served.ask("GET", path)
        assert answer.status == 404 and "the protocol is below /v2" in answer.error
    assert served.ask("POST", "/v2/models/relu", {}).status == 405
    assert served.ask("BREW", "/v2").status in (400, 405)
    for path in ("/v2/models/..%2f..%2fetc%2fpasswd", "/v2/models/%00", "/v2/models/%ff/infer"):
        assert served.ask("GET", path).status in (404, 405)


TENSORS = 20_000
JSON_LIMIT = 2 << 20  # max_json_bytes
LENGTH = "inference-header-content-length"


def test_many_tensors(served: Served, stub: Any) -> None:
    names = [str(index) for index in range(TENSORS)]
    inputs = [tensor(name, "FP32", [1], [0]) for name in names]
    outputs = [{"name": name} for name in names]
    assert message("relu", outputs=outputs).ByteSize() < 256 << 10  # read on the event loop
    many = pb.ModelInferRequest(model_name="relu", inputs=[{"name": "x"}] * TENSORS)
    for what, answer, request in (
        ("outputs", served.infer("relu", GOOD, outputs=outputs), message("relu", outputs=outputs)),
        ("inputs", served.infer("relu", *inputs), many),
    ):
        expected = f"{TENSORS} {what}: a request to this model has up to 64"
        assert (answer.status, answer.error) == (400, expected)
        assert refused(stub, request) == (INVALID, expected)


def test_json_has_a_limit_of_its_own(served: Served) -> None:
    rows = JSON_LIMIT // 32  # in the answer a number has 4 characters
    given = GOOD | {"shape": [rows, 4], "data": [0] * (4 * rows)}
    body = json.dumps({"inputs": [given]}, separators=(",", ":"))
    fits = body.encode().ljust(JSON_LIMIT)
    assert post(served, fits).status == 200
    for headers in ({}, {LENGTH: str(len(fits) + 1)}):
        answer = post(served, fits + b" ", **headers)
        assert answer.status == 413
        assert f"the JSON is larger than {JSON_LIMIT} bytes (max_json_bytes)" in answer.error
        assert "send large tensors as binary data" in answer.error


def test_binary_tensors_may_be_larger_than_json(served: Served) -> None:
    x = np.ones((JSON_LIMIT // 16 + 1000, 4), np.float32)
    body, headers = binary(x)
    answer = post(served, body, **headers)
    assert answer.status == 200 and answer.content.endswith(x.tobytes())


def test_json_answers_have_the_same_limit(served: Served) -> None:
    shape = tensor("shape", "INT64", [1], [JSON_LIMIT])
    one = tensor("x", "FP32", [1], [1])
    answer = served.infer("expand", one, shape)
    assert answer.status == 413 and f"larger than {JSON_LIMIT} bytes (max_json_bytes)" in answer.error
    assert "binary_data_output" in answer.error
    fits = tensor("shape", "INT64", [1], [JSON_LIMIT // 4 - 100])  # "1.0,"
    assert served.infer("expand", one, fits).status == 200
    larger = tensor("shape", "INT64", [1], [JSON_LIMIT // 4 + 100])
    assert served.infer("expand", one, larger).error == answer.error
    binary = served.infer("expand", one, shape, parameters={"binary_data_output": True})
    assert binary.status == 200 and len(binary.content) > 4 * JSON_LIMIT


def typed(size: int, *raw: bytes) -> bytes:
    """Return a request for `id_int8` with a typed tensor of `size` bytes, and raw ones."""
    request = pb.ModelInferRequest(model_name="id_int8", raw_input_contents=raw)
    given = request.inputs.add(name="x", datatype="INT8", shape=[1, size])
    given.contents.int_contents.extend([5] * size)
    data: bytes = request.SerializeToString()
    return data


def sent(served: Served, data: bytes) -> bytes:
    options = (("grpc.max_receive_message_length", -1),)
    with grpc.insecure_channel(f"127.0.0.1:{served.grpc_port}", options) as channel:
        answer: bytes = channel.unary_unary(f"/{SERVICE}/ModelInfer")(data, timeout=60)
    return answer


@pytest.mark.parametrize(("size", "raw"), [(1 << 20, 0), (8 << 20, 0), (2 << 20, 1 << 20)])
def test_large_typed_tensors_are_refused(served: Served, size: int, raw: int) -> None:
    with pytest.raises(grpc.RpcError) as error:
        sent(served, typed(size, *([bytes(raw)] if raw else [])))
    assert error.value.code() is CODES.RESOURCE_EXHAUSTED
    assert error.value.details().endswith("outside of raw_input_contents: send raw_input_contents")


def test_the_largest_typed_tensors_are_answered(served: Served) -> None:
    size = (1 << 20) - 100
    assert len(sent(served, typed(size))) > size


def test_more_memory_than_there_is(served: Served) -> None:
    """A small request for 2 ** 45 numbers."""
    x = tensor("x", "FP32", [1], [1])
    good = served.infer("expand", x, tensor("shape", "INT64", [2], [3, 2]))
    assert good.status == 200
    answer = served.infer("expand", x, tensor("shape", "INT64", [1], [1 << 45]))
    assert answer.status == 503 and "not enough memory for this request" in answer.error
    assert served.infer("expand", x, tensor("shape", "INT64", [2], [3, 2])).json == good.json
