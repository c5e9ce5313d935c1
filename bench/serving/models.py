"""The models of the serving report, with twinop's nodes, and a request for each."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from twinop.record import DOMAIN, DOMAIN_VERSION


@dataclass(frozen=True)
class Model:
    """`rows` is the largest batch that the server may join; `inputs` are one request's.

    `graphs`: whether ONNX Runtime runs all of it on the GPU, as CUDA graphs need.
    """

    name: str
    title: str
    rows: int
    build: Callable[[], onnx.ModelProto]
    inputs: Callable[[], dict[str, np.ndarray]]
    graphs: bool = True


def mlp(*widths: int) -> onnx.ModelProto:
    """Linear layers with CustomRelu between them, float32, open in the batch."""
    generator = np.random.default_rng(0)
    nodes, weights, last = [], [], "x"
    for layer, (rows, columns) in enumerate(itertools.pairwise(widths)):
        weight = generator.standard_normal((rows, columns), np.float32) / np.float32(np.sqrt(rows))
        bias = generator.standard_normal(columns, np.float32)
        weights += [numpy_helper.from_array(weight, f"w{layer}"), numpy_helper.from_array(bias, f"b{layer}")]
        end = layer == len(widths) - 2
        linear = "y" if end else f"h{layer}"
        nodes.append(helper.make_node("Gemm", [last, f"w{layer}", f"b{layer}"], [linear]))
        if not end:
            last = f"r{layer}"
            nodes.append(helper.make_node("CustomRelu", [linear], [last], domain=DOMAIN))
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", width])
        for name, width in (("x", widths[0]), ("y", widths[-1]))
    ]
    graph = helper.make_graph(nodes, "mlp", ends[:1], ends[1:], weights)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, DOMAIN_VERSION)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _row(width: int) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(1).standard_normal((1, width), np.float32)}


def _encoder() -> onnx.ModelProto:
    import torch

    from twinop.bench.encoder import Size
    from twinop.bench.transformer import exported

    size = Size(layers=4, width=256, heads=4, vocabulary=2000, batch=2, tokens=64)
    return exported("bert", size, torch.float32, True, "torchscript")


def _sentence() -> dict[str, np.ndarray]:
    ids = np.random.default_rng(1).integers(0, 2000, (1, 64))
    return {"ids": ids, "mask": np.ones_like(ids)}


MODELS = (
    Model("small", "MLP 64-128-128-16", 64, lambda: mlp(64, 128, 128, 16), lambda: _row(64)),
    Model("wide", "MLP 1024-4096-4096-1024", 64, lambda: mlp(1024, 4096, 4096, 1024), lambda: _row(1024)),
    Model("encoder", "encoder, 4 layers, 256 wide, 64 tokens", 16, _encoder, _sentence, graphs=False),
)


def write(model: Model, folder: Path) -> Path:
    """models/<name>/1/model.onnx, as the service and Triton lay it out."""
    path = folder / model.name / "1" / "model.onnx"
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model.build(), path)
    return path


def session_options(provider: str) -> tuple[Any, list[str]]:
    """What the peers' sessions are made with: twinop's library, and the provider alone."""
    import onnxruntime as ort

    from twinop.library import find_library

    options = ort.SessionOptions()
    options.register_custom_ops_library(str(find_library("custom_ops")))
    names = {"cpu": ["CPUExecutionProvider"], "cuda": ["CUDAExecutionProvider", "CPUExecutionProvider"]}
    return options, names[provider]
