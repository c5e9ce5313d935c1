"""Large gRPC messages: what protobuf reads is read of them, what it writes is written, byte for byte."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from service_codecs import result, strings, typed

from twinop.deploy.service import codec_grpc, wire
from twinop.deploy.service._kserve import pb
from twinop.deploy.service.datatypes import BYTES, DATATYPES, Datatype, to_bytes
from twinop.deploy.service.errors import TOO_LARGE, ServiceError
from twinop.deploy.service.request import Result

TYPED = [kind for kind in DATATYPES.values() if kind.contents]
NUMBERS = [kind for kind in TYPED if kind is not BYTES]
INT_CONTENTS, CONTENTS, INPUTS = 2, 5, 5  # their numbers in the messages
WIDE = (
    np.random.default_rng(0).integers(-(1 << 63), 1 << 63, 150_001, dtype=np.int64) >> np.arange(150_001) % 64
)


@pytest.fixture(scope="module", autouse=True)
def _all_are_large() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "LARGE", 0)
        patch.setattr(wire, "_LARGE_INPUT", 0)
        patch.setattr(codec_grpc, "_FEW", 1)
        yield


def arrays(kind: Datatype) -> st.SearchStrategy[np.ndarray]:
    if kind is BYTES:
        return st.lists(st.text(max_size=5), max_size=5).map(strings)
    if kind.name == "BOOL":
        return st.lists(st.booleans(), max_size=9).map(np.array).map(lambda array: array.astype(np.bool_))
    if kind.dtype.kind == "f":  # no NaN but one: Python's floats quiet the signalling ones
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
    """All that a request says, or why it is refused."""
    try:
        request = read(data)
        asked, form = codec_grpc.decode(request.message, None, bulk=request.bulk)
    except (DecodeError, ServiceError) as error:
        return type(error), str(error) if isinstance(error, ServiceError) else ""
    tensors = [
        (name, array.dtype, array.shape, bytes(to_bytes(array))) for name, array in asked.inputs.items()
    ]
    assert all(array.flags.aligned for array in asked.inputs.values())
    return tensors, asked.model, asked.outputs, asked.version, request.id, form


def by_protobuf(data: bytes) -> wire.InferRequest:
    return wire.InferRequest(pb.ModelInferRequest.FromString(data), len(data))


# -------------------------------------------------------------------------------- requests


@settings(max_examples=100, deadline=None)
@given(requests())
def test_a_request_is_what_protobuf_reads(message: pb.ModelInferRequest) -> None:
    data = message.SerializeToString()
    request = wire.parse(data)
    assert request.bulk is not None and not request.message.raw_input_contents
    for index, tensor in enumerate(request.message.inputs):
        assert index not in request.bulk.typed or not tensor.HasField("contents")
    assert outcome(data, wire.parse) == outcome(data, by_protobuf)


@settings(max_examples=400, deadline=None)
@given(requests(), st.data())
def test_a_damaged_request_is_what_protobuf_reads(message: pb.ModelInferRequest, data: st.DataObject) -> None:
    content = bytearray(message.SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content)))
        removed, added = data.draw(st.integers(0, 2)), data.draw(st.binary(max_size=2))
        content[at : at + removed] = added
    assert outcome(bytes(content), wire.parse) == outcome(bytes(content), by_protobuf)


def field(number: int, *parts: bytes) -> bytes:
    return b"".join(wire.prefixed(number, *parts))


def int8(*contents: bytes, shape: int = 3) -> bytes:
    tensor = pb.ModelInferRequest.InferInputTensor(name="x", datatype="INT8", shape=[shape])
    return field(INPUTS, tensor.SerializeToString(), *(field(CONTENTS, each) for each in contents))


TEN = b"\xff" * 9  # of a number of ten bytes, all but the last


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(
            int8(field(INT_CONTENTS, b"\1\2"), field(INT_CONTENTS, b"\3")), id="contents in two parts"
        ),
        pytest.param(
            int8(field(INT_CONTENTS, b"\1\2") + field(INT_CONTENTS, b"\3")), id="numbers in two parts"
        ),
        pytest.param(int8(field(INT_CONTENTS, b"\1\2\3") + field(INT_CONTENTS)), id="an empty part"),
        pytest.param(int8(b"\x10\1\x10\2\x10\3"), id="not packed"),
        pytest.param(int8(field(INT_CONTENTS, b"\1\2") + b"\x10\3"), id="packed and not packed"),
        pytest.param(int8(field(INT_CONTENTS, b"\1") + field(3, b"\1\2")), id="two fields"),
        pytest.param(int8(field(3, b"\1\2\3")), id="another type's field"),
        pytest.param(int8(field(99, b"\1\2\3")), id="an unknown field"),
        pytest.param(int8(field(8, b"\1\2\3")), id="strings"),
        pytest.param(int8(field(INT_CONTENTS, b"\1\2\3"), shape=4), id="too few"),
        pytest.param(int8(field(INT_CONTENTS, b"\1\2\x80\1")), id="out of range"),
        pytest.param(int8(field(INT_CONTENTS, b"\1\2", TEN + b"\1")), id="minus one"),
        pytest.param(int8(field(INT_CONTENTS, b"\1\2", TEN + b"\2")), id="65 bits"),
        pytest.param(int8(field(INT_CONTENTS, b"\1\2", TEN + b"\x81\0")), id="eleven bytes"),
        pytest.param(int8(field(INT_CONTENTS, b"\1\x80\0\x82\x80\0")), id="longer than needed"),
        pytest.param(int8(field(INT_CONTENTS, b"\1\2\xff")), id="cut off in a number"),
        pytest.param(int8(field(INT_CONTENTS, b"\xff" * 30)), id="no end"),
        pytest.param(int8(field(6, b"\0" * 11)), id="not whole floats"),
        pytest.param(int8(field(INT_CONTENTS, b"\1\2\3")) + field(7, b"\1\2\3"), id="typed and raw"),
        pytest.param(int8(field(INT_CONTENTS, b"\1\2\3"))[:-1], id="cut off"),
        pytest.param(b"\x0b\x0c", id="a group"),
        pytest.param(b"\x0e", id="no wire type"),
        pytest.param(b"\0\0", id="field 0"),
        pytest.param(b"\xba\x80\x80\x80\x80\0\1\0", id="a long key"),
        pytest.param(int8(field(6), shape=0), id="none, of another type's field"),
        pytest.param(field(6, b"") * 1100 + int8(field(INT_CONTENTS, b"\1\2\3")), id="many fields"),
    ],
)
def test_unusual_requests_are_what_protobuf_reads(data: bytes) -> None:
    assert outcome(data, wire.parse) == outcome(data, by_protobuf)


@pytest.mark.parametrize(
    "data",
    [
        int8(*[field(INT_CONTENTS, b"\1") * 100] * 100, shape=10_000),
        b"".join(int8(field(INT_CONTENTS, b"\1") * 100, shape=100) for _ in range(64)),
    ],
    ids=["of one tensor", "of many"],
)
def test_a_message_of_many_small_parts_is_protobufs(data: bytes) -> None:
    """Reading these one by one took a second of a core for each 200 KB."""
    request = wire.parse(data)
    assert request.bulk is None and outcome(data, wire.parse) == outcome(data, by_protobuf)


@pytest.mark.parametrize("kind", NUMBERS, ids=lambda kind: kind.name)
def test_a_tensor_of_many_pieces(kind: Datatype) -> None:
    """Numbers of one to ten bytes, across the pieces that they are converted in."""
    with np.errstate(over="ignore", invalid="ignore"):
        array = WIDE.astype(kind.dtype)
    data = pb.ModelInferRequest(inputs=[typed(array, kind)]).SerializeToString()
    request = wire.parse(data)
    assert request.bulk is not None and request.bulk.typed.keys() == {0}
    decoded, form = codec_grpc.decode(request.message, None, bulk=request.bulk)
    np.testing.assert_array_equal(decoded.inputs["x"], array)
    assert codec_grpc.encode(result(array), form) == answer_of(array, kind)


# -------------------------------------------------------------------------------- answers


def answer_of(array: np.ndarray, kind: Datatype) -> bytes:
    """As protobuf writes it."""
    answer = pb.ModelInferResponse(model_name="m", model_version="3")
    tensor = answer.outputs.add(name="y", datatype=kind.name, shape=array.shape)
    tensor.contents.MergeFrom(typed(array, kind).contents)
    if not array.size:
        tensor.ClearField("contents")
    data: bytes = answer.SerializeToString()
    return data


@pytest.mark.parametrize("kind", TYPED, ids=lambda kind: kind.name)
@settings(max_examples=40, deadline=None)
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
    small = np.full(1 << 10, -1, np.int8)  # ten bytes each
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "MOST_BYTES", 10 << 10)
        with pytest.raises(ServiceError, match="larger than the 2 GiB"):
            codec_grpc.encode(result(small), codec_grpc.Form("", raw=False))
        assert codec_grpc.encode(result(small), codec_grpc.Form("", raw=True))
