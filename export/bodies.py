# mypy: allow-untyped-defs
"""Function bodies: each op once more, in standard ONNX operators.

A body is what an exported model runs where the custom-op library is missing, what ONNX's shape inference
sees, and the specification that tests compare the kernels with. It is a Python function named as the op, over
the inputs (positional) and the attributes (keyword-only) of the op's record:

    @body
    def silu(op, x):
        return op.Mul(x, op.Sigmoid(x))

* `op.Mul(...)` adds a node of the model's opset: tensors positionally, ONNX attributes by name. A Python
  number beside a tensor becomes a constant of its type, a float alone (`op.Expand(1.0, shape)`) one of the
  compute type.
* Floating inputs arrive in the compute type (fp32 for 16-bit inputs, which ORT's CPU kernels rarely take,
  fp64 for fp64), and outputs are cast back: a body has no casts of its own. Where the kernel rounds in
  between, `op.rounded(y, x)` is y rounded to the type in which the model holds the input x.
* An optional input is None where the model leaves it out: use an ordinary `if weight is not None`.
* An attribute is a reference to the node's own value. Give it to an operator as an attribute (`axis=axis`) or
  in place of a tensor (`op.Mul(x, scale)`). `axis.value` is the value itself, for Python's `if` and `for`:
  then a model whose nodes differ in it is refused, because ONNX holds one body per op. `axis.values` is the
  set of the values in the model.
* Several outputs are returned as a tuple, in the record's order.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, overload

from twinop.errors import ExportError
from twinop.record import DOMAIN, Record

Builder = Callable[..., Any]


@dataclass(frozen=True)
class Neutral:
    """What an absent optional input stands for: `value` everywhere, in the shape of the first input's
    dimensions from `start` on. It is supplied where only some nodes of a model leave the input out. A string
    is the name of an attribute: the node's own value of it; `value` may be a function of the attributes."""

    value: float | Callable[[Mapping[str, Any]], float]
    start: int | str = -1


@dataclass(frozen=True)
class Body:
    build: Builder
    neutral: Mapping[str, Neutral] = field(default_factory=dict)

    def check(self, record: Record) -> None:
        """Compares the body's arguments with the record's.

        Raises:
            ExportError: they differ.
        """
        if record.has_repeated_input:
            raise ExportError(
                f"body {record.name}: {record.schema} takes a list of tensors, and an ONNX function has a "
                "fixed number of inputs: the op can have no body"
            )
        _, *parameters = inspect.signature(self.build).parameters.values()  # without `op`
        keyword_only = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
        positional = [p.name for p in parameters if p.name not in keyword_only]
        inputs = [entry.name for entry in record.inputs]
        optional = [entry.name for entry in record.inputs if entry.optional]
        attributes = [entry.name for entry in record.attributes]
        wanted = ", ".join(["op", *inputs, *(["*", *attributes] if attributes else [])])
        if positional != inputs or sorted(keyword_only) != sorted(attributes):
            raise ExportError(
                f"body {record.name}{inspect.signature(self.build)} does not fit the op {record.schema}; "
                f"expected def {record.name}({wanted})"
            )
        if unknown := sorted(set(self.neutral) - set(optional)):
            raise ExportError(
                f"body {record.name}: neutral names {', '.join(unknown)}; the optional inputs of "
                f"{record.schema} are: {', '.join(optional) or 'none'}"
            )


_bodies: dict[str, Body] = {}


@overload
def body(function: Builder) -> Builder: ...
@overload
def body(
    *, neutral: Mapping[str, Neutral] | None = None, domain: str = DOMAIN
) -> Callable[[Builder], Builder]: ...
def body(
    function: Builder | None = None,
    *,
    neutral: Mapping[str, Neutral] | None = None,
    domain: str = DOMAIN,
) -> Any:
    """Registers the function body of the op of the same name (the module docstring tells how to write one).

    Args:
        neutral: what an absent optional input stands for, by name. Without it, a model in which only some
            nodes have that input is refused.
        domain: the domain of the op's library.

    Raises:
        ExportError: the op has a body from another place.
    """

    def register(function: Builder) -> Builder:
        name = function.__name__ if domain == DOMAIN else f"{domain}::{function.__name__}"
        if name in _bodies and _place(_bodies[name].build) != _place(function):
            raise ExportError(
                f"op {name} has a body already, from {_place(_bodies[name].build)}; the second is from "
                f"{_place(function)}. A model holds one body per op: remove one of them"
            )
        _bodies[name] = Body(function, dict(neutral or {}))
        return function

    return register if function is None else register(function)


def _place(function: Builder) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def find_body(name: str) -> Body | None:
    """The body of an op, by `Record.key`."""
    return _bodies.get(name)


# ----------------------------------------------------------------------------------------- twinop's ops


@body
def relu(op, x, *, variant):
    # Not op.Relu: ONNX does not say what it does with NaN, and runtimes differ. x stands in the second branch
    # because ONNX Runtime's Where makes a -0 of the first +0.
    return op.Where(op.Less(x, 0), 0, x)


@body
def gelu(op, x, *, approximate):
    if approximate.values == {"tanh"}:
        # Not op.Gelu, whose constants are fp32, so that fp64 would come out with 6e-9 of error.
        inner = op.Mul(op.Mul(op.Add(op.Mul(op.Mul(x, x), 0.044715), 1.0), x), (2 / math.pi) ** 0.5)
        return op.Mul(op.Mul(x, 0.5), op.Add(op.Tanh(inner), 1.0))
    return op.Gelu(x, approximate=approximate)


@body
def silu(op, x):
    # Not op.Sigmoid: ONNX Runtime's is 0 below -18, or 1e-8, and x may be any size.
    return op.Div(x, op.Add(op.Exp(op.Neg(x)), 1.0))


@body
def sigmoid(op, x):
    return op.Sigmoid(x)


@body
def tanh(op, x):
    return op.Tanh(x)


@body
def softplus(op, x):
    return op.Softplus(x)


@body
def exp(op, x):
    return op.Exp(x)


@body
def log(op, x):
    return op.Log(x)


@body
def square(op, x):
    return op.Mul(x, x)


@body
def add(op, a, b):
    return op.Add(a, b)


@body
def mul(op, a, b):
    return op.Mul(a, b)


@body
def pow(op, a, b):
    return op.Pow(a, b)


@body
def matmul(op, a, b, *, variant, tile):
    return op.MatMul(a, b)


@body
def swiglu(op, x, gate):
    return op.Mul(silu(op, gate), x)


@body
def swiglu_packed(op, x):
    # Not op.Split: ONNX Runtime's refuses a dimension of size 0.
    middle = op.Div(op.Shape(x, start=-1), 2)
    gate = op.Slice(x, [0], middle, [-1])
    return swiglu(op, op.Slice(x, middle, op.Shape(x, start=-1), [-1]), gate)


@body
def softmax(op, x, *, dim):
    return op.Softmax(x, axis=dim)


# The norms are not op.LayerNormalization, which refuses rows without columns in ONNX Runtime, nor
# op.RMSNormalization, which opset 23 has first.


@body(neutral={"weight": Neutral(1, "axis"), "bias": Neutral(0, "axis")})
def layer_norm(op, x, weight, bias, *, axis, eps):
    axes = _behind(op, x, axis)
    centred = op.Sub(x, op.ReduceMean(x, axes))
    return _affine(op, _unit_mean_square(op, centred, axes, eps), weight, bias)


@body(neutral={"weight": Neutral(lambda attributes: 1 - attributes["offset"], "axis")})
def rms_norm(op, x, weight, *, axis, eps, offset):
    normal = _unit_mean_square(op, x, _behind(op, x, axis), eps)
    return _affine(op, normal, None if weight is None else op.Add(weight, op.CastLike(offset, weight)))


@body(neutral={"bias": Neutral(0)})
def add_layer_norm(op, x, residual, weight, bias, *, eps):
    total = op.rounded(op.Add(x, residual), x)
    centred = op.Sub(total, op.ReduceMean(total, [-1]))
    return _affine(op, _unit_mean_square(op, centred, [-1], eps), weight, bias), total


@body(neutral={"bias": Neutral(0)})
def add_rms_norm(op, x, residual, weight, bias, *, eps, offset):
    total = op.rounded(op.Add(x, residual), x)
    weight = op.Add(weight, op.CastLike(offset, weight))
    return _affine(op, _unit_mean_square(op, total, [-1], eps), weight, bias), total


def _behind(op, x, axis):
    """The dimensions of x from `axis` on, counted from the end."""
    return op.Range(op.Neg(op.Size(op.Shape(x, start=axis))), 0, 1)


def _unit_mean_square(op, x, axes, eps):
    return op.Div(x, op.Sqrt(op.Add(op.ReduceMean(op.Mul(x, x), axes), eps)))


def _affine(op, x, weight=None, bias=None):
    y = x if weight is None else op.Mul(x, weight)
    return y if bias is None else op.Add(y, bias)
