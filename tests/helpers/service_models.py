"""Small models for the tests of the service, built without torch, and the folders that they lie in."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
from models import exported_by, function, model, node
from onnx import TensorProto, helper, numpy_helper

from twinop.libraries.library import find_library, read_library
from twinop.record.op_spec import DOMAIN

# The Open Inference Protocol's data types, and ONNX's.
_SAME = ("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64")
ELEMENTS = {name: TensorProto.DataType.Value(name) for name in _SAME} | {
    "FP16": TensorProto.FLOAT16, "FP32": TensorProto.FLOAT, "FP64": TensorProto.DOUBLE,
    "BF16": TensorProto.BFLOAT16, "BYTES": TensorProto.STRING,
}  # fmt: skip
NUMPY = {name: np.dtype(name.lower()) for name in _SAME} | {
    "FP16": np.dtype(np.float16), "FP32": np.dtype(np.float32), "FP64": np.dtype(np.float64),
    "BF16": np.dtype(ml_dtypes.bfloat16), "BYTES": np.dtype(object),
}  # fmt: skip
ROWS: tuple[int | str | None, ...] = ("N", 4)
GATHER_ROWS = 10


def relu(
    datatype: str = "FP32",
    shape: Sequence[int | str | None] | None = ROWS,
    *,
    body: bool = True,
    metadata: Mapping[str, str] | None = None,
) -> onnx.ModelProto:
    """y = CustomRelu(x), with its function body and the metadata as the exporter writes them.

    Args:
        metadata: other entries of the metadata, such as another schema hash.
    """
    return make(
        [node("CustomRelu")],
        [info("x", datatype, shape)],
        [info("y", datatype, shape)],
        functions=[relu_body(datatype)] if body else [],
        metadata=metadata,
    )


def mlp(*sizes: int, custom: bool = True, rows: int | str = "N", seed: int = 0) -> onnx.ModelProto:
    """x[rows, sizes[0]] through MatMul and CustomRelu (or Relu) to y[rows, sizes[-1]]; no Relu at the end."""
    random = np.random.default_rng(seed)
    weights, nodes, last = {}, [], "x"
    for index in range(len(sizes) - 1):
        scale = sizes[index] ** -0.5
        weights[f"w{index}"] = (scale * random.standard_normal(sizes[index : index + 2])).astype(np.float32)
        name = "y" if index == len(sizes) - 2 else f"h{index}"
        nodes.append(node("MatMul", [last, f"w{index}"], [name], f"matmul{index}", domain=""))
        last = name
        if name != "y":
            last = f"r{index}"
            op = ("CustomRelu", DOMAIN) if custom else ("Relu", "")
            nodes.append(node(op[0], [name], [last], f"relu{index}", domain=op[1]))
    inputs, outputs = ([info("x", "FP32", (rows, sizes[0]))], [info("y", "FP32", (rows, sizes[-1]))])
    return make(nodes, inputs, outputs, weights=weights, functions=[relu_body()] if custom else [])


def identity(datatype: str, shape: Sequence[int | str | None] | None = ("N", "M")) -> onnx.ModelProto:
    """y = x, for any of the protocol's data types; no custom node."""
    return make([node("Identity", domain="")], [info("x", datatype, shape)], [info("y", datatype, shape)])


def fixed(*shape: int) -> onnx.ModelProto:
    """y = CustomRelu(x) at one shape only: no dynamic dimension, so it cannot be batched."""
    return relu(shape=shape or (2, 3))


def gather() -> onnx.ModelProto:
    """y[N, 4] = rows `index` of a table of GATHER_ROWS: any other index makes the run fail."""
    table = np.arange(GATHER_ROWS * 4, dtype=np.float32).reshape(GATHER_ROWS, 4)
    return parsed("(int64[N] index) => (float[N, 4] y) { y = Gather(table, index) }", table=table)


def strings() -> onnx.ModelProto:
    """y[N] = a[N] + b[N], strings."""
    return parsed("(string[N] a, string[N] b) => (string[N] y) { y = StringConcat(a, b) }")


def add() -> onnx.ModelProto:
    """total[N, 4] = a[N, 4] + b[N, 4]: two inputs that are needed."""
    return parsed("(float[N, 4] a, float[N, 4] b) => (float[N, 4] total) { total = Add(a, b) }")


def uneven() -> onnx.ModelProto:
    """total[N, K] = a[N, K] + b[N, L]: the run fails where K and L differ, and neither is 1."""
    return parsed("(float[N, K] a, float[N, L] b) => (float[N, K] total) { total = Add(a, b) }")


def optional_scale() -> onnx.ModelProto:
    """y = x * scale, where scale[1] is 2 unless it is given (an initializer that is an input too)."""
    two = np.array([2], np.float32)
    return parsed("(float[N, 4] x, float[1] scale) => (float[N, 4] y) { y = Mul(x, scale) }", scale=two)


def two_outputs() -> onnx.ModelProto:
    """positive[N, 4] = CustomRelu(x), sign[N, 4] (INT32) = the sign of x."""
    return make(
        [
            node("CustomRelu", ["x"], ["positive"]),
            node("Sign", ["x"], ["s"], "sign", domain=""),
            node("Cast", ["s"], ["sign"], "cast", domain="", to=TensorProto.INT32),
        ],
        [info("x", "FP32", ROWS)],
        [info("positive", "FP32", ROWS), info("sign", "INT32", ROWS)],
        functions=[relu_body()],
    )


def total() -> onnx.ModelProto:
    """y[4] = the sum over the rows of x[N, 4]: rows depend on each other, and the output has none."""
    nodes = "y = ReduceSum <keepdims = 0> (x, axes)"
    return parsed(f"(float[N, 4] x) => (float[4] y) {{ {nodes} }}", axes=np.array([0]))


def centred() -> onnx.ModelProto:
    """y = x minus the mean of each column: rows depend on each other, though the shapes do not tell."""
    nodes = "mean = ReduceMean <keepdims = 1> (x, axes) y = Sub(x, mean)"
    return parsed(f"(float[N, 4] x) => (float[N, 4] y) {{ {nodes} }}", axes=np.array([0]))


def expand() -> onnx.ModelProto:
    """y = x[1] expanded to `shape`: a few bytes of request for as much memory as one likes."""
    return parsed("(float[1] x, int64[K] shape) => (float[] y) { y = Expand(x, shape) }")


def relu_body(datatype: str = "FP32") -> onnx.FunctionProto:
    """The function body of CustomRelu, computing in fp32 but for fp64 (twinop.model.bodies.relu)."""
    kind = TensorProto.DOUBLE if datatype == "FP64" else TensorProto.FLOAT
    zero = helper.make_tensor("zero", kind, [], [0.0])
    return function(
        "CustomRelu",
        [
            node("Cast", ["x"], ["c"], "cast", domain="", to=kind),
            node("Constant", [], ["zero"], "zero", domain="", value=zero),
            node("Less", ["c", "zero"], ["below"], "below", domain=""),
            node("Where", ["below", "zero", "c"], ["r"], "where", domain=""),
            node("Cast", ["r"], ["y"], "back", domain="", to=ELEMENTS[datatype]),
        ],
    )


def wrong_body() -> onnx.FunctionProto:
    """A function body of CustomRelu that computes something else."""
    return function("CustomRelu", [node("Abs", domain="")])


def place(
    models: Path,
    name: str,
    model: onnx.ModelProto,
    version: int = 1,
    *,
    config: str | None = None,
    settings: str | None = None,
) -> Path:
    """Writes models/<name>/<version>/model.onnx, and config.pbtxt and twinop.toml beside the versions."""
    folder = models / name / str(version)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.onnx"
    onnx.save(model, path)
    if config is not None:
        (models / name / "config.pbtxt").write_text(config)
    if settings is not None:
        (models / name / "twinop.toml").write_text(settings)
    return path


def save_external(model: onnx.ModelProto, path: Path, data: str = "weights.bin") -> Path:
    """Saves a model with all of its weights in a file of their own beside it; returns that file."""
    onnx.save(model, path, save_as_external_data=True, location=data, size_threshold=0)
    return path.with_name(data)


def point_external(path: Path, location: str) -> None:
    """Makes the weights of a saved model refer to another data file, whatever that is."""
    model = onnx.load(path, load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location
    path.write_bytes(model.SerializeToString())


def info(name: str, datatype: str, shape: Sequence[int | str | None] | None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, ELEMENTS[datatype], shape)


def parsed(graph: str, **weights: np.ndarray) -> onnx.ModelProto:
    """Makes a model of ONNX's text form, without custom nodes."""
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 20]> graph {graph}')
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    return model


def make(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    *,
    weights: Mapping[str, np.ndarray] | None = None,
    functions: Sequence[onnx.FunctionProto] = (),
    metadata: Mapping[str, str] | None = None,
) -> onnx.ModelProto:
    entries: dict[str, str] = {}
    if any(each.op_type == "CustomRelu" for each in nodes):
        entries = exported_by(read_library(find_library("custom_relu")).by_onnx_name["CustomRelu"])
    entries |= dict(metadata or {})
    return model(nodes, inputs, outputs, initializers=weights, functions=functions, metadata=entries)
