"""Runs models some of whose weights are too large for one session: those nodes run alone, slice by slice.

A product is computed for some output rows of its weight at a time: its columns do not depend on each other,
nor does a bias, an activation or a norm of its input that a rewrite has put into the node. Of a table that
would have to be computed, only the rows are that the ids name.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from twinop import deploy
from twinop.deploy import ort_runs
from twinop.deploy.ort_process import Endless
from twinop.deploy.ort_runs import Answer, Earlier, NotRunnable, Parts
from twinop.errors import TwinopError
from twinop.model import weights
from twinop.model.parts import parts, stored
from twinop.record.op_spec import DOMAIN

from . import graph as g
from .segments import Part, extract, reads

Cases = Sequence[Mapping[str, Any]]  # inputs by name, as `ort_runs.run` takes them
Found = dict[str, np.ndarray]  # the outputs of a case by name
MOST_BYTES, _SLICE_BYTES = 500_000_000, 1 << 27
"""What the weights of one node may take in a session, and what those of a slice take."""
_COMPUTED_TABLE = 1 << 26  # bytes
_PACKED = ("MatMulNBits", "QMoE", "CustomLinearQ", "CustomLinearQSwiglu")
_TABLES = {
    ("", "Gather"): ((0,), 1),
    (g.MICROSOFT, "GatherBlockQuantized"): ((0, 2, 3), 1),
    (DOMAIN, "CustomEmbedLayerNorm"): ((0,), 1),
}
"""The inputs that have a row for each id, and that of the ids."""


def run(model: ir.Model, cases: Cases, library: deploy.Libraries, *, optimize: bool = True) -> list[Found]:
    """Runs a model, whose graph it changes, on cases as `ort_runs.run` takes them, and raises what that
    does."""
    fold_moves(model)
    for node in model.graph:
        if large := _table_of(node) or _product_of(node):
            return _run_around(model, node, large, cases, library, optimize)
    names = [str(value.name) for value in model.graph.outputs]
    return [dict(zip(names, outputs, strict=True)) for outputs in _run(model, cases, library, optimize)]


@dataclass(frozen=True)
class Chain:
    """Parts of a model that run one after the other: each reads what those before it have returned."""

    models: Sequence[ir.Model]
    outputs: Sequence[str]


Runnable = Path | Parts | ir.Model | Chain
"""A file, a model in memory, or one some of whose weights are too large for one session."""


def runnable(model: ir.Model) -> Runnable:
    """Returns a model as `run_any` takes it."""
    folded = model.clone()
    fold_moves(folded)
    is_large = any(_table_of(node) or _product_of(node) for node in folded.graph)
    return folded if is_large else parts(model)


def run_any(
    model: Runnable, library: deploy.Libraries, cases: Cases = (), *, required: float = inf, **options: Any
) -> Answer:
    """Does what `ort_runs.run` does, also with a chain and with a model with large weights."""
    if not isinstance(model, ir.Model | Chain):
        return ort_runs.run(model, library, cases, required=required, **options)
    chain = Chain([model], _names(model.graph.outputs)) if isinstance(model, ir.Model) else model

    def outputs(some: Cases) -> list[list[Any]]:
        known = [dict(case) for case in some]
        for part in chain.models if some else ():
            made = run(part.clone(), known, library, optimize=options.get("optimize", True))
            known = [before | after for before, after in zip(known, made, strict=True)]
        return [[case[name] for name in chain.outputs] for case in known]

    try:
        return Answer((), outputs(cases))
    except (TwinopError, NotRunnable, Endless):
        if required >= len(cases):
            raise
    found, failed = outputs(cases[: int(required)]), dict[int, str]()
    for index in range(int(required), len(cases)):
        try:
            found += outputs(cases[index : index + 1])
        except (TwinopError, NotRunnable, Endless) as error:
            found, failed[index] = [*found, []], str(error).splitlines()[0]
    return Answer((), found, failed=failed)


def _run(model: ir.Model, cases: Cases, library: deploy.Libraries, optimize: bool) -> list[list[Any]]:
    # A session runs a few times. Packing pays for quantised weights: 0.25 s, not 2.6 s, for 16 tokens and
    # a layer of 8B. For others it takes a fifth of the time, 0.15 of 0.9 s.
    prepack = any(node.op_type in _PACKED for node in model.graph)
    made = parts(model)
    return ort_runs.run(made, library, cases, optimize=optimize, prepack=prepack, may_skip=True).outputs


def fold_moves(model: ir.Model) -> None:
    """Computes with large constants what no session needs to: they are read in another order or shape; and,
    of those that are too large for a session once they are dense, dtypes and integers in blocks."""
    for node in list(model.graph):
        tensor, found = _tensor(node.inputs[0]) if node.inputs else None, None
        if node.domain or tensor is None or not weights.is_large(tensor):
            continue
        if node.op_type == "Transpose":
            rank = len(weights.sizes(tensor))
            found = weights.transpose(tensor, g.attribute(node, "perm", [*range(rank)][::-1]))
        elif node.op_type == "Reshape" and (shape := g.ints(node, "shape", 1)) and min(shape) > 0:
            found = weights.reshape(tensor, shape)
        elif node.op_type == "Identity":
            found = tensor
        elif tensor.size * 4 <= MOST_BYTES:
            pass  # a session computes it
        elif node.op_type == "Cast":
            dtype = ir.DataType(g.attribute(node, "to", 1))
            if dtype.is_floating_point() and weights.largest(tensor) <= float(dtype.max):  # else Cast has inf
                found = weights.cast(tensor, dtype)
        elif node.op_type == "DequantizeLinear":
            given = [found for each in node.inputs if (found := _tensor(each)) is not None]
            if (block := g.attribute(node, "block_size", 0)) and len(given) == len(node.inputs):
                found = weights.dequantized(given, g.attribute(node, "axis", 1), block)
        if found is None or node.outputs[0].is_graph_output():
            continue
        name, sizes = f"{node.outputs[0].name} (constant)", ir.Shape(weights.sizes(found))
        value = ir.Value(name=name, const_value=found, shape=sizes)
        model.graph.register_initializer(value)
        ir.convenience.replace_all_uses_with(node.outputs[0], value)
        model.graph.remove(node, safe=True)


def _tensor(value: ir.Value | None) -> ir.TensorProtocol | None:
    is_constant = value is not None and value.is_initializer() and not value.is_graph_input()
    return stored(value.const_value) if is_constant and value is not None else None


@dataclass(frozen=True)
class _Product:
    """A node whose output has a column for each row of its weights."""

    axes: Mapping[int, int]  # of these rows, by input; some inputs are no constants
    rows: int  # how many columns the output has
    halves: int  # how many equal parts of the weight's rows give one column: 2 for a gate and what it is for
    count: int  # of slices

    def run(self, node: ir.Node, cases: Cases, run: Any) -> list[list[np.ndarray]]:
        step, found = -(-self.rows // self.count), []
        step = -(-step // 32) * 32  # kernels take columns in multiples of 8
        for start in range(0, self.rows, step):
            stop = min(start + step, self.rows)
            given, fed = dict[int, ir.TensorProtocol](), [dict(case) for case in cases]
            for index, value in enumerate(node.inputs):
                tensor, axis = _tensor(value), self.axes.get(index)
                if tensor is not None:
                    given[index] = tensor if axis is None else self._part(tensor, axis, start, stop)
                elif value is not None and axis is not None:
                    for case in fed:
                        array = case[str(value.name)]
                        if array.shape[axis] > 1:
                            case[str(value.name)] = array[..., start:stop]
            attributes = {"N": stop - start} if "N" in node.attributes else {}
            found.append(run(node, given, fed, attributes))
        return [
            [np.concatenate(each, -1) for each in zip(*outputs, strict=True)]
            for outputs in zip(*found, strict=True)
        ]

    def _part(self, tensor: ir.TensorProtocol, axis: int, start: int, stop: int) -> ir.TensorProtocol:
        """Returns the rows of a slice; of a tensor in blocks, each row may be several elements."""
        size = weights.sizes(tensor)[axis]
        if size == 1:
            return tensor
        times = size // (self.rows * self.halves)
        begin, end, half = start * times, stop * times, size // self.halves
        found = [weights.part(tensor, axis, at + begin, at + end) for at in range(0, size, half)]
        return found[0] if len(found) == 1 else weights.join(found, axis)


def _product_of(node: ir.Node) -> _Product | None:
    """Returns how a product is sliced; None of other nodes, and of weights that fit a session."""
    kn = g.attribute(node, "layout", "nk") == "kn"
    transposed = bool(g.attribute(node, "transB", 0))
    axes = {
        ("", "MatMul"): {1: -1},
        ("", "Gemm"): {1: 0 if transposed else -1, 2: -1},
        (g.MICROSOFT, "FusedMatMul"): {1: -2 if transposed else -1},
        (g.MICROSOFT, "MatMulNBits"): {1: 0, 2: 0, 3: 0, 5: 0},
        (DOMAIN, "CustomLinear"): {1: -1 if kn else 0, 2: 0, 3: -1},
        (DOMAIN, "CustomLinearSwiglu"): {1: -1 if kn else 0, 2: 0},
        (DOMAIN, "CustomLinearQ"): {1: 0, 2: 0, 3: 0, 4: 0, 5: -1},
        (DOMAIN, "CustomLinearQSwiglu"): {1: 0, 2: 0, 3: 0, 4: 0},
    }.get((node.domain, node.op_type))
    weight = _tensor(node.inputs[1]) if axes and len(node.inputs) > 1 else None
    if axes is None or weight is None or len(weights.sizes(weight)) < 2:
        return None
    halves = 2 if node.op_type.endswith("Swiglu") else 1
    rows = weights.sizes(weight)[axes[1]] // halves
    # Numbers in 16 bits are widened, and quantised ones are packed for the CPU.
    needed = weight.size * 4 if weight.dtype.is_floating_point() else weight.nbytes * 2
    is_matrix = len(weights.sizes(weight)) == 2 or not weight.dtype.is_floating_point()
    is_sliced = needed > MOST_BYTES and is_matrix
    return _Product(axes, rows, halves, -(-needed // _SLICE_BYTES)) if is_sliced else None


@dataclass(frozen=True)
class _Table:
    """A node that reads rows of a table that is not in a file as it is."""

    tables: Sequence[int]
    ids: int

    def run(self, node: ir.Node, cases: Cases, run: Any) -> list[list[np.ndarray]]:
        ids, fed = str(node.inputs[self.ids].name), [dict(case) for case in cases]  # type: ignore[union-attr]
        first = _tensor(node.inputs[self.tables[0]])
        assert first is not None
        size = weights.sizes(first)[0]
        found = np.unique(np.concatenate([np.reshape(case[ids], -1) % size for case in cases]))
        for case in fed:
            case[ids] = np.searchsorted(found, case[ids] % size).astype(case[ids].dtype)
        given = dict[int, ir.TensorProtocol]()
        for index, value in enumerate(node.inputs):
            if (tensor := _tensor(value)) is not None:
                some = [weights.part(tensor, 0, int(row), int(row) + 1) for row in found]
                given[index] = weights.join(some, 0) if index in self.tables else tensor
        outputs: list[list[np.ndarray]] = run(node, given, fed, {})
        return outputs


def _table_of(node: ir.Node) -> _Table | None:
    tables, ids = _TABLES.get((node.domain, node.op_type), ((), 0))
    tensors = [_tensor(node.inputs[index]) for index in tables if index < len(node.inputs)]
    axes = [g.attribute(node, name, 0) for name in ("axis", "gather_axis")]
    if not tensors or any(axes) or not isinstance(tensors[0], weights.Recipe):
        return None
    is_fed = node.inputs[ids] is not None and _tensor(node.inputs[ids]) is None
    return _Table(tables, ids) if is_fed and tensors[0].nbytes > _COMPUTED_TABLE else None


_Large = _Product | _Table


def _run_around(
    model: ir.Model, node: ir.Node, large: _Large, cases: Cases, library: deploy.Libraries, optimize: bool
) -> list[Found]:
    """Runs what comes before a node, the node alone, and what follows it."""
    behind = _behind(node)
    outputs = [value for value in model.graph.outputs if value.producer() is not node]
    read = [*node.inputs, *(value for each in behind for value in reads(each))]
    given = dict.fromkeys(
        value
        for value in (*read, *(each for each in outputs if each.producer() not in behind))
        if value is not None and value.producer() not in (None, node, *behind)
    )
    found: list[dict[str, Any]] = [{} for _ in cases]

    def go_on(inputs: Iterable[ir.Value], wanted: Iterable[ir.Value]) -> None:
        part = Part(_names(inputs), _names(wanted))
        if not part.outputs:
            return
        known = [{**case, **some} for case, some in zip(cases, found, strict=True)]
        for case in known:
            earlier = {name: each for name, each in case.items() if isinstance(each, Earlier)}
            case |= {name: found[each.case].get(each.output, each) for name, each in earlier.items()}
        made = run(extract(model, part), known, library, optimize=optimize)
        for each, some in zip(found, made, strict=True):
            each.update(some)

    go_on([], given)
    whole = [{**case, **some} for case, some in zip(cases, found, strict=True)]
    results = large.run(node, whole, _alone(model, library, optimize))
    for value, arrays in zip(node.outputs, zip(*results, strict=True), strict=True):
        value.type = ir.TensorType(ir.DataType.from_numpy(arrays[0].dtype))
        for some, array in zip(found, arrays, strict=True):
            some[str(value.name)] = array
    for value in given:
        value.type = value.type or ir.TensorType(ir.DataType.from_numpy(found[0][str(value.name)].dtype))
    go_on([*node.outputs, *given], [value for value in outputs if value.producer() in behind])
    names, whole = _names(model.graph.outputs), [{**a, **b} for a, b in zip(cases, found, strict=True)]
    return [{name: each[name] for name in names} for each in whole]


def _names(values: Iterable[ir.Value]) -> list[str]:
    return [str(value.name) for value in values]


def _behind(node: ir.Node) -> dict[ir.Node, None]:
    """Returns the nodes of the graph that are computed from what a node returns."""
    found, graph = dict[ir.Node, None](), node.graph
    assert graph is not None
    changed = {*node.outputs}
    for each in graph:
        if each is not node and changed.intersection(reads(each)):
            found[each] = None
            changed.update(each.outputs)
    return found


def _alone(model: ir.Model, library: deploy.Libraries, optimize: bool) -> Any:
    """Returns what runs one node with other constants."""

    def run_node(
        node: ir.Node, given: Mapping[int, ir.TensorProtocol], cases: Cases, attributes: Mapping[str, Any]
    ) -> list[list[np.ndarray]]:
        inputs, values = dict[str, ir.Value](), list[ir.Value | None]()
        for index, value in enumerate(node.inputs):
            if value is None:
                values.append(None)
            elif index in given:
                values.append(ir.Value(name=f"constant_{index}", const_value=given[index]))
            else:
                array = cases[0][str(value.name)]
                kind = ir.TensorType(ir.DataType.from_numpy(array.dtype))
                made = ir.Value(name=value.name, type=kind, shape=ir.Shape([None] * array.ndim))
                values.append(inputs.setdefault(str(value.name), made))
        alone = ir.Node(
            node.domain, node.op_type, values, [*node.attributes.values()], num_outputs=len(node.outputs)
        )
        for name, number in attributes.items():
            alone.attributes[name] = ir.AttrInt64(name, number)
        graph = ir.Graph(
            [*inputs.values()], alone.outputs, nodes=[alone],
            initializers=[value for value in values if value is not None and value.const_value is not None],
            opset_imports=model.graph.opset_imports, name="alone",
        )  # fmt: skip
        single = ir.Model(graph, ir_version=model.ir_version, functions=[*model.functions.values()])
        return _run(single, cases, library, optimize)

    return run_node
