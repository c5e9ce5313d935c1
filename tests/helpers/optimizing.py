"""Optimises small models for the tests, and reads what came out."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
import onnx.compose
import onnx_ir as ir
import pytest
from made_once import made_once
from samples import RECORDS

from lab.model_zoo import TINY, batch, encoder
from twinop.errors import ExportError
from twinop.export import export
from twinop.optimize import OptimizeReport, optimize
from twinop.optimize import graph as g
from twinop.optimize.graph import RewriteContext
from twinop.optimize.rewrite import Rewrite
from twinop.optimize.symbolic_shapes import infer_types


def pass_of(title: str, function: Callable[[RewriteContext], None]) -> type[Rewrite[None]]:
    """Makes a rewrite that calls a function."""

    class Calls(Rewrite[None]):
        name = title

        def match(self, node: ir.Node) -> str:
            raise NotImplementedError

        def apply(self, node: ir.Node, match: None) -> None:
            raise NotImplementedError

        def call(self, model: ir.Model) -> ir.passes.PassResult:
            function(self.context)
            return ir.passes.PassResult(model, True)

    return Calls


LENGTHS = {name: {0: "batch", 1: "length"} for name in ("ids", "mask")}


def parsed(text: str, opset: int = 20, ir_version: int = 10, /, **constants: np.ndarray) -> onnx.ModelProto:
    """Makes a model of ONNX's text form, such as `(float[N, 4] x) => (float[N, 4] y) { y = Relu(x) }`."""
    imports = f'["": {opset}, "com.microsoft": 1, "custom_domain": 1]'
    model = onnx.parser.parse_model(f"<ir_version: {ir_version}, opset_import: {imports}> g {text}")
    for name, array in constants.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def apart(names: str, shape: str = "apart", perm: str = "0, 2, 1, 3") -> str:
    """Nodes that split each of some values into heads: qh is made of q."""
    return " ".join(f"{n}4 = Reshape ({n}, {shape}) {n}h = Transpose <perm=[{perm}]> ({n}4)" for n in names)


KT = "0, 2, 3, 1"
JOINED = "ot = Transpose <perm=[0, 2, 1, 3]> (o) y = Reshape (ot, joined)"


def reported(model: onnx.ModelProto | Path, folder: Path, **options: Any) -> OptimizeReport:
    """Optimises a model, from old.onnx if it is no path, to fast.onnx; for CUDA unless `device` says it."""
    source = model if isinstance(model, Path) else folder / "old.onnx"
    if not isinstance(model, Path):
        onnx.save(model, source)
    return optimize(source, folder / "fast.onnx", **{"device": "cuda"} | options)


def optimized(model: onnx.ModelProto | Path, folder: Path, **options: Any) -> tuple[OptimizeReport, ir.Model]:
    """Optimises a model without a rewrite that is reverted; returns the report and the new model."""
    report = reported(model, folder, **options)
    assert not report.reverted, report.reverted
    assert not Path("sym_shape_infer_temp.onnx").exists()  # ONNX Runtime's inference leaves it in this folder
    return report, ir.load(folder / "fast.onnx")


def refusal(model: onnx.ModelProto | Path, folder: Path, **options: Any) -> str:
    """Returns why a model is refused; no file appears."""
    is_there = (folder / "fast.onnx").exists()
    with pytest.raises(ExportError) as error:
        reported(model, folder, **options)
    assert (folder / "fast.onnx").exists() == is_there
    return str(error.value)


def nodes(model: ir.Model, *op_types: str) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type in op_types]


def types(nodes: Iterable[ir.Node] | ir.Model) -> dict[str, int]:
    return dict(Counter(node.op_type for node in (nodes.graph if isinstance(nodes, ir.Model) else nodes)))


def joined(models: Mapping[str, onnx.ModelProto]) -> onnx.ModelProto:
    """Makes one model of several, which is optimised once; names of values begin with those of the models."""
    whole = onnx.ModelProto()
    for name, model in models.items():
        part = onnx.compose.add_prefix(model, f"{name}/")
        if not whole.graph.node:
            whole.CopyFrom(part)
            continue
        for field in ("node", "input", "output", "initializer"):
            getattr(whole.graph, field).extend(getattr(part.graph, field))
    return whole


def apart_again(model: ir.Model) -> dict[str, list[ir.Node]]:
    """Returns the nodes behind the outputs of each model of `joined`."""
    outputs = dict[str, list[ir.Value]]()
    for value in model.graph.outputs:
        outputs.setdefault(str(value.name).partition("/")[0], []).append(value)
    found = {name: {each.producer() for each in g.ancestors(*values)} for name, values in outputs.items()}
    return {name: [node for node in model.graph if node in each] for name, each in found.items()}


Counts = dict[str, int]
Spellings = dict[str, tuple[str, Counts, Counts]]
"""Graphs in ONNX's text form, what is fused in each, and the types of its nodes then."""


def assert_fused(
    spellings: Spellings, folder: Path, skipped: Any = None, **constants: np.ndarray
) -> dict[str, list[ir.Node]]:
    """Optimises graphs as one file for CUDA, without a rewrite that is reverted; returns the nodes of each.

    Args:
        skipped: what the report has for all of them.
    """
    protos = {name: parsed(text, **constants) for name, (text, *_) in spellings.items()}
    report, model = optimized(joined(protos), folder)
    found = apart_again(model)
    wrong = {name: types(each) for name, each in found.items() if types(each) != spellings[name][2]}
    assert not wrong and found.keys() == spellings.keys(), wrong
    assert report.fused == sum((Counter(each[1]) for each in spellings.values()), Counter()), report.fused
    assert report.skipped == (skipped or {}), report.skipped
    return found


def rewritten(
    proto: onnx.ModelProto,
    *rewrites: type[Rewrite[Any]],
    meta: Mapping[str, Any] = MappingProxyType({}),
    infers: bool = False,
) -> ir.Model:
    """Applies rewrites alone, for CUDA.

    Args:
        meta: what is known of the graph.
        infers: the dtypes of values, before.
    """
    model = ir.from_proto(proto)
    if infers:
        infer_types(model)
    model.graph.meta.update(meta)
    context = RewriteContext(model, "cuda", RECORDS)
    for each in rewrites:
        each(context)(model)
    return model


def weights(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32) * 0.3


ONE_LAYER = replace(TINY, layers=1)  # the exporters take seconds for each layer
ATTENTION = {"bert": "eager", "llama": "sdpa"}


def exported(style: str, folder: Path, layers: int = 1) -> Path:
    """Exports BERT or Llama in small, as torch alone does it."""

    def make(at: Path) -> None:
        model = encoder(style, replace(TINY, layers=layers), attention=ATTENTION[style])
        options: dict[str, Any] = {"exporter": "torchscript", "dynamic": LENGTHS}
        export(model, batch(TINY, padding=5), at / "model.onnx", **options, verify=False, optimize=False)

    path = folder / f"{style}.onnx"
    path.write_bytes((made_once((style, layers), make) / "model.onnx").read_bytes())
    return path
