"""Traces a body's Python function into an ONNX function."""

import functools
import itertools
from collections.abc import Callable, Sequence, Set
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx_ir as ir
from onnxscript import build_function, build_graph

from twinop.errors import ExportError, option
from twinop.record.dtypes import FLOATING, FLOATS_8, dtype_name
from twinop.record.op_schema import default_of
from twinop.record.op_spec import Attribute, OpSpec

from .bodies import Body
from .calls import Call
from .schema import ATTRIBUTE_TYPES, ONNX_TYPES

Calls = Sequence[Call]


class AttributeReference:
    """An attribute as a body sees it. It is no Python value: `==` would be False in silence."""

    def __init__(self, op: str, name: str) -> None:
        self._op, self._name = op, name

    def _refuse(self, *_: Any) -> Any:
        raise ExportError(
            f"body {self._op}: attribute {self._name} is used as a Python value; {self._name} is a reference "
            f"to the node's attribute. Write {self._name}.value for the value itself"
        )

    __eq__ = __bool__ = __len__ = __iter__ = __getitem__ = __int__ = __float__ = __index__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __neg__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = _refuse


class _SeveralValues(Exception):
    """A body asks for the value of an attribute, of which its calls have several."""


class AttributeArgument(AttributeReference):
    """An attribute of the nodes that call a function. `is_finite`: these have all the values there are."""

    def __init__(self, attribute: Attribute, calls: Calls, is_finite: bool) -> None:
        super().__init__(calls[0].record.name, attribute.name)
        self._record = calls[0].record
        self._attribute = attribute
        self._calls = calls
        self._is_finite = is_finite
        self.type = ATTRIBUTE_TYPES[attribute.kind]

    @property
    def values(self) -> set[Any]:
        """The set of the values that the body has to serve."""
        return {call.attributes[self._attribute.name] for call in self._calls}

    @property
    def value(self) -> Any:
        """The value. Where the calls have several, the body gets a branch for each of them (`_traced`)."""
        name = self._attribute.name
        if len(self.values) > 1 and self._is_finite and all(each == each for each in self.values):  # no NaN
            raise _SeveralValues(name)
        if len(self.values) > 1:
            raise ExportError(
                f"the body of {self._record.onnx_name} takes {name}.value, and serves more values than it "
                f'could have branches for. Name them in the record, limits="{name} in 1 | 2" (not of an '
                "int[]), or write the body as an ONNX builder without .value"
            )
        (value,) = self.values
        return bool(value) if self._attribute.kind == "bool" else value

    def reference(self, name: str) -> ir.Attr:
        """Makes an attribute `name` for a node of the body, bound to this one."""
        return ir.RefAttr(name, self._attribute.name, self.type)


_FLOATS = (*FLOATING, *FLOATS_8)

_CONSTANT_DTYPES = {
    ir.AttributeType.INT: ir.DataType.INT64,
    ir.AttributeType.FLOAT: ir.DataType.FLOAT,
    ir.AttributeType.STRING: ir.DataType.STRING,
    ir.AttributeType.INTS: ir.DataType.INT64,
}
"""The element type of a Constant node that holds an attribute of each type."""


class BodySetting(NamedTuple):
    """What a torch function that is a body is exported for (torch_bodies.py)."""

    dtypes: tuple[str, ...]  # of the inputs, as the model has them
    compute: str  # the dtype in which floating-point inputs arrive
    opset: int
    ranks: Set[tuple[int | None, ...]]  # of each call's inputs; None: absent, UNKNOWN: the model lacks it
    by_rank: bool = False  # whether a function may choose by them: the calls are all that there will be


UNKNOWN = -1  # a rank that the model does not say

Branch = tuple[Sequence[tuple[AttributeArgument | ir.Value, Any]], Callable[[Any], Any]]
"""The values of attributes and the ranks of tensors, and what computes the body for them with an `op`."""


def _rank(value: ir.Value | None) -> int | None:
    return None if value is None else UNKNOWN if value.shape is None else len(value.shape)


class BodyOps:
    """The argument `op` of a body: `op.Mul(x, y)` adds a node of that type."""

    def __init__(
        self, builder: Any, calls: Calls, opset: int, compute: ir.DataType | None, by_rank: bool
    ) -> None:
        self._builder = builder  # onnxscript.OpBuilder
        self._by_rank = by_rank
        self._calls = calls
        self._record = calls[0].record
        self._opset = opset
        self._compute = compute
        self._stored: dict[ir.Value, ir.Value] = {}  # an input in the compute type -> as the model holds it

    @property
    def setting(self) -> BodySetting:
        """What a torch function is exported for."""
        compute = dtype_name(self._compute) if self._compute is not None else "float32"
        names = [entry.name for entry in self._record.inputs]
        ranks = {tuple(_rank(call.inputs.get(name)) for name in names) for call in self._calls}
        dtypes = tuple(self._calls[0].dtypes[name] for name in names)
        return BodySetting(dtypes, compute, self._opset, ranks, self._by_rank)

    def choose(self, branches: Sequence[Branch], outputs: int) -> tuple[Any, ...]:
        """Adds an `If` for the branches, by halves: files cannot nest deeply. The last one has no test."""
        if len(branches) == 1:
            return branches[0][1](self)
        first, rest = branches[: len(branches) // 2], branches[len(branches) // 2 :]
        tests = [functools.reduce(self.And, itertools.starmap(self._holds, each)) for each, _ in first]
        graphs = {"then_branch": self._branch(first, outputs), "else_branch": self._branch(rest, outputs)}
        results = self.If(functools.reduce(self.Or, tests), **graphs, _outputs=outputs)
        return tuple(results) if outputs > 1 else (results,)

    def _holds(self, of: AttributeArgument | ir.Value, value: Any) -> Any:
        if isinstance(of, ir.Value):
            return self.Equal(self.Size(self.Shape(of)), self.Constant(value_int=value))
        value = float(np.float32(value)) if isinstance(value, float) else value  # as attributes are
        return self.Equal(of, int(value) if isinstance(value, bool) else value)

    def _branch(self, branches: Sequence[Branch], outputs: int) -> ir.Graph:
        def results(builder: Any) -> list[ir.Value]:
            inner = BodyOps(builder, self._calls, self._opset, self._compute, self._by_rank)
            inner._stored = self._stored
            return [inner.Identity(value) for value in inner.choose(branches, outputs)]  # a node's own

        values, opsets = [ir.Value() for _ in range(outputs)], {"": self._opset}
        return build_graph(results, [], values, opset_imports=opsets, parent=self._builder.builder)

    def computed(self, value: ir.Value) -> ir.Value:
        """Casts an input to the compute type."""
        result = self._builder.Cast(value, to=self._compute)
        self._stored[result] = value
        return result

    def rounded(self, value: ir.Value, like: ir.Value) -> ir.Value:
        """Rounds a value to the type that the input `like` has in the model."""
        if like not in self._stored:
            return value
        return self._builder.Cast(self._builder.CastLike(value, self._stored[like]), to=self._compute)

    def __getattr__(self, op_type: str) -> Any:
        if not onnx.defs.has(op_type, self._opset) or onnx.defs.get_schema(op_type, self._opset).deprecated:
            raise ExportError(
                f"body {self._record.name}: opset {self._opset} has no operator {op_type}. "
                f"Use operators of opset 20, or ask for a later one ({option('opset')})"
            )

        def add(*inputs: Any, **attributes: Any) -> Any:
            beside_floating = any(self._is_floating(value) for value in inputs)
            tensors = [self._tensor(value, beside_floating) for value in inputs]
            given = {name: each for name, each in attributes.items() if isinstance(each, AttributeArgument)}
            named = attributes | {name: each.reference(name) for name, each in given.items()}
            return getattr(self._builder, op_type)(*tensors, **named)

        return add

    def _is_floating(self, value: Any) -> bool:
        if isinstance(value, AttributeArgument):
            return value.type is ir.AttributeType.FLOAT
        return isinstance(value, ir.Value) and value.dtype is not None and value.dtype.is_floating_point()

    def _tensor(self, value: Any, beside_floating: bool) -> Any:
        """Converts what onnxscript takes for no tensor: attributes, strings and lone floats."""
        if isinstance(value, float) and not beside_floating and self._compute is not None:
            return self._builder.Constant(value=ir.tensor(value, dtype=self._compute))
        if isinstance(value, str):
            return self._constant(ir.AttributeType.STRING, lambda form: value)
        if not isinstance(value, AttributeArgument):
            return value
        constant = self._constant(value.type, value.reference)
        if value.type is ir.AttributeType.FLOAT and self._compute is ir.DataType.DOUBLE:
            return self._builder.Cast(constant, to=ir.DataType.DOUBLE)
        return constant

    def _constant(self, kind: ir.AttributeType, make: Callable[[str], Any]) -> ir.Value:
        form = f"value_{kind.name.lower()}"
        constant = self._builder.Constant(**{form: make(form)})
        constant.dtype = _CONSTANT_DTYPES[kind]  # inference stops at references
        constant.shape = ir.Shape([None] if kind is ir.AttributeType.INTS else [])
        return constant


def trace(body: Body, calls: Calls, opset: int, *, by_rank: bool = False) -> ir.Function:
    """Traces an op's body into one function of the model's opset, for its calls, which have the same inputs;
    `by_rank`: it may be for the ranks and attributes of these alone. ExportError: the builder does not fit
    the record, or the calls cannot share one."""
    key = body.build, calls[0].record, opset, by_rank, *dict.fromkeys(map(_seen_by_body, calls))
    if key not in _TRACED:
        if len(_TRACED) >= _MOST_TRACED:
            _TRACED.clear()
        _TRACED[key] = _traced(body, calls, opset, by_rank)
    return _TRACED[key].clone()


_TRACED, _MOST_TRACED = dict[tuple[Any, ...], ir.Function](), 256
"""What has been traced: the optimizer gives the forms of one model the same bodies a dozen times."""


def model_of(function: ir.Function, call: Call, nodes: Sequence[ir.Node] = ()) -> bytes:
    """Makes the model of a function body, as `twinop_op.body` gives it (`kernels/abi.h`).

    Args:
        function: `<domain>::<onnx_name>`, with all the record's inputs and with references to its attributes.
        call: of `make_call`: has the dtypes, and the inputs that the op gets.
        nodes: those of the graph. A library's model has none: it is run with the op's own node.
    """
    inputs = [ir.val(name, dtype=ONNX_TYPES[call.dtypes[name]]) for name in call.inputs]
    opsets = {**function.opset_imports, call.record.domain: call.record.domain_version}
    graph = ir.Graph(inputs, call.node.outputs, nodes=nodes, name="body", opset_imports=opsets)
    return ir.to_proto(ir.Model(graph, ir_version=10, functions=[function])).SerializeToString()


def _seen_by_body(call: Call) -> tuple[Any, ...]:
    """Returns all of a call that its body can depend on; attributes as text, because 0.0 == -0.0."""
    ranks = [(name, _rank(value)) for name, value in call.inputs.items()]
    return (*ranks, *call.dtypes.items(), repr(call.attributes))


def _traced(body: Body, calls: Calls, opset: int, by_rank: bool, split: Sequence[str] = ()) -> ir.Function:
    record = calls[0].record
    dtypes = {name: {call.dtypes[name] for call in calls} for name in calls[0].dtypes}
    floating = set().union(*dtypes.values()).intersection(_FLOATS)
    widest = ir.DataType.DOUBLE if "float64" in floating else ir.DataType.FLOAT
    compute = widest if floating else None  # to which the narrower types convert without loss

    def run(builder: Any, *inputs: ir.Value, any_float: bool) -> list[ir.Value]:
        ops = BodyOps(builder, calls, opset, compute, by_rank)
        arguments = list[ir.Value | None]()
        for value in inputs:
            kinds, is_given = dtypes[str(value.name)], value.name in calls[0].inputs
            seen = _argument(ops, value, kinds, compute, any_float) if is_given else None
            arguments.append(seen)
        outputs = _outputs(body, calls, by_rank, split, arguments, ops)
        results: list[ir.Value] = []
        for name, value in zip(record.outputs, outputs, strict=True):
            value = _as_output(builder, name, value, calls, inputs, any_float)
            if value.producer() is None or value in results:  # an output must be a node's own
                value = builder.Identity(value)
            results.append(value)
        return results

    def build(any_float: bool) -> ir.Function:
        known = {name: ONNX_TYPES[min(each)] if len(each) == 1 else None for name, each in dtypes.items()}
        # Typed if there is one dtype: constants beside it then get its type.
        formal = [ir.val(entry.name, dtype=known[entry.name]) for entry in record.inputs]
        given = [
            ir.Attr(each.name, ATTRIBUTE_TYPES[each.kind], default_of(each)) for each in record.attributes
        ]
        return build_function(
            partial(run, any_float=any_float), formal, domain=record.domain, name=record.onnx_name,
            attributes=given, opset_imports={"": opset},
        )  # fmt: skip

    try:
        function = build(any_float=False)
    except _SeveralValues as several:
        return _traced(body, calls, opset, by_rank, (*split, str(several)))
    if compute is ir.DataType.FLOAT and _names_floats(function):
        function = build(any_float=True)
    _rename(function, record)
    return function


def _outputs(
    body: Body, calls: Calls, by_rank: bool, split: Sequence[str], arguments: Sequence[Any], op: BodyOps
) -> Sequence[ir.Value]:
    """Builds a body, with a branch for each of the values that the attributes `split` have together."""
    record, groups = calls[0].record, dict[tuple[Any, ...], list[Call]]()
    for call in calls:
        groups.setdefault(tuple(call.attributes[name] for name in split), []).append(call)

    def build(group: Calls, op: BodyOps) -> Sequence[ir.Value]:
        op._calls = group
        result = body.build(op, *arguments, **_attributes(group, by_rank))
        outputs = list(result) if isinstance(result, (tuple, list)) else [result]
        if len(outputs) != len(record.outputs) or not all(isinstance(value, ir.Value) for value in outputs):
            raise ExportError(
                f"body {record.name} returned {result!r}; expected {len(record.outputs)} tensors: "
                f"{', '.join(record.outputs)}"
            )
        return outputs

    every = _attributes(calls, by_rank)
    return op.choose(
        [
            ([(every[name], each) for name, each in zip(split, values, strict=True)], partial(build, group))
            for values, group in sorted(groups.items(), key=lambda pair: pair[0])
        ],
        len(record.outputs),
    )


def _attributes(calls: Calls, by_rank: bool) -> dict[str, AttributeArgument]:
    """Returns what a body sees of its calls' attributes; `by_rank`: there will be no other calls."""
    record = calls[0].record
    finite = {"bool", "str", *(["int", "float"] if by_rank else [])}
    return {
        each.name: AttributeArgument(each, calls, each.kind in finite or each.name in record.choices)
        for each in record.attributes
    }


def _argument(
    ops: BodyOps, value: ir.Value, dtypes: set[str], compute: ir.DataType | None, any_float: bool
) -> ir.Value:
    """Returns what a body sees of an input that has these dtypes in the model."""
    floats = {ONNX_TYPES[dtype] for dtype in dtypes.intersection(_FLOATS)}
    if not floats or (not any_float and floats == {compute}):
        return value
    if dtypes.difference(_FLOATS):  # a cast could change an integer
        raise _mixed_error(ops._record, str(value.name), dtypes)
    return ops.computed(value)


def _names_floats(function: ir.Function) -> bool:
    """Whether constants or casts of a body are of one float type: others' converters to 16 bits keep them."""
    given = [(node, *pair) for node in function.all_nodes() for pair in node.attributes.items()]
    kinds = [ir.DataType(each.value) for node, _, each in given if node.op_type == "Cast"]
    kinds += [each.value.dtype for _, _, each in given if each.type is ir.AttributeType.TENSOR]
    return any(kind.is_floating_point() for kind in kinds) or "value_float" in [name for _, name, _ in given]


def _as_output(
    builder: Any, name: str, value: ir.Value, calls: Calls, inputs: Sequence[ir.Value], any_float: bool
) -> ir.Value:
    """Casts an output to the dtype that each call expects."""
    dtypes = {call.dtypes[name] for call in calls}
    wanted = ONNX_TYPES[min(dtypes)] if len(dtypes) == 1 else None
    if wanted is not None and not (any_float and wanted.is_floating_point()):
        return value if value.dtype is wanted else builder.Cast(value, to=wanted)
    for like in inputs:
        if all(like.name in call.inputs and call.dtypes[like.name] == call.dtypes[name] for call in calls):
            return builder.CastLike(value, like)
    if wanted is not None:
        return builder.Cast(value, to=wanted)
    raise _mixed_error(calls[0].record, name, dtypes)


def _mixed_error(record: OpSpec, name: str, dtypes: set[str]) -> ExportError:
    return ExportError(
        f"the calls of {record.onnx_name} want {name} as {', '.join(sorted(dtypes))}: one body cannot serve "
        f"them. Use one dtype in the model, or export without bodies ({option('bodies', False)})"
    )


def _rename(function: ir.Function, record: OpSpec) -> None:
    """Gives short names, and removes the types and notes that only hold for the traced calls."""
    taken = {*(entry.name for entry in record.inputs), *record.outputs}
    names = (name for i in itertools.count() if (name := f"v{i}") not in taken)
    values = list(function.inputs)
    for node in function.all_nodes():
        node.metadata_props.clear()
        node.name = None
        values += node.outputs
        for value in node.outputs:
            value.name = next(names)
    for value in values:
        value.type = value.shape = None
    for value, name in zip(function.outputs, record.outputs, strict=True):
        value.name = name
