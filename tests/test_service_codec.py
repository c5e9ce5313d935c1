"""The codecs alone: every bit of every datatype survives; what is wrong gets a message that says so."""

import json
import time
import zlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinop.deploy.service import codec_grpc, codec_rest
from twinop.deploy.service._kserve import pb
from twinop.deploy.service.bodies import decompressed
from twinop.deploy.service.datatypes import BYTES, DATATYPES, Datatype, from_bytes, to_bytes
from twinop.deploy.service.errors import INVALID, NOT_FOUND, TOO_LARGE, ServiceError
from twinop.deploy.service.request import Request, Result

NUMBERS = [kind for kind in DATATYPES.values() if kind is not BYTES]
FLOATS = {"FP16", "FP32", "FP64", "BF16"}
TEXT = st.text(max_size=12)  # of any characters that UTF-8 has
SHAPES = st.lists(st.integers(0, 4), max_size=4)


def bits(array: np.ndarray) -> bytes:
    return bytes(to_bytes(array))


def arrays(kind: Datatype, is_finite: bool = False) -> st.SearchStrategy[np.ndarray]:
    """Tensors of any bits (NaN with payloads, -0, subnormals), or of any finite ones."""

    def made(shape: list[int], data: bytes) -> np.ndarray:
        if kind.name == "BOOL":
            data = bytes(each & 1 for each in data)
        array = np.frombuffer(data, kind.dtype).reshape(shape)
        with np.errstate(invalid="ignore"):  # bfloat16's signalling NaN
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


def strings(texts: list[str]) -> np.ndarray:
    array = np.empty(len(texts), object)
    array[:] = texts
    return array


def rest_request(inputs: dict[str, Any], tail: bytes = b"", **rest: Any) -> tuple[bytes, dict[str, str]]:
    """A body and its headers. `inputs`: a tensor's JSON by name."""
    tensors = [{"name": name, **tensor} for name, tensor in inputs.items()]
    header = json.dumps({"inputs": tensors, **rest}).encode()
    headers = {"inference-header-content-length": str(len(header))} if tail else {}
    return header + tail, headers


def tensor_of(array: np.ndarray, kind: Datatype, **rest: Any) -> dict[str, Any]:
    return {"datatype": kind.name, "shape": list(array.shape), **rest}


def decode(body: bytes, headers: dict[str, str] | None = None) -> Request:
    return codec_rest.decode(body, headers or {}, "m")[0]


def result(array: np.ndarray) -> Result:
    return Result("m", 3, {"y": array})


# -------------------------------------------------------------------------------- every bit


@pytest.mark.parametrize("kind", DATATYPES.values(), ids=DATATYPES)
@settings(max_examples=60, deadline=None)
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
    content, answer = codec_rest.encode(result(decoded), codec_rest.Form(binary=True))
    length = int(answer["inference-header-content-length"])
    said = json.loads(content[:length])["outputs"][0]
    assert said == {"name": "y", **tensor}
    assert content[length:] == raw


@pytest.mark.parametrize("kind", DATATYPES.values(), ids=DATATYPES)
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_rest_json_keeps_every_finite_number(kind: Datatype, data: st.DataObject) -> None:
    array = data.draw(arrays(kind, is_finite=kind.name in FLOATS))
    content, _ = codec_rest.encode(result(array), codec_rest.Form())
    said = json.loads(content)["outputs"][0]
    assert said["shape"] == list(array.shape) and said["datatype"] == kind.name
    flat = decode(*rest_request({"x": tensor_of(array, kind, data=said["data"])})).inputs["x"]
    assert flat.shape == array.shape and bits(flat) == bits(array)
    if array.ndim and array.size:
        nested = np.array(said["data"], object).reshape(array.shape).tolist()
        again = decode(*rest_request({"x": tensor_of(array, kind, data=nested)})).inputs["x"]
        assert bits(again) == bits(array)


@pytest.mark.parametrize("kind", DATATYPES.values(), ids=DATATYPES)
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_grpc_raw_keeps_every_bit(kind: Datatype, data: st.DataObject) -> None:
    array = data.draw(arrays(kind))
    message = pb.ModelInferRequest(model_name="m", raw_input_contents=[bits(array)])
    message.inputs.add(name="x", datatype=kind.name, shape=array.shape)
    decoded, form = codec_grpc.decode(message, None)
    assert bits(decoded.inputs["x"]) == bits(array)
    answer = codec_grpc.encode(result(decoded.inputs["x"]), form)
    assert answer.raw_output_contents[0] == bits(array)
    assert list(answer.outputs[0].shape) == list(array.shape) and not answer.outputs[0].HasField("contents")


@pytest.mark.parametrize(
    "kind", [kind for kind in DATATYPES.values() if kind.contents], ids=lambda kind: kind.name
)
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_grpc_typed_keeps_every_value(kind: Datatype, data: st.DataObject) -> None:
    array = data.draw(arrays(kind, is_finite=kind.name in FLOATS))
    message = pb.ModelInferRequest(model_name="m")
    message.inputs.append(typed(array, kind))
    decoded, form = codec_grpc.decode(message, None)
    assert bits(decoded.inputs["x"]) == bits(array)
    answer = codec_grpc.encode(result(decoded.inputs["x"]), form)
    assert not answer.raw_output_contents
    again = typed(array, kind, "y").contents
    assert answer.outputs[0].contents == again


def typed(array: np.ndarray, kind: Datatype, name: str = "x") -> Any:
    tensor = pb.ModelInferRequest.InferInputTensor(name=name, datatype=kind.name, shape=array.shape)
    values = array.ravel().tolist()
    if kind is BYTES:
        values = [text.encode() for text in values]
    getattr(tensor.contents, kind.contents or "").extend(values)
    return tensor


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["FP32", "FP64"])
def test_grpc_typed_carries_what_is_not_finite(name: str, value: float) -> None:
    kind = DATATYPES[name]
    array = np.array([value], kind.dtype)
    decoded, _ = codec_grpc.decode(pb.ModelInferRequest(inputs=[typed(array, kind)]), None)
    np.testing.assert_array_equal(decoded.inputs["x"], array)


def test_grpc_answers_are_raw_where_a_type_has_no_typed_field() -> None:
    outputs = {"a": np.ones(2, np.float32), "b": np.ones(2, ml_dtypes.bfloat16)}
    answer = codec_grpc.encode(Result("m", 1, outputs), codec_grpc.Form("7", raw=False))
    assert [len(raw) for raw in answer.raw_output_contents] == [8, 4]
    assert (answer.id, answer.model_name, answer.model_version) == ("7", "m", "1")


def test_binary_data_at_an_odd_address_is_moved() -> None:
    data = memoryview(b"\0" + np.arange(4, dtype=np.float32).tobytes())[1:]
    array = from_bytes("x", DATATYPES["FP32"], [4], data)
    assert array.flags.aligned and array.tolist() == [0, 1, 2, 3]


def test_binary_data_is_not_copied_where_it_lies_well() -> None:
    data = np.arange(4, dtype=np.float32).tobytes()
    assert not from_bytes("x", DATATYPES["FP32"], [2, 2], data).flags.owndata


def test_answers_may_be_views_with_strides() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2].T
    content, _ = codec_rest.encode(result(array), codec_rest.Form(binary=True))
    assert content.endswith(np.ascontiguousarray(array).tobytes())
    content, _ = codec_rest.encode(result(array), codec_rest.Form())
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


@pytest.mark.parametrize("outputs", [None, []])
def test_all_outputs_where_none_is_named(outputs: Any) -> None:
    assert decode(*rest_request({}, outputs=outputs)).outputs is None


def test_an_answer_has_an_id_only_if_the_request_has_one() -> None:
    content, _ = codec_rest.encode(result(np.ones(1)), codec_rest.decode(*rest_request({}), "m")[1])
    assert "id" not in json.loads(content)


def test_timeout_is_in_microseconds() -> None:
    now = time.monotonic()
    deadline = decode(*rest_request({}, parameters={"timeout": 2_000_000})).deadline
    assert deadline is not None and now + 2 <= deadline < now + 3
    assert decode(*rest_request({}, parameters={"timeout": 0})).deadline is None


def test_grpc_takes_the_earlier_of_deadline_and_timeout() -> None:
    message = pb.ModelInferRequest(parameters={"timeout": pb.InferParameter(int64_param=5_000_000)})
    for seconds, expected in ((None, 5), (2, 2), (9, 5)):
        deadline = codec_grpc.decode(message, seconds)[0].deadline
        assert deadline == pytest.approx(time.monotonic() + expected, abs=0.5)
    assert codec_grpc.decode(pb.ModelInferRequest(), None)[0].deadline is None
    late = codec_grpc.decode(pb.ModelInferRequest(), 3)[0].deadline
    assert late == pytest.approx(time.monotonic() + 3, abs=0.5)


# -------------------------------------------------------------------------------- bad input, REST

X = {"datatype": "FP32", "shape": [2], "data": [1, 2]}
RAW = {"datatype": "FP32", "shape": [2], "parameters": {"binary_data_size": 8}}

BAD_TENSORS = {
    "no datatype": (X | {"datatype": None}, "datatype None is none of BOOL, UINT8"),
    "unknown datatype": (X | {"datatype": "FLOAT"}, "datatype 'FLOAT' is none of"),
    "no shape": ({"datatype": "FP32", "data": []}, "shape must be a list of whole numbers, not None"),
    "shape is a number": (X | {"shape": 2}, "shape must be a list of whole numbers, not 2"),
    "negative shape": (X | {"shape": [-1]}, r"shape \[-1\] must be a list of whole numbers >= 0"),
    "shape with a fraction": (X | {"shape": [2.0]}, r"shape \[2.0\] must be"),
    "shape with a bool": (X | {"shape": [True, 2]}, r"shape \[True, 2\] must be"),
    "shape beyond 64 bits": (X | {"shape": [2**70]}, "must be a list of whole numbers"),
    "enormous shape": (X | {"shape": [2**40, 2**40]}, "is larger than any tensor can be"),
    "enormous shape without elements": (X | {"shape": [0, 2**60]}, "is larger than any tensor can be"),
    "large shape": (X | {"shape": [10**9]}, r"2 elements of data, but shape \[1000000000\] has 1000000000"),
    "many dimensions": (X | {"shape": [1] * 40}, "40 dimensions; a tensor has up to 32"),
    "data too short": (X | {"data": [1]}, r"1 elements of data, but shape \[2\] has 2"),
    "data too long": (X | {"data": [1, 2, 3]}, r"3 elements of data, but shape \[2\] has 2"),
    "no data": ({"datatype": "FP32", "shape": [2]}, "neither data nor binary_data_size"),
    "data is a number": (X | {"data": 1}, "data must be a list, not 1"),
    "ragged data": (
        X | {"shape": [2, 2], "data": [[1, 2], [3]]},
        "axis 1 there is a list of 1, not a list of 2",
    ),
    "data nested too little": (
        X | {"shape": [2, 2], "data": [[1, 2], 3]},
        "axis 1 there is 3, not a list of 2",
    ),
    "data nested too much": (X | {"data": [[1], [2]]}, "axis 0|element 0 of data is"),
    "null": (X | {"data": [1, None]}, "element 1 of data is null; FP32 takes numbers"),
    "text for a number": (X | {"data": ["1", 2]}, 'element 0 of data is "1"; FP32 takes numbers'),
    "bool for a number": (X | {"data": [True, 2]}, "element 0 of data is true; FP32 takes numbers"),
    "number for a bool": (X | {"datatype": "BOOL"}, "element 0 of data is 1; BOOL takes true and false"),
    "fraction": (
        X | {"datatype": "INT8", "data": [1, 2.5]},
        "element 1 of data is 2.5; INT8 takes whole numbers",
    ),
    "int too large": (X | {"datatype": "INT8", "data": [1, 128]}, "element 1 is 128; INT8 has -128 to 127"),
    "negative unsigned": (X | {"datatype": "UINT64", "data": [-1, 1]}, "element 0 is -1; UINT64 has 0 to"),
    "beyond 64 bits": (
        X | {"datatype": "INT64", "data": [2**64, 1]},
        "element 0 of data is 1.8446744073709552e",
    ),
    "float too large": (
        X | {"datatype": "FP16", "data": [1, 70000]},
        "element 1 is 70000, beyond the range of FP16",
    ),
    "number for text": (
        X | {"datatype": "BYTES", "data": ["a", 1]},
        "element 1 of data is 1; BYTES takes strings",
    ),
    "base64 object for text": (
        X | {"datatype": "BYTES", "data": [{"b64": "!"}, "a"]},
        'element 0 of data is {"b64":"!"}; BYTES takes strings',
    ),
    "data and binary": (X | {"parameters": {"binary_data_size": 8}}, "both data and binary_data_size"),
    "binary size is text": (
        RAW | {"parameters": {"binary_data_size": "8"}},
        "must be a number of bytes, not '8'",
    ),
    "negative binary size": (
        RAW | {"parameters": {"binary_data_size": -8}},
        "must be a number of bytes, not -8",
    ),
    "binary without the header": (RAW, "Inference-Header-Content-Length is missing"),
    "parameters is a list": (X | {"parameters": [1]}, "parameters must be a JSON object"),
    "shared memory": (
        {"datatype": "FP32", "shape": [2], "parameters": {"shared_memory_region": "r"}},
        "the extension for shared memory is not served here",
    ),
}


@pytest.mark.parametrize(("tensor", "message"), BAD_TENSORS.values(), ids=BAD_TENSORS)
def test_bad_tensor(tensor: dict[str, Any], message: str) -> None:
    with pytest.raises(ServiceError, match=message) as error:
        decode(*rest_request({"x": tensor}))
    assert error.value.failure is INVALID
    assert len(str(error.value)) < 300


BAD_BODIES = {
    "empty": (b"", "invalid JSON"),
    "no JSON": (b"hello", "invalid JSON: .*line 1 column 1"),
    "cut off": (b'{"inputs": [', "invalid JSON"),
    "not UTF-8": (b'{"id": "\xff", "inputs": []}', "invalid JSON"),
    "NaN": (b'{"inputs": [{"data": [NaN]}]}', "JSON has no NaN or Infinity: send the tensor as binary data"),
    "Infinity": (b'{"inputs": [{"data": [-Infinity]}]}', "JSON has no NaN or Infinity"),
    "too large for a double": (b'{"inputs": [{"data": [1e999]}]}', "invalid JSON: number is infinity"),
    "binary without its header": (b'{"inputs": []}\0\0\0', "need the header Inference-Header-Content-Length"),
    "a list": (b"[]", "must be a JSON object"),
    "too deep": (b"[" * 100_000, "invalid JSON"),
    "no inputs": (b"{}", '"inputs" must be a list of tensors: it is missing'),
    "inputs is an object": (b'{"inputs": {}}', '"inputs" must be a list of tensors: not {}'),
    "input is a number": (b'{"inputs": [1]}', '"inputs" must hold objects with a "name", not 1'),
    "input without a name": (b'{"inputs": [{}]}', '"inputs" must hold objects with a "name", not {}'),
    "same input twice": (json.dumps({"inputs": [{"name": "x", **X}] * 2}).encode(), "input x is given twice"),
    "same output twice": (
        b'{"inputs": [], "outputs": [{"name": "y"}, {"name": "y"}]}',
        "output y is asked for twice",
    ),
    "outputs is text": (b'{"inputs": [], "outputs": "y"}', "\"outputs\" must be a list of tensors: not 'y'"),
    "id is a number": (b'{"inputs": [], "id": 1}', '"id" must be a string, not 1'),
    "timeout is text": (b'{"inputs": [], "parameters": {"timeout": "1"}}', "whole number of microseconds"),
    "negative timeout": (b'{"inputs": [], "parameters": {"timeout": -1}}', "whole number of microseconds"),
    "binary_data is a number": (
        b'{"inputs": [], "outputs": [{"name": "y", "parameters": {"binary_data": 1}}]}',
        "output y: parameter binary_data must be true or false, not 1",
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


@pytest.mark.parametrize("length", ["", "x", "-1", "1.5", "+3", "1" * 30, "٣"])
def test_header_length_must_be_a_number(length: str) -> None:
    with pytest.raises(ServiceError, match="it takes the JSON's length in bytes"):
        decode(b"{}", {"inference-header-content-length": length})


def test_header_length_must_be_within_the_body() -> None:
    with pytest.raises(ServiceError, match="is 3, but the body has 2 bytes"):
        decode(b"{}", {"inference-header-content-length": "3"})
    with pytest.raises(ServiceError, match="invalid JSON"):
        decode(*rest_request({}) and (b'{"inputs": []}', {"inference-header-content-length": "5"}))


BAD_BINARY = {
    "body too short": (RAW, b"\0" * 7, "binary_data_size is 8, but only 7 bytes are left"),
    "body too long": (RAW, b"\0" * 9, "1 bytes follow the last binary input"),
    "shape of more": (RAW | {"shape": [3]}, b"\0" * 8, r"8 bytes of data, but FP32 of shape \[3\] has 12"),
    "enormous shape": (RAW | {"shape": [2**30]}, b"\0" * 8, "has 4294967296"),
    "BOOL of 2": (
        {"datatype": "BOOL", "shape": [2], "parameters": {"binary_data_size": 2}},
        b"\1\2",
        "must be 0 or 1",
    ),
    "BYTES cut off": (
        {"datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 6}},
        b"\3\0\0\0ab",
        "element 0 of BYTES goes beyond the 6 bytes of data",
    ),
    "BYTES length cut off": (
        {"datatype": "BYTES", "shape": [2], "parameters": {"binary_data_size": 8}},
        b"\1\0\0\0a\0\0\0",
        "element 1 of BYTES goes beyond",
    ),
    "more BYTES than bytes": (
        {"datatype": "BYTES", "shape": [10**12], "parameters": {"binary_data_size": 4}},
        b"\0\0\0\0",
        "4 bytes cannot hold 1000000000000 BYTES elements",
    ),
    "BYTES too many": (
        {"datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 8}},
        b"\0" * 8,
        "4 bytes follow the 1 elements",
    ),
    "BYTES not UTF-8": (
        {"datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 5}},
        b"\1\0\0\0\xff",
        "element 0 is not UTF-8",
    ),
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


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", [DATATYPES[name] for name in sorted(FLOATS)], ids=lambda kind: kind.name)
def test_json_never_says_null_for_a_number(kind: Datatype, value: float) -> None:
    array = np.array([1, value], kind.dtype)
    with pytest.raises(ServiceError, match='output y holds NaN or infinity.*"binary_data": true') as error:
        codec_rest.encode(result(array), codec_rest.Form())
    assert error.value.failure is INVALID
    content, _ = codec_rest.encode(result(array), codec_rest.Form(binary=True))
    assert content.endswith(array.tobytes())


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60), st.one_of(st.none(), st.integers(-1, 70)))
def test_noise_is_refused_not_crashed_on(body: bytes, length: int | None) -> None:
    try:
        decode(body, {} if length is None else {"inference-header-content-length": str(length)})
    except ServiceError:
        return
    assert b'"inputs"' in body  # the least that is a request: {"inputs":[]}


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**66), 2**66)
    | st.floats(allow_nan=False)
    | st.text(max_size=4)
    | st.sampled_from(["FP32", "INT8", "BYTES", "BF16", "BOOL"]),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(st.fixed_dictionaries({}, optional=dict.fromkeys(("datatype", "shape", "data", "parameters"), JSON)))
def test_any_json_is_decoded_or_refused(tensor: dict[str, Any]) -> None:
    body, headers = rest_request({"x": tensor})
    if b"Infinity" in body:
        return
    try:
        assert decode(body, headers).inputs["x"].size >= 0
    except ServiceError as error:
        assert error.failure is INVALID


# -------------------------------------------------------------------------------- bad input, compressed


@pytest.mark.parametrize(("wbits", "name"), [(31, "gzip"), (15, "deflate")])
def test_compressed_bodies(wbits: int, name: str) -> None:
    deflate = zlib.compressobj(wbits=wbits)
    body = deflate.compress(b"x" * 1000) + deflate.flush()
    assert decompressed(body, wbits, 1000) == b"x" * 1000
    with pytest.raises(ServiceError, match="larger than 999 bytes") as error:
        decompressed(body, wbits, 999)
    assert error.value.failure is TOO_LARGE
    for damaged in (body[:-1], body[:5], body + b"more", b"no " + body):
        with pytest.raises(ServiceError, match="compressed body is"):
            decompressed(damaged, wbits, 1000)


def test_a_bomb_is_not_decompressed() -> None:
    deflate = zlib.compressobj(9, wbits=31)
    bomb = deflate.compress(bytes(1 << 28)) + deflate.flush()
    start = time.perf_counter()
    with pytest.raises(ServiceError, match="the decompressed request is larger than 1000 bytes"):
        decompressed(bomb, 31, 1000)
    assert time.perf_counter() - start < 0.1


# -------------------------------------------------------------------------------- bad input, gRPC


def message_with(**tensor: Any) -> Any:
    raw = tensor.pop("raw", None)
    message = pb.ModelInferRequest(
        model_name="m", inputs=[{"name": "x", "datatype": "FP32", "shape": [2], **tensor}]
    )
    if raw is not None:
        message.raw_input_contents.extend(raw)
    return message


BAD_MESSAGES = {
    "raw and typed": (
        message_with(raw=[b"\0" * 8], contents={"fp32_contents": [1, 2]}),
        "contents besides raw_input_contents",
    ),
    "too few raw": (
        pb.ModelInferRequest(inputs=[{"name": "x"}, {"name": "y"}], raw_input_contents=[b""]),
        "2 inputs, but 1 raw_input_contents",
    ),
    "raw too short": (message_with(raw=[b"\0" * 7]), r"7 bytes of data, but FP32 of shape \[2\] has 8"),
    "negative shape": (message_with(raw=[b""], shape=[-1]), r"shape \[-1\] must be"),
    "enormous shape": (message_with(raw=[b""], shape=[2**62, 2**62]), "larger than any tensor"),
    "unknown datatype": (message_with(raw=[b""], datatype="TENSOR"), "datatype 'TENSOR' is none of"),
    "typed too short": (
        message_with(contents={"fp32_contents": [1]}),
        r"1 elements in contents, but shape \[2\] has 2",
    ),
    "no contents": (message_with(), r"0 elements in contents, but shape \[2\] has 2"),
    "wrong contents": (
        message_with(contents={"int_contents": [1, 2]}),
        "FP32 is sent in fp32_contents, not in int_contents",
    ),
    "FP16 typed": (message_with(datatype="FP16"), "FP16 has no typed contents: send raw_input_contents"),
    "INT8 out of range": (
        message_with(datatype="INT8", contents={"int_contents": [1, 200]}),
        "element 1 is 200; INT8 has -128 to 127",
    ),
    "UINT16 out of range": (
        message_with(datatype="UINT16", contents={"uint_contents": [65536, 1]}),
        "element 0 is 65536; UINT16 has",
    ),
    "BYTES not UTF-8": (
        message_with(datatype="BYTES", contents={"bytes_contents": [b"a", b"\xff"]}),
        "element 1 is not UTF-8",
    ),
    "same input twice": (
        pb.ModelInferRequest(inputs=[{"name": "x", "datatype": "FP32", "shape": [0]}] * 2),
        "input x is given twice",
    ),
    "same output twice": (pb.ModelInferRequest(outputs=[{"name": "y"}] * 2), "output y is asked for twice"),
    "classification": (
        pb.ModelInferRequest(
            outputs=[{"name": "y", "parameters": {"classification": pb.InferParameter(int64_param=3)}}]
        ),
        "the extension for classification is not served here",
    ),
    "shared memory": (
        message_with(parameters={"shared_memory_region": pb.InferParameter(string_param="r")}),
        "the extension for shared memory is not served here",
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


def test_unknown_version_over_grpc() -> None:
    with pytest.raises(ServiceError, match="model m has no version 'x'") as error:
        codec_grpc.decode(pb.ModelInferRequest(model_name="m", model_version="x"), None)
    assert error.value.failure is NOT_FOUND
