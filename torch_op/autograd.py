"""Autograd from a record's derivative formulas.

A formula is Python over the op's inputs, outputs and attributes, the incoming `grad` (`grad_<output>` where
there are several outputs), torch, and the other ops by name: `x = relu_backward(grad, y)`, as in torch's own
derivatives.yaml. Backward ops are ordinary ops with formulas of their own, which gives second derivatives.
"""

import ast
import struct
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.autograd import forward_ad

from twinop.errors import RecordError
from twinop.record import DOMAIN, Record
from twinop.torch_op.arguments import bind, signature_of


def _narrow(value: Any) -> Any:
    """Float attributes as the kernels see them: fp32, as in ONNX."""
    return struct.unpack("f", struct.pack("f", value))[0] if isinstance(value, float) else value


class _Formulas:
    """The compiled formulas of one record, and the tensors they need."""

    def __init__(self, record: Record, functions: Mapping[str, Callable[..., Any]]) -> None:
        self.record = record
        self.functions = functions
        self.code = {
            name: compile(text, f"<{record.name}>", "eval") for name, text in record.gradients.items()
        }
        used = {
            node.id
            for text in record.gradients.values()
            for node in ast.walk(ast.parse(text, mode="eval"))
            if isinstance(node, ast.Name)
        }
        self.inputs = [entry.name for entry in record.inputs if entry.name in used]
        self.outputs = [name for name in record.outputs if name in used]

    # The text is the record's own, from a library whose native code runs anyway.
    def evaluate(self, name: str, scope: dict[str, Any]) -> Any:
        return eval(self.code[name], {"torch": torch, **self.functions}, scope)


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
            scope = ctx.attributes | saved | incoming
            return tuple(
                formulas.evaluate(name, scope) if name in formulas.code and wanted else None
                for name, wanted in zip(names, ctx.needs_input_grad, strict=True)
            )

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            raise _forward_mode_error(record)

    OpFunction.__name__ = OpFunction.__qualname__ = record.onnx_name

    def kernel(*args: Any, **kwargs: Any) -> Any:
        # The dispatcher leaves out trailing defaults. Without Signature.bind a call of 1024
        # elements on the CPU takes 5.8 us instead of 9.0.
        arguments = bind(signature, args, kwargs).values() if kwargs else args + defaults[len(args) :]
        tensors = [value for value in arguments if isinstance(value, torch.Tensor)]
        _refuse_forward_mode(record, tensors)
        if formulas.code and torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            if torch._C._are_functorch_transforms_active():
                raise RecordError(
                    f"torch.func transforms do not see through torch.ops.{DOMAIN}.{record.name}: "
                    f"call twinop.torch_op.{record.name} instead"
                )
            return OpFunction.apply(*arguments)
        with torch._C._AutoDispatchBelowAutograd():
            return op(*arguments)

    def function(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
            return OpFunction.apply(*bind(signature, args, kwargs).values())
        return op(*args, **kwargs)

    function.__name__ = function.__qualname__ = record.name
    function.__module__ = "twinop.torch_op"
    function.__doc__ = (
        f"{DOMAIN}::{record.schema}\n\nDtypes: {record.dtypes}. See kernels/ops/{record.name}.h."
    )
    function.__signature__ = signature  # type: ignore[attr-defined]
    return function, kernel


def _refuse_forward_mode(record: Record, tensors: list[torch.Tensor]) -> None:
    # Without this check forward-mode AD would pass through the op and return zeros.
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise _forward_mode_error(record)


def _forward_mode_error(record: Record) -> RecordError:
    return RecordError(
        f"{DOMAIN}::{record.name} has no forward-mode derivative (jvp, torch.func.jvp, jacfwd). "
        "Use reverse mode: torch.autograd.grad, torch.func.vjp or jacrev"
    )
