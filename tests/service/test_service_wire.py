"""Large gRPC messages: splitting them yields what protobuf reads and writes as a whole."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from service_codecs import result, strings, typed

from twinop.deploy.service import codec_grpc, wire
from twinop.deploy.service.datatypes import BYTES, DATATYPES, Datatype, to_bytes
from twinop.deploy.service.errors import TOO_LARGE, ServiceError
from twinop.deploy.service.protocol import pb
from twinop.deploy.service.request import Result

TYPED = [kind for kind in DATATYPES.values() if kind.contents]
NUMBERS = [kind for kind in TYPED if kind is not BYTES]
RAW = 7  # the field raw_input_contents


@pytest.fixture(scope="module", autouse=True)
def _all_are_large() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "LARGE", 0)
        yield


def arrays(kind: Datatype) -> st.SearchStrategy[np.ndarray]:
    if kind is BYTES:
        return st.lists(st.text(max_size=5), max_size=5).map(strings)
    if kind.name == "BOOL":
        return st.lists(st.booleans(), max_size=9).map(np.array).map(lambda array: array.astype(np.bool_))
    if kind.dtype.kind == "f":  # one kind of NaN only: Python's floats quiet signalling NaNs
        data = st.binary(max_size=80).map(lambda data: np.frombuffer(data[: len(data) // 8 * 8], kind.dtype))
        return data.map(lambda array: np.where(np.isnan(array), kind.dtype.type(np.nan), array))
    limits = np.iinfo(kind.dtype)
    numbers = st.integers(0, 130) | st.integers(int(limits.min), int(limits.max))
    numbers = numbers.filter(lambda number: limits.min <= number <= limits.max)
    return st.lists(numbers, max_size=9).map(lambda values: np.array(values, kind.dtype))


@st.composite
def requests(draw: st.DrawFn) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(
        model_name="m", id="7", parameters={"a": pb.InferParameter(int64_param=-1)}
    )
    is_raw = draw(st.booleans())
    for name in draw(st.sampled_from(["", "x", "xy"])):
        kind = draw(st.sampled_from(list(DATATYPES.values()) if is_raw else TYPED))
        array = draw(arrays(kind if kind.contents else DATATYPES["UINT16"])).view(kind.dtype)
        if is_raw:
            message.inputs.add(name=name, datatype=kind.name, shape=array.shape)
            message.raw_input_contents.append(bytes(to_bytes(array)))
        else:
            message.inputs.append(typed(array, kind, name))
    for name in draw(st.sampled_from(["", "y"])):
        message.outputs.add(name=name)
    return message


def outcome(data: bytes, read: Any) -> Any:
    """Return all that a request says, or why it is refused."""
    try:
        request = read(data)
        asked, form = codec_grpc.decode(request.message, None, raw=request.raw)
    except (DecodeError, ServiceError) as error:
        return type(error), str(error) if isinstance(error, ServiceError) else ""
    tensors = [
        (name, array.dtype, array.shape, bytes(to_bytes(array))) for name, array in asked.inputs.items()
    ]
    assert all(array.flags.aligned for array in asked.inputs.values())
    return tensors, asked.model, asked.outputs, asked.version, request.id, form


def by_protobuf(data: bytes) -> wire.InferRequest:
    message = pb.ModelInferRequest.FromString(data)
    return wire.InferRequest(message, len(data), message.raw_input_contents)


# -------------------------------------------------------------------------------- requests


@settings(max_examples=60, deadline=None)
@given(requests())
def test_a_request_is_what_protobuf_reads(message: pb.ModelInferRequest) -> None:
    data = message.SerializeToString()
    assert not wire.parse(data).message.raw_input_contents
    assert outcome(data, wire.parse) == outcome(data, by_protobuf)


@settings(max_examples=200, deadline=None)
@given(requests(), st.data())
def test_a_damaged_request_is_what_protobuf_reads(message: pb.ModelInferRequest, data: st.DataObject) -> None:
    content = bytearray(message.SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content)))
        removed, added = data.draw(st.integers(0, 2)), data.draw(st.binary(max_size=2))
        content[at : at + removed] = added
    assert outcome(bytes(content), wire.parse) == outcome(bytes(content), by_protobuf)


TENSOR = pb.ModelInferRequest.InferInputTensor(name="x", datatype="INT8", shape=[3])
INPUT = wire.field(5, TENSOR.SerializeToString())
UNUSUAL = {
    "raw before its input": wire.field(RAW, b"\1\2\3") + INPUT,
    "cut off": (INPUT + wire.field(RAW, b"\1\2\3"))[:-1],
    "a length that is longer than needed": INPUT + b"\x3a\x83\x80\0\1\2\3",
    "a length of six bytes": INPUT + b"\x3a\x83\x80\x80\x80\x80\0\1\2\3",
    "a length without an end": INPUT + b"\x3a" + b"\xff" * 9,
    "a group": b"\x0b\x0c",
    "no wire type": b"\x0e",
    "field 0": b"\2\0",
    "a number": INPUT + b"\x38\1",
    "a long key": INPUT + b"\xba\x80\x80\x80\x80\0\1\0",
    "an unknown field": wire.field(9, b"\1") + INPUT + wire.field(RAW, b"\1\2\3"),
    "a text that is not UTF-8": wire.field(1, b"\xff") + INPUT + wire.field(RAW, b"\1\2\3"),
    "many fields": wire.field(6, b"") * 1100 + INPUT + wire.field(RAW, b"\1\2\3"),
}


@pytest.mark.parametrize("data", UNUSUAL.values(), ids=UNUSUAL)
def test_unusual_requests_are_what_protobuf_reads(data: bytes) -> None:
    assert outcome(data, wire.parse) == outcome(data, by_protobuf)


@pytest.mark.parametrize("kind", NUMBERS, ids=lambda kind: kind.name)
def test_a_tensor_of_many_pieces(kind: Datatype) -> None:
    """Numbers of one to ten bytes; there are more than one conversion step takes."""
    size = 70_001
    wide = (
        np.random.default_rng(0).integers(-(1 << 63), 1 << 63, size, dtype=np.int64) >> np.arange(size) % 64
    )
    with np.errstate(over="ignore", invalid="ignore"):
        array = wide.astype(kind.dtype)
    request = wire.parse(pb.ModelInferRequest(inputs=[typed(array, kind)]).SerializeToString())
    decoded, form = codec_grpc.decode(request.message, None, raw=request.raw)
    np.testing.assert_array_equal(decoded.inputs["x"], array)
    assert codec_grpc.encode(result(array), form) == answer_of(array, kind)


# -------------------------------------------------------------------------------- answers


def answer_of(array: np.ndarray, kind: Datatype) -> bytes:
    """Return the answer as protobuf writes it."""
    answer = pb.ModelInferResponse(model_name="m", model_version="3")
    tensor = answer.outputs.add(name="y", datatype=kind.name, shape=array.shape)
    tensor.contents.MergeFrom(typed(array, kind).contents)
    if not array.size:
        tensor.ClearField("contents")
    data: bytes = answer.SerializeToString()
    return data


@pytest.mark.parametrize("kind", TYPED, ids=lambda kind: kind.name)
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_an_answer_is_what_protobuf_writes(kind: Datatype, data: st.DataObject) -> None:
    array = data.draw(arrays(kind))
    assert codec_grpc.encode(result(array), codec_grpc.Form("", raw=False)) == answer_of(array, kind)
    raw = pb.ModelInferResponse(
        model_name="m", model_version="3", raw_output_contents=[bytes(to_bytes(array))]
    )
    raw.outputs.add(name="y", datatype=kind.name, shape=array.shape)
    assert codec_grpc.encode(result(array), codec_grpc.Form("", raw=True)) == raw.SerializeToString()


@pytest.mark.parametrize(("dtype", "count"), [(np.float32, 1 << 29), (np.int8, 1 << 31)])
def test_more_than_a_message_can_hold(dtype: type, count: int) -> None:
    large = np.broadcast_to(dtype(0), (count,))
    with pytest.raises(
        ServiceError, match="larger than the 2 GiB .*: ask for fewer of them, or over HTTP"
    ) as error:
        codec_grpc.encode(Result("m", 1, {"y": large}), codec_grpc.Form("", raw=True))
    assert error.value.failure is TOO_LARGE
    small = np.full(1 << 10, -1, np.int8)  # each takes ten bytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec_grpc, "MOST_BYTES", 10 << 10)
        with pytest.raises(ServiceError, match="larger than the 2 GiB"):
            codec_grpc.encode(result(small), codec_grpc.Form("", raw=False))
        assert codec_grpc.encode(result(small), codec_grpc.Form("", raw=True))
