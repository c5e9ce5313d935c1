"""Runs a body builder once and records it as an ONNX function."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import onnx_ir as ir
from onnxscript import build_function

from twinop.errors import ExportError
from twinop.export.bodies import Body
from twinop.export.schema import ATTRIBUTE_TYPES, ONNX_TYPES, default_of
from twinop.record import Attribute, Record


@dataclass(frozen=True)
class CallSite:
    """What one node says about its call."""

    node: str
    dtypes: Mapping[str, str]  # of every input and output, by name: one of the record's combinations
    present: frozenset[str]  # names of the inputs given
    attributes: Mapping[str, Any]  # all of them, as ONNX holds them


class AttributeArgument:
    """An attribute as a body sees it: a reference to the value of whichever node calls the function."""

    def __init__(self, record: Record, attribute: Attribute, calls: Sequence[CallSite]) -> None:
        self._record = record
        self._attribute = attribute
        self._calls = calls
        self.type = ATTRIBUTE_TYPES[attribute.kind]

    @property
    def values(self) -> set[Any]:
        """All the values in the model."""
        return {call.attributes[self._attribute.name] for call in self._calls}

    @property
    def value(self) -> Any:
        """The value, which is then the same in all of the model.

        Raises:
            ExportError: the model's nodes have different values.
        """
        nodes: dict[Any, str] = {}  # value -> the first node that has it
        for call in self._calls:
            nodes.setdefault(call.attributes[self._attribute.name], call.node)
        if len(nodes) > 1:
            described = ", ".join(f"{value!r} in {node}" for value, node in nodes.items())
            raise ExportError(
                f"the body of {self._record.onnx_name} needs one value of {self._attribute.name} in the "
                f"whole model, which has {described}. Export without bodies (bodies=False, --no-bodies; the "
                "model then needs the library), or write the body without .value"
            )
        value = next(iter(nodes))
        return bool(value) if self._attribute.kind == "bool" else value

    def reference(self, name: str) -> ir.Attr:
        """An attribute `name` of a node of the body, bound to this one."""
        return ir.RefAttr(name, self._attribute.name, self.type)

    def _refuse(self, *_: Any) -> Any:
        name = self._attribute.name
        raise ExportError(
            f"body {self._record.name}: attribute {name} is used as a Python value; {name} is a reference "
            f"to the node's attribute. Write {name}.value for the value itself (see twinop/export/bodies.py)"
        )

    __eq__ = __bool__ = __len__ = __iter__ = __getitem__ = __int__ = __float__ = __index__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __neg__ = (
        _refuse
    )
    __lt__ = __le__ = __gt__ = __ge__ = __hash__ = _refuse


_CONSTANTS = {
    ir.AttributeType.INT: ("value_int", ir.DataType.INT64),
    ir.AttributeType.FLOAT: ("value_float", ir.DataType.FLOAT),
    ir.AttributeType.STRING: ("value_string", ir.DataType.STRING),
    ir.AttributeType.INTS: ("value_ints", ir.DataType.INT64),
}
"""How a Constant node holds an attribute of each type."""


class BodyOps:
    """`op` of a body: `op.Mul(x, y)` adds a node of that type."""

    def __init__(self, builder: Any, record: Record, opset: int, compute: ir.DataType | None) -> None:
        self._builder = builder  # onnxscript.OpBuilder
        self._record = record
        self._opset = opset
        self._compute = compute
        self._stored: dict[ir.Value, ir.Value] = {}  # an input in the compute type -> as the model holds it

    def computed(self, value: ir.Value) -> ir.Value:
        """An input in the compute type."""
        result = self._builder.Cast(value, to=self._compute)
        self._stored[result] = value
        return result

    def rounded(self, value: ir.Value, like: ir.Value) -> ir.Value:
        """The value rounded to the type in which the model holds the input `like`."""
        if like not in self._stored:
            return value
        return self._builder.Cast(self._builder.CastLike(value, self._stored[like]), to=self._compute)

    def __getattr__(self, op_type: str) -> Any:
        try:
            schema = onnx.defs.get_schema(op_type, self._opset, "")
            deprecated = schema.deprecated
        except onnx.defs.SchemaError:
            deprecated = True
        if deprecated:
            raise ExportError(
                f"body {self._record.name}: opset {self._opset} has no operator {op_type}. "
                "Use operators of opset 20, or ask for a later one (opset=, --opset)"
            )

        def add(*inputs: Any, **attributes: Any) -> Any:
            beside = any(self._is_floating(value) for value in inputs)
            tensors = [self._tensor(value, beside) for value in inputs]
            named = {
                name: value.reference(name) if isinstance(value, AttributeArgument) else value
                for name, value in attributes.items()
            }
            return getattr(self._builder, op_type)(*tensors, **named)

        return add

    def _is_floating(self, value: Any) -> bool:
        if isinstance(value, AttributeArgument):
            return value.type is ir.AttributeType.FLOAT
        return isinstance(value, ir.Value) and value.dtype is not None and value.dtype.is_floating_point()

    def _tensor(self, value: Any, beside_floating: bool) -> Any:
        """What onnxscript takes for a tensor: attributes, strings and lone floats become Constant nodes."""
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
        form, dtype = _CONSTANTS[kind]
        constant = self._builder.Constant(**{form: make(form)})
        constant.dtype = dtype  # inference stops at references
        constant.shape = ir.Shape([None] if kind is ir.AttributeType.INTS else [])
        return constant


def trace(record: Record, body: Body, calls: Sequence[CallSite], opset: int) -> ir.Function:
    """The op's body as a function for all the calls of one model.

    Args:
        calls: the model's nodes of this op; they must agree in which inputs are present.
        opset: the model's, which a function's must equal.

    Raises:
        ExportError: the builder does not fit the record, or the calls cannot share one function.
    """
    body.check(record)
    floating = {dtype for call in calls for dtype in call.dtypes.values() if dtype in _FLOATING}
    compute = None
    if floating:  # the widest of the model's: narrower inputs convert to it without loss
        compute = ir.DataType.DOUBLE if "float64" in floating else ir.DataType.FLOAT
    attributes = {entry.name: AttributeArgument(record, entry, calls) for entry in record.attributes}

    def run(builder: Any, *inputs: ir.Value) -> list[ir.Value]:
        arguments: list[ir.Value | None] = []
        ops = BodyOps(builder, record, opset, compute)
        for value in inputs:
            if value.name not in calls[0].present:
                arguments.append(None)
                continue
            dtypes = {call.dtypes[value.name] for call in calls}
            if dtypes & _FLOATING and {ONNX_TYPES[dtype] for dtype in dtypes} != {compute}:
                value = ops.computed(value)
            arguments.append(value)
        result = body.build(ops, *arguments, **attributes)
        outputs = list(result) if isinstance(result, (tuple, list)) else [result]
        if len(outputs) != len(record.outputs) or not all(isinstance(value, ir.Value) for value in outputs):
            raise ExportError(
                f"body {record.name} returned {result!r}; expected {len(record.outputs)} tensors: "
                f"{', '.join(record.outputs)}"
            )
        by_name = dict(zip((entry.name for entry in record.inputs), inputs, strict=True))
        results: list[ir.Value] = []
        for name, value in zip(record.outputs, outputs, strict=True):
            value = _as_output(builder, record, name, value, calls, by_name)
            if value.producer() is None or value in results:  # an output must be a node's own
                value = builder.Identity(value)
            results.append(value)
        return results

    function = build_function(
        run,
        [_formal_input(entry.name, calls) for entry in record.inputs],
        domain=record.domain,
        name=record.onnx_name,
        attributes=[
            ir.Attr(entry.name, ATTRIBUTE_TYPES[entry.kind], default_of(entry)) for entry in record.attributes
        ],
        opset_imports={"": opset},
    )
    _tidy(function, record)
    return function


_FLOATING = {"float32", "float16", "bfloat16", "float64"}


def _formal_input(name: str, calls: Sequence[CallSite]) -> ir.Value:
    """Typed where all calls agree, so that constants beside it get its type at once."""
    dtypes = {call.dtypes[name] for call in calls}
    return ir.val(name, dtype=ONNX_TYPES[dtypes.pop()] if len(dtypes) == 1 else None)


def _as_output(
    builder: Any,
    record: Record,
    name: str,
    value: ir.Value,
    calls: Sequence[CallSite],
    inputs: Mapping[str, ir.Value],
) -> ir.Value:
    """The output in the dtype that each call wants of it."""
    dtypes = {call.dtypes[name] for call in calls}
    if len(dtypes) == 1:
        wanted = ONNX_TYPES[dtypes.pop()]
        return value if value.dtype is wanted else builder.Cast(value, to=wanted)
    for entry in record.inputs:
        if all(entry.name in call.present and call.dtypes[entry.name] == call.dtypes[name] for call in calls):
            return builder.CastLike(value, inputs[entry.name])
    raise ExportError(
        f"the calls of {record.onnx_name} want {name} as {', '.join(sorted(dtypes))}, and no input has "
        "always the same dtype: one body cannot serve them. Use one dtype in the model"
    )


def _tidy(function: ir.Function, record: Record) -> None:
    """Short names, and none of the types and notes that are true of the tracing only."""
    for value in function.inputs:
        value.type = value.shape = None
    taken = {*(entry.name for entry in record.inputs), *record.outputs}
    names = (name for i in itertools.count() if (name := f"v{i}") not in taken)
    for node in function:
        node.metadata_props.clear()
        node.name = None
        for value in node.outputs:
            value.name = next(names)
            value.type = value.shape = None
    for value, name in zip(function.outputs, record.outputs, strict=True):
        value.name = name
