"""KServe's classes that ours extend. All of them come from here, for one reason:

KServe reads sys.argv when it is imported (its own options, argparse): ours must not reach it.
"""

import sys

_argv, sys.argv = sys.argv, sys.argv[:1]
try:
    from kserve.errors import InvalidInput, ModelNotFound, ModelNotReady
    from kserve.model import InferenceModel, InferenceVerb
    from kserve.model_repository import ModelRepository
    from kserve.model_server import ModelServer
    from kserve.protocol.dataplane import DataPlane
    from kserve.protocol.grpc import grpc_predict_v2_pb2 as pb
    from kserve.protocol.grpc import grpc_predict_v2_pb2_grpc as pb_grpc
    from kserve.protocol.grpc.server import GRPCServer
    from kserve.protocol.grpc.servicer import InferenceServicer
    from kserve.protocol.rest.server import RESTServer, _RefreshingServer, metrics_handler
    from kserve.protocol.rest.v2_endpoints import V2Endpoints
finally:
    sys.argv = _argv

RefreshingServer = _RefreshingServer  # uvicorn's server that also reloads renewed TLS certificates

__all__ = [
    "DataPlane",
    "GRPCServer",
    "InferenceModel",
    "InferenceServicer",
    "InferenceVerb",
    "InvalidInput",
    "ModelNotFound",
    "ModelNotReady",
    "ModelRepository",
    "ModelServer",
    "RESTServer",
    "RefreshingServer",
    "V2Endpoints",
    "metrics_handler",
    "pb",
    "pb_grpc",
]
