"""Estimates what a model takes on the CPU beside its file, which ONNX Runtime maps into memory."""

import math
from collections.abc import Sequence

import onnx

from twinop.libraries.library import Library
from twinop.system.memory import free_bytes

from .custom_nodes import Model, custom_nodes, is_custom
from .errors import ModelError

_SMALL = 1 << 30  # bytes that are not worth a look at what is free
_HALF = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
_PACK = ("Gemm", "MatMul", "MatMulNBits")
_LOOK_UP = "CustomEmbedLayerNorm"


def cpu_bytes(model: Model) -> int:
    """Returns what matmuls on the CPU pack of integer and fp32 weights, and of 16-bit ones, in fp32."""
    nodes = custom_nodes(
        model.proto, lambda node: node.op_type in _PACK or (is_custom(node) and node.op_type != _LOOK_UP)
    )
    read = {name for node in nodes for name in node.proto.input}
    weights = [each for each in model.proto.graph.initializer if len(each.dims) > 1 and each.name in read]
    return sum(math.prod(each.dims) * (4 if each.data_type in _HALF else _size(each)) for each in weights)


def require_memory(model: Model, libraries: Sequence[Library]) -> None:
    """Raises ModelError if a model takes more on the CPU than is free."""
    needed = cpu_bytes(model)
    if needed <= _SMALL or needed <= (free := free_bytes()):
        return
    cure = "Run it on a GPU or on a machine with more"
    if libraries and model.nodes:
        cure += ", or optimise the original for the CPU: twinop optimize --device cpu"
    raise ModelError(
        f"{model.name} takes about {needed / 1e9:.3g} GB of memory on the CPU, where matmuls repack their "
        f"weights (16-bit ones as fp32), and {free / 1e9:.3g} GB are free. {cure}"
    )


def _size(tensor: onnx.TensorProto) -> int:
    if tensor.data_type not in onnx.helper.get_all_tensor_dtypes():
        return 0  # ONNX Runtime says that it does not know it
    return int(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)
