"""Requests that are expensive to read: they are refused early, or others are answered meanwhile."""

import json
import threading
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest
from service_fixtures import Answer, Served, tensor
from service_rows import message, refused
from tritonclient.grpc import service_pb2 as pb

from twinop.deploy.service.codec_grpc import SERVICE

X = tensor("x", "FP32", [1, 4], [-1, 0, 1, 2])
TENSORS = 20_000
JSON_LIMIT = 2 << 20  # max_json_bytes
LENGTH = "inference-header-content-length"


def post(served: Served, body: bytes, **headers: str) -> Answer:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return served.ask("POST", "/v2/models/relu/infer", body, names)


# -------------------------------------------------------------------------------- many tensors


def test_many_tensors(served: Served, stub: Any) -> None:
    names = [str(index) for index in range(TENSORS)]
    inputs = [tensor(name, "FP32", [1], [0]) for name in names]
    outputs = [{"name": name} for name in names]
    assert message("relu", outputs=outputs).ByteSize() < 256 << 10  # read on the event loop
    for what, answer, request in (
        ("outputs", served.infer("relu", X, outputs=outputs), message("relu", outputs=outputs)),
        (
            "inputs",
            served.infer("relu", *inputs),
            pb.ModelInferRequest(model_name="relu", inputs=[{"name": "x"}] * TENSORS),
        ),
    ):
        expected = f"{TENSORS} {what}: a request to this model has up to 64"
        assert (answer.status, answer.error) == (400, expected)
        assert refused(stub, request) == (grpc.StatusCode.INVALID_ARGUMENT, expected)


# -------------------------------------------------------------------------------- large tensors


def test_json_has_a_limit_of_its_own(served: Served) -> None:
    rows = JSON_LIMIT // 32  # in the answer a number has 4 characters
    body = json.dumps({"inputs": [X | {"shape": [rows, 4], "data": [0] * (4 * rows)}]}, separators=(",", ":"))
    fits = body.encode().ljust(JSON_LIMIT)
    assert post(served, fits).status == 200
    for headers in ({}, {LENGTH: str(len(fits) + 1)}):
        answer = post(served, fits + b" ", **headers)
        assert answer.status == 413
        assert f"the JSON is larger than {JSON_LIMIT} bytes (max_json_bytes)" in answer.error
        assert "send large tensors as binary data" in answer.error


def test_binary_tensors_may_be_larger_than_json(served: Served) -> None:
    rows = JSON_LIMIT // 16 + 1000
    given = {"name": "x", "datatype": "FP32", "shape": [rows, 4]}
    header = {
        "inputs": [given | {"parameters": {"binary_data_size": rows * 16}}],
        "parameters": {"binary_data_output": True},
    }
    text, data = json.dumps(header).encode(), np.ones((rows, 4), np.float32).tobytes()
    answer = post(served, text + data, **{LENGTH: str(len(text))})
    assert answer.status == 200 and answer.content.endswith(data)


def numbers() -> bytes:
    data = [0.25] * (JSON_LIMIT // 5 // 4 * 4 - 400)
    return json.dumps(
        {"inputs": [X | {"shape": [len(data) // 4, 4], "data": data}]}, separators=(",", ":")
    ).encode()


def tensors() -> bytes:
    return b'{"inputs":[%b{}]}' % (b'{"name":"x"},' * (JSON_LIMIT // 13 - 2))


@pytest.mark.parametrize(("body", "status"), [(numbers, 200), (tensors, 400)], ids=["numbers", "tensors"])
def test_others_are_answered_during_the_largest_json(
    served: Served, body: Callable[[], bytes], status: int
) -> None:
    content = body()
    assert JSON_LIMIT * 0.9 < len(content) <= JSON_LIMIT
    answers: list[Answer] = []
    assert is_answered_during(served, lambda: answers.append(post(served, content)))
    assert {answer.status for answer in answers} == {status}


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
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.value.details().endswith("outside of raw_input_contents: send raw_input_contents")


def test_the_largest_typed_tensors_are_answered(served: Served) -> None:
    size = (1 << 20) - 100
    assert len(sent(served, typed(size))) > size


def is_answered_during(served: Served, send: Callable[[], None]) -> bool:
    """Return whether another request is answered between the start and the end of `send`.

    A busy machine may pause this thread for as long as `send` takes, so `send` is called several times.
    """
    for _ in range(20):
        sender = threading.Thread(target=send)
        sender.start()
        while sender.is_alive():
            assert served.infer("relu", X).status == 200
            if sender.is_alive():
                sender.join()
                return True
    return False


# -------------------------------------------------------------------------------- much memory


def test_more_memory_than_there_is(served: Served, stub: Any) -> None:
    """A small request for 2 ** 45 numbers."""
    x = tensor("x", "FP32", [1], [1])
    good = served.infer("expand", x, tensor("shape", "INT64", [2], [3, 2]))
    assert good.status == 200
    answer = served.infer("expand", x, tensor("shape", "INT64", [1], [1 << 45]))
    assert answer.status == 503 and "not enough memory for this request" in answer.error
    assert served.infer("expand", x, tensor("shape", "INT64", [2], [3, 2])).json == good.json
    request = pb.ModelInferRequest(model_name="expand")
    request.inputs.add(name="x", datatype="FP32", shape=[1]).contents.fp32_contents.append(1)
    shape = request.inputs.add(name="shape", datatype="INT64", shape=[1]).contents.int64_contents
    shape.append(1 << 45)
    assert refused(stub, request) == (grpc.StatusCode.RESOURCE_EXHAUSTED, answer.error)
    shape[0] = 6
    assert list(stub.ModelInfer(request, timeout=60).outputs[0].contents.fp32_contents) == [1] * 6
