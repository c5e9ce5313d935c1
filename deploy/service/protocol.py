"""KServe's protobuf messages of the Open Inference Protocol. Importing KServe itself would take a second."""

from typing import TYPE_CHECKING

from .protobufs import generated_module

if TYPE_CHECKING:
    from kserve.protocol.grpc import grpc_predict_v2_pb2 as pb
else:
    pb = generated_module("kserve", "protocol", "grpc", "grpc_predict_v2_pb2.py")

SERVICE = "inference.GRPCInferenceService"

__all__ = ["SERVICE", "pb"]
