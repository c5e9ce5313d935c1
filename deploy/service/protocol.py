"""Triton's protobuf messages: the Open Inference Protocol, a superset of KServe's, and config.pbtxt."""

from tritonclient.grpc import model_config_pb2
from tritonclient.grpc import service_pb2 as pb

SERVICE = "inference.GRPCInferenceService"

__all__ = ["SERVICE", "model_config_pb2", "pb"]
