"""The gRPC codec alone: each contradiction in a request has a message."""

from typing import Any

import pytest

from twinop.deploy.service import codec_grpc
from twinop.deploy.service.errors import INVALID, NOT_FOUND, TOO_LARGE, ServiceError
from twinop.deploy.service.protocol import pb


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
    "unknown datatype": (message_with(raw=[b""], datatype="TENSOR"), "datatype 'TENSOR' is not one of"),
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


def test_unknown_version_over_grpc() -> None:
    with pytest.raises(ServiceError, match="model m has no version 'x'") as error:
        codec_grpc.decode(pb.ModelInferRequest(model_name="m", model_version="x"), None)
    assert error.value.failure is NOT_FOUND


def varint(number: int, length: int = 1) -> bytes:
    """Encode a number in at least `length` bytes, as protobuf accepts it."""
    parts = list[int]()
    while number > 0x7F or len(parts) < length - 1:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*parts, number])


@pytest.mark.parametrize("key", [16, 2000, 300_000])
def test_typed_contents_do_not_hide_behind_an_unknown_field(key: int) -> None:
    """To who takes its key for one byte, the unknown field's content announces raw contents to the end."""
    message = message_with(contents={"int_contents": [1] * (codec_grpc.MOST_TYPED_BYTES + 1)})
    typed = message.SerializeToString()
    for before in range(4):
        content = bytes(before) + varint(codec_grpc._RAW_KEY) + varint(len(typed))
        data = varint(key << 3 | 2) + varint(len(content)) + content + typed
        assert len(pb.ModelInferRequest.FromString(data).inputs) == 1
        with pytest.raises(ServiceError, match="outside of raw_input_contents") as caught:
            codec_grpc.parse(data)
        assert caught.value.failure is TOO_LARGE


def test_raw_contents_are_found_behind_long_keys() -> None:
    raw = bytes(2 * codec_grpc.MOST_TYPED_BYTES)
    for length in (1, 2, 3):
        data = varint(2000 << 3 | 2) + varint(3) + b"abc" + varint(codec_grpc._RAW_KEY, length)
        assert codec_grpc.parse(data + varint(len(raw)) + raw).raw_input_contents == [raw]
