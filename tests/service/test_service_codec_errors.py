"""The REST codec alone: each error in a request has a message, and nothing crashes."""

import json
import tracemalloc
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from service_codecs import FLOATS, decode, rest_request, result

from twinop.deploy.service import codec_rest
from twinop.deploy.service.datatypes import DATATYPES, Datatype
from twinop.deploy.service.errors import INVALID, NOT_FOUND, TOO_LARGE, ServiceError
from twinop.deploy.service.http_body import Limit, decompressed

# -------------------------------------------------------------------------------- bad input, REST

X = {"datatype": "FP32", "shape": [2], "data": [1, 2]}
RAW = {"datatype": "FP32", "shape": [2], "parameters": {"binary_data_size": 8}}

BAD_TENSORS = {
    "no datatype": (X | {"datatype": None}, "datatype None is not one of BOOL, UINT8"),
    "unknown datatype": (X | {"datatype": "FLOAT"}, "datatype 'FLOAT' is not one of"),
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
        "input x: shared memory is not served: send tensors, and ask for them, in the messages",
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
    "braces in it": (b'{"inputs": []}' + b"{\0" * 60_000, "need the header Inference-Header-Content-Length"),
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
        codec_rest.encode(result(array), codec_rest.AnswerFormat())
    assert error.value.failure is INVALID
    content, _ = codec_rest.encode(result(array), codec_rest.AnswerFormat(binary=True))
    assert content.endswith(array.tobytes())


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60), st.one_of(st.none(), st.integers(-1, 70)))
def test_noise_is_refused_not_crashed_on(body: bytes, length: int | None) -> None:
    try:
        decode(body, {} if length is None else {"inference-header-content-length": str(length)})
    except ServiceError:
        return
    assert b'"inputs"' in body  # the smallest request is {"inputs":[]}


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
    assert decompressed(body, wbits, Limit(1000)) == b"x" * 1000
    with pytest.raises(ServiceError, match="larger than 999 bytes") as error:
        decompressed(body, wbits, Limit(999))
    assert error.value.failure is TOO_LARGE
    for damaged in (body[:-1], body[:5], body + b"more", b"no " + body):
        with pytest.raises(ServiceError, match="compressed body is"):
            decompressed(damaged, wbits, Limit(1000))


def test_a_bomb_is_not_decompressed() -> None:
    deflate = zlib.compressobj(9, wbits=31)
    bomb = deflate.compress(bytes(1 << 26)) + deflate.flush()
    tracemalloc.start()
    try:
        with pytest.raises(ServiceError, match="the decompressed request is larger than 1000 bytes"):
            decompressed(bomb, 31, Limit(1000))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
