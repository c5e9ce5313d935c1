"""The codecs alone: they keep every bit of every datatype, and answers have the requested form."""

import json
import time

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from service_codecs import FLOATS, decode, rest_request, result, strings, tensor_of, typed
from tritonclient.grpc import service_pb2 as pb

from twinop.deploy.service import codec_grpc, codec_rest
from twinop.deploy.service.datatypes import BYTES, DATATYPES, Datatype, from_bytes, to_bytes
from twinop.deploy.service.request import Result

NUMBERS = [kind for kind in DATATYPES.values() if kind is not BYTES]
TEXT = st.text(max_size=12)  # any Unicode characters
SHAPES = st.lists(st.integers(0, 4), max_size=4)


def bits(array: np.ndarray) -> bytes:
    return bytes(to_bytes(array))


def arrays(kind: Datatype, is_finite: bool = False) -> st.SearchStrategy[np.ndarray]:
    """Return a strategy for tensors of any bits (NaN payloads, -0, subnormals), or of any finite values."""

    def made(shape: list[int], data: bytes) -> np.ndarray:
        if kind.name == "BOOL":
            data = bytes(each & 1 for each in data)
        array = np.frombuffer(data, kind.dtype).reshape(shape)
        with np.errstate(invalid="ignore"):  # signalling NaNs of bfloat16
            return np.where(np.isfinite(array), array, kind.dtype.type(-0.0)) if is_finite else array

    def of_shape(shape: list[int]) -> st.SearchStrategy[np.ndarray]:
        count = int(np.prod(shape, dtype=int))
        if kind is BYTES:
            return st.lists(TEXT, min_size=count, max_size=count).map(
                lambda texts: strings(texts).reshape(shape)
            )
        size = count * kind.dtype.itemsize
        return st.binary(min_size=size, max_size=size).map(lambda data: made(shape, data))

    return SHAPES.flatmap(of_shape)


# -------------------------------------------------------------------------------- every bit


@pytest.mark.parametrize("kind", DATATYPES.values(), ids=DATATYPES)
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_rest_binary_keeps_every_bit(kind: Datatype, data: st.DataObject) -> None:
    array = data.draw(arrays(kind))
    raw = bits(array)
    tensor = tensor_of(array, kind, parameters={"binary_data_size": len(raw)})
    header = json.dumps({"inputs": [{"name": "x", **tensor}]}).encode()
    body, headers = header + raw, {"inference-header-content-length": str(len(header))}
    decoded = decode(body, headers).inputs["x"]
    assert decoded.dtype == kind.dtype and decoded.shape == array.shape and decoded.flags.aligned
    assert bits(decoded) == raw
    content, answer = codec_rest.encode(result(decoded), codec_rest.AnswerFormat(binary=True))
    length = int(answer["inference-header-content-length"])
    said = json.loads(content[:length])["outputs"][0]
    assert said == {"name": "y", **tensor}
    assert content[length:] == raw


@pytest.mark.parametrize("kind", DATATYPES.values(), ids=DATATYPES)
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_rest_json_keeps_every_finite_number(kind: Datatype, data: st.DataObject) -> None:
    array = data.draw(arrays(kind, is_finite=kind.name in FLOATS))
    content, _ = codec_rest.encode(result(array), codec_rest.AnswerFormat())
    said = json.loads(content)["outputs"][0]
    assert said["shape"] == list(array.shape) and said["datatype"] == kind.name
    flat = decode(*rest_request({"x": tensor_of(array, kind, data=said["data"])})).inputs["x"]
    assert flat.shape == array.shape and bits(flat) == bits(array)
    if array.ndim and array.size:
        nested = np.array(said["data"], object).reshape(array.shape).tolist()
        again = decode(*rest_request({"x": tensor_of(array, kind, data=nested)})).inputs["x"]
        assert bits(again) == bits(array)


@pytest.mark.parametrize("kind", DATATYPES.values(), ids=DATATYPES)
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_grpc_raw_keeps_every_bit(kind: Datatype, data: st.DataObject) -> None:
    array = data.draw(arrays(kind))
    message = pb.ModelInferRequest(model_name="m", raw_input_contents=[bits(array)])
    message.inputs.add(name="x", datatype=kind.name, shape=array.shape)
    decoded = codec_grpc.decode(message, None)
    assert bits(decoded.inputs["x"]) == bits(array)
    answer = pb.ModelInferResponse.FromString(codec_grpc.encode(result(decoded.inputs["x"]), message))
    assert answer.raw_output_contents[0] == bits(array)
    assert list(answer.outputs[0].shape) == list(array.shape) and not answer.outputs[0].HasField("contents")


@pytest.mark.parametrize(
    "kind", [kind for kind in DATATYPES.values() if kind.contents], ids=lambda kind: kind.name
)
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_grpc_typed_keeps_every_value(kind: Datatype, data: st.DataObject) -> None:
    array = data.draw(arrays(kind, is_finite=kind.name in FLOATS))
    message = pb.ModelInferRequest(model_name="m")
    message.inputs.append(typed(array, kind))
    decoded = codec_grpc.decode(message, None)
    assert bits(decoded.inputs["x"]) == bits(array)
    answer = pb.ModelInferResponse.FromString(codec_grpc.encode(result(decoded.inputs["x"]), message))
    assert not answer.raw_output_contents
    again = typed(array, kind, "y").contents
    assert answer.outputs[0].contents == again


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["FP32", "FP64"])
def test_grpc_typed_carries_what_is_not_finite(name: str, value: float) -> None:
    kind = DATATYPES[name]
    array = np.array([value], kind.dtype)
    decoded = codec_grpc.decode(pb.ModelInferRequest(inputs=[typed(array, kind)]), None)
    np.testing.assert_array_equal(decoded.inputs["x"], array)


def test_grpc_answers_are_raw_where_a_type_has_no_typed_field() -> None:
    outputs = {"a": np.ones(2, np.float32), "b": np.ones(2, ml_dtypes.bfloat16)}
    answer = pb.ModelInferResponse.FromString(
        codec_grpc.encode(Result("m", 1, outputs), pb.ModelInferRequest(id="7"))
    )
    assert [len(raw) for raw in answer.raw_output_contents] == [8, 4]
    assert (answer.id, answer.model_name, answer.model_version) == ("7", "m", "1")


def test_binary_data_at_an_odd_address_is_moved() -> None:
    data = memoryview(b"\0" + np.arange(4, dtype=np.float32).tobytes())[1:]
    array = from_bytes("x", DATATYPES["FP32"], [4], data)
    assert array.flags.aligned and array.tolist() == [0, 1, 2, 3]


def test_answers_may_be_views_with_strides() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2].T
    content, _ = codec_rest.encode(result(array), codec_rest.AnswerFormat(binary=True))
    assert content.endswith(np.ascontiguousarray(array).tobytes())
    content, _ = codec_rest.encode(result(array), codec_rest.AnswerFormat())
    assert json.loads(content)["outputs"][0]["data"] == array.ravel().tolist()


# -------------------------------------------------------------------------------- what is asked for


def test_each_output_comes_in_the_form_that_it_is_asked_for_in() -> None:
    outputs = [{"name": "b", "parameters": {"binary_data": False}}, {"name": "a"}]
    body, headers = rest_request({}, outputs=outputs, id="me", parameters={"binary_data_output": True})
    request, form = codec_rest.decode(body, headers, "m", "2")
    assert (request.outputs, request.version, request.id) == (("b", "a"), 2, "me")
    ones = np.ones(1, np.float32)
    content, headers = codec_rest.encode(Result("m", 2, {"b": ones, "a": ones}), form)
    length = int(headers["inference-header-content-length"])
    answer = json.loads(content[:length])
    assert (answer["id"], answer["model_name"], answer["model_version"]) == ("me", "m", "2")
    assert [set(output) for output in answer["outputs"]] == [
        {"name", "datatype", "shape", "data"},
        {"name", "datatype", "shape", "parameters"},
    ]


def test_an_answer_has_an_id_only_if_the_request_has_one() -> None:
    content, _ = codec_rest.encode(result(np.ones(1)), codec_rest.decode(*rest_request({}), "m")[1])
    assert "id" not in json.loads(content)


def test_timeout_is_in_microseconds() -> None:
    now = time.monotonic()
    deadline = decode(*rest_request({}, parameters={"timeout": 2_000_000})).deadline
    assert deadline is not None and now + 2 <= deadline <= time.monotonic() + 2
    assert decode(*rest_request({}, parameters={"timeout": 0})).deadline is None


def test_grpc_takes_the_earlier_of_deadline_and_timeout() -> None:
    message = pb.ModelInferRequest(parameters={"timeout": pb.InferParameter(int64_param=5_000_000)})
    for asked, seconds, expected in (
        (message, None, 5),
        (message, 2, 2),
        (message, 9, 5),
        (pb.ModelInferRequest(), 3, 3),
    ):
        now = time.monotonic()
        deadline = codec_grpc.decode(asked, seconds).deadline
        assert deadline is not None and now + expected <= deadline <= time.monotonic() + expected
    assert codec_grpc.decode(pb.ModelInferRequest(), None).deadline is None
