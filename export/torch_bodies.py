"""Function bodies that are torch functions: torch's dynamo exporter translates them to ONNX operators.

A function is exported for the ranks of the calls, with open sizes. Where the graphs of several ranks differ,
an `If` chooses among them. Attributes become references to the node's own: a float, because the function is
exported with two values, and the constants in which the results differ are that attribute. Of others, an `If`
chooses among the graphs of the values (`AttributeArgument.value`).
"""

import functools
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.passes.common import InlinePass
from torch.fx.experimental import _config
from torch.overrides import TorchFunctionMode

from twinop.errors import ExportError, option
from twinop.libraries.kernel_op import KernelOp
from twinop.model.record_body import UNKNOWN, BodySetting
from twinop.record.dtypes import FLOATING, FLOATS_8

from .routes import quiet_torch, root_cause

Ranks = tuple[int | None, ...]
Named = Mapping[str, Any]
Pairs = tuple[tuple[str, Any], ...]

_SIZE = 48  # of the samples that the exporter gets
_VALUES = (0.1237, 0.2713)  # of a float attribute, in the two exports
_STEP = 1 / 64  # from one attribute's values to the next one's
_DERIVED = {"": lambda v: v, "Sqrt": math.sqrt, "Reciprocal": lambda v: 1 / v, "Neg": lambda v: -v}
"""What a constant of a graph may be of a float attribute, as an operator of ONNX."""
_References = dict[Any, tuple[str, str]]
"""The constants of a graph that are attributes: a value, or a node and its attribute's name, to the op's
attribute and the operator that derives the constant from it."""


def replay(declared: KernelOp, op: Any, inputs: Sequence[Any], attributes: Named) -> tuple[Any, ...]:
    """Computes an op's torch body with the operators of `op`, as a builder does (`bodies.py`); ExportError:
    torch cannot export the function, or one body cannot serve all calls."""
    fixed = {
        entry.name: attributes[entry.name].value
        for entry in declared.record.attributes
        if entry.kind != "float"
    }
    branches = []
    for ranks, graph, references in _by_ranks(declared, op.setting, attributes, fixed):
        run = functools.partial(_run, graph, references, inputs, attributes, ranks)
        branches.append(([(inputs[index], rank) for index, rank in ranks.items()], run))
    return op.choose(branches, len(declared.record.outputs)) if len(branches) > 1 else branches[0][1](op)


def _by_ranks(
    declared: KernelOp, setting: BodySetting, attributes: Named, fixed: Named
) -> list[tuple[dict[int, int], ir.Graph, _References]]:
    """Returns the graphs for the ranks of the calls, by the inputs whose rank varies: one without, if it is
    the same for all. ExportError: they differ, and the ranks are not known, or others may follow."""
    known = sorted(setting.ranks, key=str)
    found = [(ranks, *_exported(declared, setting, attributes, fixed, ranks)) for ranks in known]
    (first, graph, references), *others = found
    different = [ranks for ranks, other, _ in others if _differences(graph, other) != {}]
    if not different:
        return [({}, graph, references)]
    varying = [index for index, ranks in enumerate(zip(*setting.ranks, strict=True)) if len(set(ranks)) > 1]
    if not setting.by_rank or any((ranks[index] or 0) < 1 for ranks in setting.ranks for index in varying):
        raise ExportError(
            f"the body of {declared.record.onnx_name} differs between inputs of {_dimensions(first)} and of "
            f"{_dimensions(different[0])} dimensions, but the nodes share one body. Give the model's inputs "
            "shapes with at least one dimension, write a body that does not depend on the rank, or export "
            f"without bodies ({option('bodies', False)})"
        )
    return [({index: ranks[index] or 0 for index in varying}, other, own) for ranks, other, own in found]


def _with_known_rank(op: Any, value: Any, rank: int) -> Any:
    """Returns a tensor as it is in the branch for its rank: ONNX infers shapes in all branches. In the
    others, some of the dimensions are joined, or there are more."""
    sizes = op.Concat(op.Shape(value), op.Constant(value_ints=[1] * rank), axis=0)
    first, rest = op.Slice(sizes, [0], [rank - 1]), op.ReduceProd(op.Shape(value, start=rank - 1))
    return op.Reshape(value, op.Concat(first, rest, axis=0), allowzero=1)


def _exported(
    declared: KernelOp, setting: BodySetting, attributes: Named, fixed: Named, ranks: Ranks
) -> tuple[ir.Graph, _References]:
    floats = [entry.name for entry in declared.record.attributes if entry.kind == "float"]
    dtypes = tuple(setting.compute if dtype in (*FLOATING, *FLOATS_8) else dtype for dtype in setting.dtypes)
    key = declared, dtypes, setting.opset, ranks, tuple(sorted(fixed.items()))
    values = [[(name, base + i * _STEP) for i, name in enumerate(floats)] for base in _VALUES]
    first, second = (_export(*key, tuple(each)) for each in values)
    differences = _differences(first, second)
    references = None if differences is None else _references(differences, floats)
    if references is not None:
        return first, references
    return _export(*key, tuple((name, attributes[name].value) for name in floats)), {}


@functools.cache
def _export(
    declared: KernelOp, dtypes: tuple[str, ...], opset: int, ranks: Ranks, fixed: Pairs, floats: Pairs
) -> ir.Graph:
    """Exports the torch function of a declared op for inputs of these dtypes and ranks."""
    tensors = _example(declared, dtypes, ranks)
    given = tuple(tensor for tensor in tensors if tensor is not None)
    axes = tuple(dict.fromkeys(range(tensor.dim()), torch.export.Dim.DYNAMIC) for tensor in given)
    try:
        # The patch: sizes that happen to be 1 stay open, too.
        module = _Module(declared, tensors, dict(fixed + floats))
        with quiet_torch(), _config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
            program = torch.onnx.export(
                module, given, dynamo=True, opset_version=opset, dynamic_shapes=(axes,), verbose=False
            )
        assert program is not None
        if _is_for_some_sizes(program.exported_program, module, given):
            raise ValueError("some sizes only")
    except Exception as error:
        raise ExportError(
            f"the body of {declared.record.qualified_name} ({declared.place}) cannot be exported to ONNX: "
            f"{_reason(root_cause(error))}. Write it with other functions of torch, or as an ONNX builder "
            "(twinop/model/bodies.py)"
        ) from error
    InlinePass()(program.model)
    for node in program.model.graph:
        if any(value.type is ir.AttributeType.GRAPH for value in node.attributes.values()):
            raise ExportError(
                f"the body of {declared.record.qualified_name} ({declared.place}) has a loop or a branch "
                f"that depends on data ({node.op_type} in ONNX). Write it without, or as an ONNX builder"
            )
    return program.model.graph


def _is_for_some_sizes(program: Any, module: torch.nn.Module, given: Sequence[torch.Tensor]) -> bool:
    """Whether the graph excludes a size that the function takes, as a branch that depends on a size does."""
    nodes = [node for node in program.graph.nodes if node.op == "placeholder"][-len(given) :]
    for symbol, bounds in program.range_constraints.items():
        for other in (bounds.lower - 1, bounds.upper + 1):
            if not 1 < other < 1 << 20:
                continue
            with suppress(Exception):
                shapes = [node.meta["val"].shape for node in nodes]
                sizes = [[int(other) if str(n) == str(symbol) else int(n) for n in each] for each in shapes]
                module(*(tensor.new_ones(shape) for tensor, shape in zip(given, sizes, strict=True)))
                return True
    return False


def _reason(cause: BaseException) -> str:
    text = " ".join(str(cause).split())
    if unknown := re.search(r"No ONNX function found for <OpOverload\(op='\w+\.(\w+)'", text):
        return f"torch has no ONNX operators for its function {unknown[1]}"
    if "inferred a static shape" in text or text == "some sizes only":
        return "it is not the same for all sizes, as a loop over a size, or a split into pieces of 4"
    return f"{type(cause).__name__}: {text[:400]}"


_CHUNK = (torch.chunk, torch.Tensor.chunk, torch.unsafe_chunk, torch.Tensor.unsafe_chunk)
_SPLIT = (torch.split, torch.Tensor.split, torch.unsafe_split, torch.Tensor.unsafe_split)


class _Slices(TorchFunctionMode):
    """Pieces of one size as slices: torch's exporter makes sequences of open sizes, and then fails."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        pieces = func(*args, **(kwargs or {}))
        if func not in (*_CHUNK, *_SPLIT):
            return pieces
        named = {"dim": 0, **(kwargs or {})}
        names = [{"input": 0, "tensor": 0, "self": 0, "dim": 2}.get(name, 1) for name in named]
        given = dict(zip(names, named.values(), strict=True)) | dict(enumerate(args))
        whole, size, dim = given[0], given[1], given[2]
        if not isinstance(size, int | torch.SymInt):
            return pieces
        if func in _CHUNK:
            size = (whole.shape[dim] + size - 1) // size
        ends = [(i + 1) * size for i in range(len(pieces) - 1)]
        along = [slice(a, b) for a, b in zip([0, *ends], [*ends, None], strict=True)]
        return tuple(whole[(slice(None),) * (dim % whole.dim()) + (each,)] for each in along)


class _Module(torch.nn.Module):
    """A body as a module, of the inputs that are present."""

    def __init__(self, declared: KernelOp, tensors: Sequence[Any], attributes: Named) -> None:
        super().__init__()
        self.function = declared.body
        self.present = [tensor is not None for tensor in tensors]
        self.attributes = attributes

    def forward(self, *tensors: torch.Tensor) -> Any:
        rest = iter(tensors)
        with _Slices():
            given = (next(rest) if is_given else None for is_given in self.present)
            result = self.function(*given, **self.attributes)
        return tuple(result) if isinstance(result, list | tuple) else (result,)


def _example(declared: KernelOp, dtypes: Sequence[str], ranks: Ranks) -> list[torch.Tensor | None]:
    """Returns inputs of these ranks: those of a sample, or without samples all of one shape."""
    names = [entry.name for entry in declared.record.inputs]
    calls = declared.calls(dtypes[0], _SIZE)
    if calls is None:
        sizes = [range(3, 5 if rank == UNKNOWN else 3 + (rank or 0)) for rank in ranks]
        calls = [{name: torch.ones((*size,)) for name, size in zip(names, sizes, strict=True)}]
    for call in calls:
        own = call[names[0]].dim()  # inputs of the first one's rank go along with it
        wanted = zip(names, ranks, strict=True)
        tensors = [None if rank is None else _with_rank(call.get(name), own, rank) for name, rank in wanted]
        pairs = [
            (None if each is None else each.dim(), rank) for each, rank in zip(tensors, ranks, strict=True)
        ]
        if all(
            rank is None or found == rank or (rank == UNKNOWN and found is not None) for found, rank in pairs
        ):
            kinds = [getattr(torch, dtype) for dtype in dtypes]
            return [
                each if each is None else each.to(kind) for each, kind in zip(tensors, kinds, strict=True)
            ]
    raise ExportError(
        f"{declared.place}: samples gives {declared.name} no inputs of {_dimensions(ranks)} dimensions, "
        "which the model has. Add such a sample: the body is exported with it"
    )


def _with_rank(tensor: torch.Tensor | None, own: int, rank: int) -> torch.Tensor | None:
    """Adds leading dimensions to a tensor of this rank, or joins some."""
    if tensor is None or tensor.dim() != own or rank in (own, UNKNOWN):
        return tensor
    if rank < own:
        return tensor.flatten(0, own - rank)
    return tensor.expand(*range(2, 2 + rank - own), *tensor.shape).clone()


def _dimensions(ranks: Ranks) -> str:
    return ", ".join("?" if rank == UNKNOWN else str(rank) for rank in ranks if rank is not None)


def _differences(first: ir.Graph, second: ir.Graph) -> dict[Any, tuple[Any, Any]] | None:
    """Returns the constants in which two graphs differ; None where they differ in something else."""
    same: dict[Any, Any] = {None: None, **dict(zip(first.inputs, second.inputs, strict=True))}
    found: dict[Any, tuple[Any, Any]] = {}

    def compare(a: ir.Value | None, b: ir.Value | None) -> None:
        constants = [value and value.const_value for value in (a, b)]
        if a in same or None in constants:
            if a not in same or same[a] is not b:
                raise ValueError
        elif not _equal(*constants):
            found[a] = constants[0].numpy(), constants[1].numpy()  # type: ignore[union-attr]

    try:
        for a, b in zip(first, second, strict=True):
            if a.op_type != b.op_type or a.attributes.keys() != b.attributes.keys():
                return None
            for x, y in zip(a.inputs, b.inputs, strict=True):
                compare(x, y)
            for name, attribute in a.attributes.items():
                if not _equal(attribute.value, b.attributes[name].value):
                    found[a, name] = attribute.value, b.attributes[name].value
            same |= zip(a.outputs, b.outputs, strict=True)
        for x, y in zip(first.outputs, second.outputs, strict=True):
            compare(x, y)
    except ValueError:
        return None
    return found


def _equal(a: Any, b: Any) -> bool:
    if not isinstance(a, ir.TensorProtocol):
        return bool(a == b)
    return a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()


def _references(differences: Mapping[Any, tuple[Any, Any]], floats: Sequence[str]) -> _References | None:
    """Returns of which attribute each constant is; None where one is of none."""
    found = {}
    for place, pair in differences.items():
        if any(np.size(each) != 1 or np.asarray(each).dtype.kind != "f" for each in pair):
            return None
        for (i, name), (operator, function) in itertools.product(enumerate(floats), _DERIVED.items()):
            expected = [function(base + i * _STEP) for base in _VALUES]
            allowed = operator == "" or not isinstance(place, tuple)  # a node's attribute is not computed
            if allowed and np.allclose([float(np.reshape(each, ())) for each in pair], expected, 1e-6, 0):
                found[place] = name, operator
                break
        else:
            return None
    return found


def _run(
    graph: ir.Graph,
    references: _References,
    inputs: Sequence[Any],
    attributes: Named,
    ranks: Mapping[int, int],
    op: Any,
) -> tuple[Any, ...]:
    """Adds the graph's nodes with `op`, and returns its outputs."""
    present = [(index, value) for index, value in enumerate(inputs) if value is not None]
    given = [_with_known_rank(op, value, ranks[at]) if at in ranks else value for at, value in present]
    values: dict[Any, Any] = {None: None, **dict(zip(graph.inputs, given, strict=True))}

    def value(each: ir.Value | None) -> Any:
        if each in references:
            name, operator = references[each]
            return getattr(op, operator)(attributes[name]) if operator else attributes[name]
        if each not in values and each is not None and each.const_value is not None:
            values[each] = op.Constant(value=each.const_value)
        return values[each]

    for node in graph:
        named = {name: each.value for name, each in node.attributes.items()}
        named |= {name: attributes[references[node, name][0]] for name in named if (node, name) in references}
        if node.op_type == "Reshape" and _takes_sizes(node.inputs[1]):
            named["allowzero"] = 1  # a size of 0 is one: the exporter never means "as in the input"
        if (count := len(node.outputs)) > 1:
            named["_outputs"] = count
        found = getattr(op, node.op_type)(*map(value, node.inputs), **named)
        results = found if count > 1 else (found,)
        values |= zip(node.outputs, results, strict=True)
    return tuple(map(value, graph.outputs))


def _takes_sizes(shape: ir.Value | None) -> bool:
    """Whether a shape is put together from sizes, with no -1 among them (which excludes 0)."""
    node = shape.producer() if shape is not None else None
    if node is None or node.op_type != "Concat":
        return False
    constants = [each.const_value.numpy() for each in node.inputs if each and each.const_value is not None]
    return not any((values < 0).any() for values in constants)
