"""The codecs alone: they keep every bit of every datatype, and each error in a request has a message."""

import json
import time
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from service_codecs import FLOATS, decode, finite, rest_request, result, tensor_of, typed, values
from tritonclient.grpc import service_pb2 as pb

from twinop.deploy.service import codec_grpc, codec_rest
from twinop.deploy.service.datatypes import DATATYPES, Datatype, to_bytes
from twinop.deploy.service.errors import INVALID, NOT_FOUND, TOO_LARGE, ServiceError
from twinop.deploy.service.request import Result

SHAPES = ((), (0, 3), (7, 11))
EACH = [(kind, shape) for kind in DATATYPES.values() for shape in SHAPES]


def bits(array: np.ndarray) -> bytes:
    return bytes(to_bytes(array))


@pytest.mark.parametrize(("kind", "shape"), EACH)
def test_rest_binary_keeps_every_bit(kind: Datatype, shape: tuple[int, ...]) -> None:
    array = values(kind.name, *shape)
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


@pytest.mark.parametrize(("kind", "shape"), EACH)
def test_rest_json_keeps_every_finite_number(kind: Datatype, shape: tuple[int, ...]) -> None:
    array = finite(values(kind.name, *shape))
    content, _ = codec_rest.encode(result(array), codec_rest.AnswerFormat())
    said = json.loads(content)["outputs"][0]
    assert said["shape"] == list(array.shape) and said["datatype"] == kind.name
    flat = decode(*rest_request({"x": tensor_of(array, kind, data=said["data"])})).inputs["x"]
    assert flat.shape == array.shape and bits(flat) == bits(array)
    if array.ndim and array.size:
        nested = np.array(said["data"], object).reshape(array.shape).tolist()
        again = decode(*rest_request({"x": tensor_of(array, kind, data=nested)})).inputs["x"]
        assert bits(again) == bits(array)


@pytest.mark.parametrize(("kind", "shape"), EACH)
def test_grpc_raw_keeps_every_bit(kind: Datatype, shape: tuple[int, ...]) -> None:
    array = values(kind.name, *shape)
    message = pb.ModelInferRequest(model_name="m", raw_input_contents=[bits(array)])
    message.inputs.add(name="x", datatype=kind.name, shape=array.shape)
    decoded = codec_grpc.decode(message, None)
    assert bits(decoded.inputs["x"]) == bits(array)
    answer = pb.ModelInferResponse.FromString(codec_grpc.encode(result(decoded.inputs["x"]), message))
    assert answer.raw_output_contents[0] == bits(array)
    assert list(answer.outputs[0].shape) == list(array.shape) and not answer.outputs[0].HasField("contents")


@pytest.mark.parametrize(("kind", "shape"), [each for each in EACH if each[0].contents])
def test_grpc_typed_keeps_every_value(kind: Datatype, shape: tuple[int, ...]) -> None:
    array = finite(values(kind.name, *shape))
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
    encoded = codec_grpc.encode(Result("m", 1, outputs), pb.ModelInferRequest(id="7"))
    answer = pb.ModelInferResponse.FromString(encoded)
    assert [len(raw) for raw in answer.raw_output_contents] == [8, 4]
    assert (answer.id, answer.model_name, answer.model_version) == ("7", "m", "1")


def test_answers_may_be_views_with_strides() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2].T
    content, _ = codec_rest.encode(result(array), codec_rest.AnswerFormat(binary=True))
    assert content.endswith(np.ascontiguousarray(array).tobytes())
    content, _ = codec_rest.encode(result(array), codec_rest.AnswerFormat())
    assert json.loads(content)["outputs"][0]["data"] == array.ravel().tolist()


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
    common = {"name", "datatype", "shape"}
    assert [set(output) - common for output in answer["outputs"]] == [{"data"}, {"parameters"}]


def test_timeout_is_in_microseconds() -> None:
    now = time.monotonic()
    deadline = decode(*rest_request({}, parameters={"timeout": 2_000_000})).deadline
    assert deadline is not None and now + 2 <= deadline <= time.monotonic() + 2
    assert decode(*rest_request({}, parameters={"timeout": 0})).deadline is None


def test_grpc_takes_the_earlier_of_deadline_and_timeout() -> None:
    message = pb.ModelInferRequest(parameters={"timeout": pb.InferParameter(int64_param=5_000_000)})
    cases = (message, None, 5), (message, 2, 2), (message, 9, 5), (pb.ModelInferRequest(), 3, 3)
    for asked, seconds, expected in cases:
        now = time.monotonic()
        deadline = codec_grpc.decode(asked, seconds).deadline
        assert deadline is not None and now + expected <= deadline <= time.monotonic() + expected
    assert codec_grpc.decode(pb.ModelInferRequest(), None).deadline is None


X = {"datatype": "FP32", "shape": [2], "data": [1, 2]}


def raw(size: Any, datatype: str = "FP32", *shape: int) -> dict[str, Any]:
    return {"datatype": datatype, "shape": shape or (2,), "parameters": {"binary_data_size": size}}


BAD_TENSORS = {
    "no datatype": (X | {"datatype": None}, "inputs.0.datatype: Input should be a valid string, not None"),
    "no shape": ({"datatype": "FP32", "data": []}, "inputs.0.shape: Field required"),
    "negative shape": (X | {"shape": [-1]}, r"shape \[-1\] must be a list of whole numbers >= 0"),
    "shape with a fraction": (X | {"shape": [2.0]}, r"shape \[2.0\] must be"),
    "enormous shape": (X | {"shape": [2**40, 2**40]}, "is larger than any tensor can be"),
    "enormous shape without elements": (X | {"shape": [0, 2**60]}, "is larger than any tensor can be"),
    "large shape": (X | {"shape": [10**9]}, r"2 elements of data, but shape \[1000000000\] has 1000000000"),
    "many dimensions": (X | {"shape": [1] * 40}, "40 dimensions; a tensor has up to 32"),
    "data too long": (X | {"data": [1, 2, 3]}, r"3 elements of data, but shape \[2\] has 2"),
    "no data": ({"datatype": "FP32", "shape": [2]}, "input x needs either data or binary_data_size"),
    "ragged data": (X | {"shape": [2, 2], "data": [[1, 2], [3]]}, r"data is nested as \[2\], but its shape"),
    "data nested late": (X | {"data": [1, [2]]}, r"element 1 of data is \[2\]; FP32 takes numbers"),
    "null": (X | {"data": [1, None]}, "element 1 of data is null; FP32 takes numbers"),
    "bool for a number": (X | {"data": [True, 2]}, "element 0 of data is true; FP32 takes numbers"),
    "number for a bool": (X | {"datatype": "BOOL"}, "element 0 of data is 1; BOOL takes true and false"),
    "fraction": (X | {"datatype": "INT8", "data": [1, 2.5]}, "element 1 of data is 2.5; INT8 takes whole"),
    "int too large": (X | {"datatype": "INT8", "data": [1, 128]}, "element 1 is 128; INT8 has -128 to 127"),
    "negative unsigned": (X | {"datatype": "UINT64", "data": [-1, 1]}, "element 0 is -1; UINT64 has 0 to"),
    "beyond 64 bits": (X | {"datatype": "INT64", "data": [2**64, 1]}, "element 0 of data is 1.8446744073"),
    "float too large": (X | {"datatype": "FP16", "data": [1, 70000]}, "element 1 is 70000, beyond the range"),
    "object for text": (X | {"datatype": "BYTES", "data": [{"b64": "!"}, "a"]}, 'is {"b64":"!"}; BYTES'),
    "binary size is text": (raw("8"), "inputs.0.parameters.binary_data_size: Input should be a valid"),
    "binary without the header": (raw(8), "Inference-Header-Content-Length is missing"),
    "shared memory": (X | {"parameters": {"shared_memory_region": "r"}}, "input x: shared memory is not"),
}


@pytest.mark.parametrize(("tensor", "message"), BAD_TENSORS.values(), ids=BAD_TENSORS)
def test_bad_tensor(tensor: dict[str, Any], message: str) -> None:
    with pytest.raises(ServiceError, match=message) as error:
        decode(*rest_request({"x": tensor}))
    assert error.value.failure is INVALID
    assert len(str(error.value)) < 300


BAD_BODIES = {
    "no JSON": (b"hello", "invalid JSON: .*line 1 column 1"),
    "not UTF-8": (b'{"id": "\xff", "inputs": []}', "invalid JSON"),
    "too deep": (b"[" * 100_000, "invalid JSON"),
    "NaN": (b'{"inputs": [{"data": [NaN]}]}', "JSON has no NaN or Infinity: send the tensor as binary data"),
    "binary without its header": (b'{"inputs": []}\0\0\0', "need the header Inference-Header-Content-Length"),
    "a list": (b"[]", "the request: Input should be a valid dictionary, not"),
    "no inputs": (b"{}", "inputs: Field required"),
    "inputs is an object": (b'{"inputs": {}}', "inputs: Input should be a valid list, not {}"),
    "input without a name": (b'{"inputs": [{}]}', "inputs.0.name: Field required"),
    "same input twice": (json.dumps({"inputs": [{"name": "x", **X}] * 2}).encode(), "input x is named twice"),
    "same output twice": (b'{"inputs": [], "outputs": [{"name": "y"}, {"name": "y"}]}', "y is named twice"),
    "negative timeout": (b'{"inputs": [], "parameters": {"timeout": -1}}', "whole number of microseconds"),
    "binary_data is a number": (
        b'{"inputs": [], "outputs": [{"name": "y", "parameters": {"binary_data": 1}}]}',
        "outputs.0.parameters.binary_data: Input should be a valid boolean, not 1",
    ),
    "classification": (
        b'{"inputs": [], "outputs": [{"name": "y", "parameters": {"classification": 3}}]}',
        "the extension for classification is not served here",
    ),
}


@pytest.mark.parametrize(("body", "message"), BAD_BODIES.values(), ids=BAD_BODIES)
def test_bad_body(body: bytes, message: str) -> None:
    with pytest.raises(ServiceError, match=message) as error:
        decode(body)
    assert error.value.failure is INVALID


@pytest.mark.parametrize("length", ["", "-1", "1.5", "1" * 30, "٣", "3"])
def test_the_length_of_the_json_must_be_a_number_within_the_body(length: str) -> None:
    with pytest.raises(ServiceError, match="it takes the JSON's length|is 3, but the body has 2"):
        decode(b"{}", {"inference-header-content-length": length})


BAD_BINARY = {
    "body too short": (raw(8), b"\0" * 7, "binary_data_size is 8, but only 7 bytes are left"),
    "body too long": (raw(8), b"\0" * 9, "1 bytes follow the last binary input"),
    "shape of more": (raw(8, "FP32", 3), b"\0" * 8, r"8 bytes of data, but FP32 of shape \[3\] has 12"),
    "BOOL of 2": (raw(2, "BOOL"), b"\1\2", "must be 0 or 1"),
    "BYTES cut off": (raw(6, "BYTES", 1), b"\3\0\0\0ab", "an element of BYTES goes beyond the 6 bytes"),
    "BYTES length cut off": (raw(8, "BYTES"), b"\1\0\0\0a\0\0\0", "an element of BYTES goes beyond"),
    "BYTES too few": (raw(4, "BYTES", 10**12), b"\0" * 4, "1 elements of BYTES, but its shape has"),
    "BYTES not UTF-8": (raw(5, "BYTES", 1), b"\1\0\0\0\xff", "element 0 is not UTF-8"),
}


@pytest.mark.parametrize(("tensor", "tail", "message"), BAD_BINARY.values(), ids=BAD_BINARY)
def test_bad_binary_data(tensor: dict[str, Any], tail: bytes, message: str) -> None:
    with pytest.raises(ServiceError, match=message) as error:
        decode(*rest_request({"x": tensor}, tail))
    assert error.value.failure is INVALID


@pytest.mark.parametrize("version", ["0", "-1", "01x", "latest", "٣", "9" * 40])
def test_what_is_no_version(version: str) -> None:
    with pytest.raises(ServiceError, match="model m has no version .*: versions are 1, 2, ...") as error:
        codec_rest.decode(*rest_request({}), "m", version)
    assert error.value.failure is NOT_FOUND


@pytest.mark.parametrize("kind", [DATATYPES[name] for name in sorted(FLOATS)], ids=lambda kind: kind.name)
def test_json_never_says_null_for_a_number(kind: Datatype) -> None:
    for value in (np.nan, -np.inf):
        array = np.array([1, value], kind.dtype)
        with pytest.raises(ServiceError, match='output y holds NaN or infinity.*"binary_data": true'):
            codec_rest.encode(result(array), codec_rest.AnswerFormat())
        content, _ = codec_rest.encode(result(array), codec_rest.AnswerFormat(binary=True))
        assert content.endswith(array.tobytes())


def message_with(raw: list[bytes] | None = None, **tensor: Any) -> Any:
    given = {"name": "x", "datatype": "FP32", "shape": [2], **tensor}
    return pb.ModelInferRequest(model_name="m", inputs=[given], raw_input_contents=raw or ())


ZERO = {"name": "x", "datatype": "FP32", "shape": [0]}
BAD_MESSAGES = {
    "raw and typed": (message_with([b"\0" * 8], contents={"fp32_contents": [1, 2]}), "contents besides raw"),
    "too few raw": (
        pb.ModelInferRequest(inputs=[{"name": "x"}, {"name": "y"}], raw_input_contents=[b""]),
        "2 inputs, but 1 raw_input_contents",
    ),
    "raw too short": (message_with([b"\0" * 7]), r"7 bytes of data, but FP32 of shape \[2\] has 8"),
    "no contents": (message_with(), r"0 elements in fp32_contents, but shape \[2\] has 2"),
    "wrong contents": (
        message_with(contents={"int_contents": [1, 2], "fp32_contents": [1, 2]}),
        "input x: int_contents are set; FP32 has fp32_contents alone",
    ),
    "FP16 typed": (message_with(datatype="FP16"), "FP16 has no typed contents: send raw_input_contents"),
    "INT8 out of range": (
        message_with(datatype="INT8", contents={"int_contents": [1, 200]}),
        "element 1 is 200; INT8 has -128 to 127",
    ),
    "BYTES not UTF-8": (
        message_with(datatype="BYTES", contents={"bytes_contents": [b"a", b"\xff"]}),
        "element 1 is not UTF-8",
    ),
    "same input twice": (pb.ModelInferRequest(inputs=[ZERO, ZERO]), "input x is named twice"),
    "shared memory": (
        message_with(parameters={"shared_memory_region": pb.InferParameter(string_param="r")}),
        "input x: shared memory is not served: send tensors, and ask for them, in the messages",
    ),
    "timeout is text": (
        pb.ModelInferRequest(parameters={"timeout": pb.InferParameter(string_param="1")}),
        "whole number of micro",
    ),
}


@pytest.mark.parametrize(("message", "expected"), BAD_MESSAGES.values(), ids=BAD_MESSAGES)
def test_bad_message(message: Any, expected: str) -> None:
    with pytest.raises(ServiceError, match=expected) as error:
        codec_grpc.decode(message, None)
    assert error.value.failure is INVALID


def varint(number: int, length: int = 1) -> bytes:
    """Encode a number in at least `length` bytes, as protobuf accepts it."""
    parts = list[int]()
    while number > 0x7F or len(parts) < length - 1:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*parts, number])


RAW_KEY = pb.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER << 3 | 2


@pytest.mark.parametrize("key", [16, 2000, 300_000])
def test_typed_contents_do_not_hide_behind_an_unknown_field(key: int) -> None:
    """To who takes its key for one byte, the unknown field's content announces raw contents to the end."""
    message = message_with(contents={"int_contents": [1] * (codec_grpc.MOST_TYPED_BYTES + 1)})
    typed = message.SerializeToString()
    for before in range(4):
        content = bytes(before) + varint(RAW_KEY) + varint(len(typed))
        data = varint(key << 3 | 2) + varint(len(content)) + content + typed
        assert len(pb.ModelInferRequest.FromString(data).inputs) == 1
        with pytest.raises(ServiceError, match="outside of raw_input_contents") as caught:
            codec_grpc.parse(data)
        assert caught.value.failure is TOO_LARGE


def test_raw_contents_are_found_behind_long_keys() -> None:
    content = bytes(2 * codec_grpc.MOST_TYPED_BYTES)
    for length in (1, 2, 3):
        data = varint(2000 << 3 | 2) + varint(3) + b"abc" + varint(RAW_KEY, length)
        assert codec_grpc.parse(data + varint(len(content)) + content).raw_input_contents == [content]
