"""Triton's protobuf messages of the Open Inference Protocol, a superset of KServe's."""

from tritonclient.grpc import service_pb2 as pb

SERVICE = "inference.GRPCInferenceService"

__all__ = ["SERVICE", "pb"]
