"""One row of four numbers as a request over HTTP and gRPC, and a model whose answers tell its version."""

import json
from typing import Any

import grpc
import numpy as np
import onnx
import pytest
from service_fixtures import Served, tensor
from service_models import mlp
from tritonclient.grpc import service_pb2 as pb

ROW = tensor("x", "FP32", [1, 4], [-1.0, 2.0, -3.0, 4.0])
QUICK = ("--provider", "cpu")
LIMIT = 16 << 20  # max_request_bytes of the server that most tests share


def message(model: str, *numbers: float, name: str = "x", **fields: Any) -> pb.ModelInferRequest:
    """Return a typed gRPC request with one row of numbers, zeros if none are given."""
    request = pb.ModelInferRequest(model_name=model, **fields)
    row = numbers or (0, 0, 0, 0)
    given = request.inputs.add(name=name, datatype="FP32", shape=[1, len(row)])
    given.contents.fp32_contents.extend(row)
    return request


def binary(x: np.ndarray) -> tuple[bytes, dict[str, str]]:
    """Return the body and the headers of a request with x (FP32) in binary, as its answer is."""
    given = {"name": "x", "datatype": "FP32", "shape": x.shape, "parameters": {"binary_data_size": x.nbytes}}
    head = json.dumps({"inputs": [given], "parameters": {"binary_data_output": True}}).encode()
    return head + x.tobytes(), {"inference-header-content-length": str(len(head))}


def y_of(served: Served, model: str) -> list[float]:
    """Return the model's answer to ROW."""
    answer = served.infer(model, ROW)
    assert answer.status == 200, answer
    data: list[float] = answer.json["outputs"][0]["data"]
    return data


def call(served: Served, model: str, seconds: float = 60) -> Any:
    """Send ROW over gRPC as raw contents."""
    request = pb.ModelInferRequest(
        model_name=model, raw_input_contents=[np.array(ROW["data"], "f4").tobytes()]
    )
    request.inputs.add(name="x", datatype="FP32", shape=ROW["shape"])
    with served.stub() as stub:
        return stub.ModelInfer(request, timeout=seconds)


def refused(stub: Any, request: pb.ModelInferRequest) -> tuple[grpc.StatusCode, str]:
    """Return the code and the message of a call that fails."""
    with pytest.raises(grpc.RpcError) as error:
        stub.ModelInfer(request, timeout=60)
    assert dict(error.value.trailing_metadata())["x-request-id"]
    return error.value.code(), error.value.details()


def scaled(factor: float) -> onnx.ModelProto:
    """Return a model that multiplies its input by `factor`."""
    model = mlp(4, 4, custom=False)
    weight = onnx.numpy_helper.from_array(np.eye(4, dtype=np.float32) * np.float32(factor), "w0")
    model.graph.initializer[0].CopyFrom(weight)
    return model


def in_flight(served: Served, number: int, model: str = "slow") -> bool:
    """Return whether the model has this many accepted requests that have not ended."""
    return served.metric("twinop_in_flight", model=model) == number
