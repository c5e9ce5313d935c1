"""What torch and onnxscript read anew for each export is read once by a process of the tests."""

import copy
import logging
import sys
from functools import cache
from typing import Any


def keep() -> None:
    """Makes those packages that are imported keep what they read."""
    if module := sys.modules.get("torch.onnx._internal.exporter._registration"):
        _keep_functions(module)
    if module := sys.modules.get("torch._export.utils"):
        _keep_composite_ops(module)
    if module := sys.modules.get("onnx_ir.schemas"):
        _keep_signatures(module)


def keep_opset(version: int) -> None:
    """Reads the functions of torch's dynamo exporter now: processes that are forked then have a copy."""
    keep()
    logging.disable(logging.WARNING)  # which packages are missing
    sys.modules["torch.onnx._internal.exporter._registration"].ONNXRegistry.from_torchlib(version)
    logging.disable(logging.NOTSET)


@cache
def _keep_functions(torch_registry: Any) -> None:
    build = cache(torch_registry.ONNXRegistry.from_torchlib)  # parses 500 functions: half a second

    def from_torchlib(opset_version: int) -> Any:
        registry = copy.copy(build(opset_version))  # an export adds its own functions
        registry.functions = {target: [*found] for target, found in registry.functions.items()}
        return registry

    torch_registry.ONNXRegistry.from_torchlib = staticmethod(from_torchlib)


@cache
def _keep_composite_ops(export_utils: Any) -> None:
    """torch.ops gets all of them once for each namespace, and each domain is one: 2 ms."""
    import torch

    registered = torch._C._dispatch_get_registrations_for_dispatch_key
    materialize = export_utils._materialize_cpp_cia_ops
    of_so_many = cache(lambda count: materialize())
    export_utils._materialize_cpp_cia_ops = lambda: of_so_many(len(registered("CompositeImplicitAutograd")))


@cache
def _keep_signatures(onnx_schemas: Any) -> None:
    signature = onnx_schemas.OpSignature
    read = signature.from_op_schema
    kept: dict[tuple[str, str, int], Any] = {}

    def from_op_schema(schema: Any) -> Any:
        key = (schema.domain, schema.name, schema.since_version)
        if key not in kept:
            kept[key] = read(schema)
        return kept[key]

    signature.from_op_schema = staticmethod(from_op_schema)
