"""Autograd from a record's derivative formulas.

A formula is Python over the op's inputs, outputs and attributes, the incoming `grad` (`grad_<output>` where
there are several outputs), torch, and the other ops by name: `x = relu_backward(grad, y)`, as in torch's own
derivatives.yaml. One that gives several gradients, `x, weight = f(grad)`, is evaluated once; the formulas
behind it may use them: `residual = grad_x`. An input without a formula has derivative zero; an op without any
refuses to be differentiated. Backward ops are ordinary ops with formulas of their own, which gives second
derivatives.
"""

import ast
import builtins
import ctypes
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch.autograd import forward_ad

from twinop.errors import RecordError
from twinop.record import DOMAIN, Record
from twinop.torch_op.arguments import bind, numbers_as_tensors, signature_of, tensors_of


def _narrow(value: Any) -> Any:
    """Float attributes as the kernels see them: fp32, as in ONNX."""
    return ctypes.c_float(value).value if isinstance(value, float) else value


class _Formulas:
    """The compiled formulas of one record, and what they need of a call."""

    def __init__(self, record: Record, functions: Mapping[str, Callable[..., Any]]) -> None:
        self.record = record
        self.functions = functions
        self.code = [compile(gradient.text, f"<{record.name}>", "eval") for gradient in record.gradients]
        trees = [ast.parse(gradient.text, mode="eval") for gradient in record.gradients]
        self.used = [_names(tree) for tree in trees]
        # `a.shape` alone needs no more of `a` than that: broadcasting ops would keep all their inputs alive.
        values = set().union(*(_names(tree, but_shapes=True) for tree in trees))
        used = set().union(*self.used)
        self.inputs = [entry.name for entry in record.inputs if entry.name in values]
        self.shapes = [entry.name for entry in record.inputs if entry.name in used - values]
        self.outputs = [name for name in record.outputs if name in used]

    def evaluate(self, scope: dict[str, Any], wanted: set[str]) -> dict[str, Any]:
        """The gradients of the inputs wanted, by name."""
        if not self.code:
            once = (
                "it can be differentiated once, not twice" if self.record.is_backward else "detach its inputs"
            )
            raise RecordError(f"{self.record.qualified_name} has no derivative; {once}")
        needed, selected = set(wanted), []
        for i in reversed(range(len(self.code))):
            if needed & set(self.record.gradients[i].inputs):
                # `grad_x` is an earlier gradient unless the op has an argument of that name.
                needed |= {name.removeprefix("grad_") for name in self.used[i] - set(scope)}
                selected.append(i)
        result: dict[str, Any] = {}
        for i in reversed(selected):
            # The text is the record's own, from a library whose native code runs anyway.
            value = eval(self.code[i], {"torch": torch, **self.functions, **scope})
            names = self.record.gradients[i].names
            values = value if len(names) > 1 else (value,)
            result |= zip(names, values, strict=True)
            scope = {f"grad_{name}": value for name, value in zip(names, values, strict=True)} | scope
        return result


def check_formulas(record: Record, ops: Iterable[str]) -> None:
    """Checks that the record's formulas are Python, give gradients of its inputs, and use only what there is.

    Args:
        ops: the ops that a formula may call.

    Raises:
        RecordError: a formula does not parse, or one of its names is unknown.
    """
    inputs = [entry.name for entry in record.inputs]
    outputs = [f"grad_{name}" for name in record.outputs] if len(record.outputs) > 1 else ["grad"]
    attributes = [entry.name for entry in record.attributes]
    known = [*inputs, *record.outputs, *attributes, *outputs]  # in the order of the message
    for gradient in record.gradients:
        where = f"{record.domain}::{record.name}: derivative `{', '.join(gradient.names)} = {gradient.text}`"
        try:
            tree = ast.parse(gradient.text, mode="eval")
        except SyntaxError as error:
            raise RecordError(f"{where} is not a Python expression: {error.msg}") from error
        if wrong := [name for name in gradient.inputs if name not in inputs]:
            raise RecordError(
                f"{where} is of {', '.join(wrong)}, expected inputs of the op: {', '.join(inputs)}"
            )
        if unknown := sorted(_free_names(tree) - {*known, *ops, "torch", *dir(builtins)}):
            raise RecordError(
                f"{where} uses {', '.join(unknown)}, expected {', '.join(known)}, torch, or an op by its name"
            )
        known += [f"grad_{name}" for name in gradient.inputs]


def _free_names(tree: ast.AST) -> set[str]:
    """The names that an expression takes from outside, not those of its lambdas and comprehensions."""
    own = {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    own |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    return _names(tree) - own


def _names(tree: ast.AST, but_shapes: bool = False) -> set[str]:
    """The names that an expression uses; `but_shapes`: other than as `name.shape`."""
    shapes = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "shape" and but_shapes
    }
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in shapes}


def make_function(
    record: Record, op: Callable[..., Any], functions: Mapping[str, Callable[..., Any]]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns the op's Python function and its kernel for torch's Autograd dispatch key.

    The function goes through `torch.autograd.Function` itself when a torch.func transform is active:
    transforms do not see through the Autograd kernel of a dispatcher op.
    """
    signature = signature_of(record)
    formulas = _Formulas(record, functions)
    names = list(signature.parameters)
    defaults = tuple(parameter.default for parameter in signature.parameters.values())

    class OpFunction(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*args: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return op(*args)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            arguments = dict(zip(names, inputs, strict=True))
            outputs = output if isinstance(output, tuple) else (output,)
            results = dict(zip(record.outputs, outputs, strict=True))
            ctx.attributes = {entry.name: _narrow(arguments[entry.name]) for entry in record.attributes}
            ctx.shapes = {
                name: None if arguments[name] is None else SimpleNamespace(shape=arguments[name].shape)
                for name in formulas.shapes
            }
            ctx.save_for_backward(
                *(arguments[name] for name in formulas.inputs), *(results[name] for name in formulas.outputs)
            )

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            saved = dict(zip(formulas.inputs + formulas.outputs, ctx.saved_tensors, strict=True))
            if len(grads) == 1:
                incoming = {"grad": grads[0]}
            else:
                incoming = {f"grad_{name}": grad for name, grad in zip(record.outputs, grads, strict=True)}
            needs = dict(zip(names, ctx.needs_input_grad, strict=True))
            wanted = {name for name, needed in needs.items() if needed}
            gradients = formulas.evaluate(ctx.attributes | ctx.shapes | saved | incoming, wanted)
            return tuple(gradients.get(name) if needed else None for name, needed in needs.items())

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            raise _forward_mode_error(record)

    OpFunction.__name__ = OpFunction.__qualname__ = record.onnx_name

    def kernel(*args: Any, **kwargs: Any) -> Any:
        # The dispatcher leaves out trailing defaults. Without Signature.bind a call of 1024
        # elements on the CPU takes 5.8 us instead of 9.0.
        arguments = bind(signature, args, kwargs).values() if kwargs else args + defaults[len(args) :]
        tensors = tensors_of(arguments)
        _refuse_forward_mode(record, tensors)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            if record.has_repeated_input:
                raise RecordError(
                    f"{record.qualified_name} takes a list of tensors and has no derivative; detach them"
                )
            if torch._C._are_functorch_transforms_active():
                raise RecordError(
                    f"torch.func transforms do not see through torch.ops.{record.namespace}.{record.name}: "
                    f"call {_function_path(record)} instead"
                )
            return OpFunction.apply(*arguments)
        with torch._C._AutoDispatchBelowAutograd():
            return op(*arguments)

    def function(*args: Any, **kwargs: Any) -> Any:
        if record.broadcasts:
            return call(*numbers_as_tensors(record, signature, args, kwargs))
        return call(*args, **kwargs)

    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
            return OpFunction.apply(*bind(signature, args, kwargs).values())
        return op(*args, **kwargs)

    function.__name__ = function.__qualname__ = record.name
    function.__module__ = "twinop.torch_op"
    function.__doc__ = (
        f"{record.domain}::{record.schema}\n\nDtypes: {record.dtypes}."
        + (f" Limits: {record.limits}." if record.limits else "")
        + _views(record)
        + (" The inputs broadcast; one may be a Python number." if record.broadcasts else "")
    )
    function.__signature__ = signature  # type: ignore[attr-defined]
    return function, kernel


def _function_path(record: Record) -> str:
    own = record.domain == DOMAIN
    return f"twinop.torch_op.{record.name}" if own else f"twinop.torch_op.load(path).{record.name}"


def _views(record: Record) -> str:
    """What becomes of non-contiguous inputs (call.cpp)."""
    if record.is_elementwise:
        return " Views with any strides are read where they are."
    if record.rows:
        return " Rows at one distance from each other are read where they are; other views are copied."
    return " Views that are not contiguous are copied."


def _refuse_forward_mode(record: Record, tensors: list[torch.Tensor]) -> None:
    # Without this check forward-mode AD would pass through the op and return zeros.
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise _forward_mode_error(record)


def _forward_mode_error(record: Record) -> RecordError:
    return RecordError(
        f"{record.qualified_name} has no forward-mode derivative (jvp, torch.func.jvp, jacfwd). "
        "Use reverse mode: torch.autograd.grad, torch.func.vjp or jacrev"
    )
