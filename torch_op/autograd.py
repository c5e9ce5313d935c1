"""Autograd of an op from its derivative formulas (formulas.py)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch.autograd import forward_ad

from twinop.errors import RecordError
from twinop.record.op_spec import DOMAIN, OpSpec

from .arguments import bind, completion_of, empty_list_error, numbers_as_tensors, signature_of, tensors_of
from .formulas import Formulas
from .forward_mode import tangents_of
from .rules import as_tuple, narrow


def make_function(
    record: OpSpec, op: Callable[..., Any], functions: Mapping[str, Callable[..., Any]]
) -> tuple[Callable[..., Any], Callable[..., Any], type[torch.autograd.Function]]:
    """Returns the op's Python function, its kernel for torch's Autograd dispatch key, and its derivative.

    If a torch.func transform is active, the function calls `torch.autograd.Function` itself, because
    transforms do not see through the Autograd kernel of a dispatcher op.
    """
    signature = signature_of(record)
    formulas = Formulas(record, functions)
    names = list(signature.parameters)
    last = len(record.inputs) - 1
    repeated = record.inputs[last].name if record.has_repeated_input else None
    complete = completion_of(signature)

    def flatten(arguments: Iterable[Any]) -> Iterable[Any]:
        """Puts the entries of a `Tensor[]` in its place: autograd.Function sees no tensors in lists."""
        if repeated is None:
            return arguments
        given = list(arguments)
        return (*given[:last], *given[last], *given[last + 1 :])

    def named(values: Sequence[Any]) -> dict[str, Any]:
        """Returns values by name. torch.library gives ops in Python the list as it is."""
        if repeated is not None and not isinstance(values[last], list | tuple):
            stop = last + 1 + len(values) - len(names)
            values = (*values[:last], list(values[last:stop]), *values[stop:])
        return dict(zip(names, values, strict=True))

    def kept_of(ctx: Any) -> dict[str, Any]:
        kept = [*formulas.inputs, *formulas.outputs]
        if repeated in kept:
            kept.remove(repeated)
        saved = dict(zip(kept, ctx.saved_tensors, strict=False))
        return saved if repeated is None else saved | {repeated: list(ctx.saved_tensors[len(kept) :])}

    class OpFunction(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*args: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return op(*(args if repeated is None else named(args).values()))

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            arguments = named(inputs)
            results = dict(zip(record.outputs, as_tuple(output), strict=True))
            ctx.attributes = {entry.name: narrow(arguments[entry.name]) for entry in record.attributes}
            ctx.shapes = {
                name: None if arguments[name] is None else SimpleNamespace(shape=arguments[name].shape)
                for name in formulas.shapes
            }
            ctx.outputs = {
                name: SimpleNamespace(size=value.shape, dtype=value.dtype, device=value.device)
                for name, value in results.items()
            }
            ctx.set_materialize_grads(False)  # a tangent of zero would make a NaN beside an infinite operand
            if formulas.undifferentiated:
                ctx.mark_non_differentiable(*(results[name] for name in formulas.undifferentiated))
            kept = [arguments[name] for name in formulas.inputs if name != repeated]
            kept += [results[name] for name in formulas.outputs]
            if repeated in formulas.inputs:
                kept += arguments[repeated]
            ctx.save_for_backward(*kept)
            if forward_ad._current_level >= 0:
                ctx.save_for_forward(*kept)

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
            saved = kept_of(ctx)
            incoming = {
                f"grad_{name}": torch.zeros(**vars(like)) if grad is None else grad
                for (name, like), grad in zip(ctx.outputs.items(), grads, strict=True)
            }
            if len(grads) == 1:
                incoming["grad"] = incoming[f"grad_{record.outputs[0]}"]
            needs = named(ctx.needs_input_grad)
            wanted = {name for name, needed in needs.items() if needed is True or (needed and any(needed))}
            gradients = formulas.evaluate(incoming | ctx.attributes | ctx.shapes | saved, wanted)
            found: dict[str, Any] = {name: gradients.get(name) if name in wanted else None for name in names}
            if repeated is not None:
                count = len(needs[repeated])
                found[repeated] = [None] * count if found[repeated] is None else list(found[repeated])
                if len(found[repeated]) != count:
                    raise RecordError(
                        f"{record.qualified_name}: the derivative of {repeated} has {len(found[repeated])} "
                        f"gradients; expected one for each of its {count} tensors"
                    )
            listed = repeated is not None and isinstance(ctx.needs_input_grad[last], list | tuple)
            return tuple(found.values() if listed else flatten(found.values()))

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            saved = kept_of(ctx)
            given = {name: tangent for name, tangent in named(tangents).items() if tangent is not None}
            found = tangents_of(record, formulas, ctx.attributes | ctx.shapes | saved, ctx.outputs, given)
            return found if len(found) > 1 else found[0]

    OpFunction.__name__ = OpFunction.__qualname__ = record.onnx_name

    def kernel(*args: Any, **kwargs: Any) -> Any:
        arguments = complete(args, kwargs)
        tensors = tensors_of(arguments)
        if (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)) or _have_tangents(
            tensors
        ):
            if torch._C._are_functorch_transforms_active():
                place = "" if record.domain == DOMAIN else "load(path)."
                raise RecordError(
                    f"torch.func transforms do not support {record.torch_path}: call "
                    f"twinop.torch_op.{place}{record.functional_name} instead"
                )
            return OpFunction.apply(*flatten(arguments))
        with torch._C._AutoDispatchBelowAutograd():
            return op(*arguments)

    broadcasts = record.broadcasts

    def function(*args: Any, **kwargs: Any) -> Any:
        if broadcasts:
            args, kwargs = tuple(numbers_as_tensors(record, signature, args, kwargs)), {}
        elif repeated and bind(signature, args, kwargs)[repeated] in ([], ()):
            raise empty_list_error(record)
        if _are_transforms_active_but_vmap():
            return OpFunction.apply(*flatten(bind(signature, args, kwargs).values()))
        return op(*args, **kwargs)

    function.__name__ = function.__qualname__ = record.functional_name
    function.__module__ = "twinop.torch_op"
    function.__doc__ = (
        f"{record.domain}::{record.schema}\n\nDtypes: {record.dtypes}."
        + "".join(f" Returns {output}, the new {name}." for output, name in record.written.items())
        + (f" Limits: {_limits(record)}." if record.limits else "")
        + _views(record)
        + (" The inputs broadcast; one may be a Python number." if record.broadcasts else "")
    )
    function.__signature__ = signature  # type: ignore[attr-defined]
    return function, kernel, OpFunction


def _limits(record: OpSpec) -> str:
    limits = [f"{name} {word} {value}" for name, word, value in record.limits if word != "in"]
    choices = [f"{name} in {' | '.join(map(str, values))}" for name, values in record.choices.items()]
    return "; ".join(limits + choices)


def _are_transforms_active_but_vmap() -> bool:
    """Whether a torch.func transform is active that is not vmap, which calls the op on the batch."""
    if not torch._C._are_functorch_transforms_active():
        return False
    vmap = torch._C._functorch.TransformType.Vmap
    if torch.compiler.is_compiling():  # which does not trace the autograd.Function of an op
        if torch.compiler.is_dynamo_compiling() and retrieve_current_functorch_interpreter().key() != vmap:
            torch._dynamo.graph_break()
        return False
    return any(each.key() != vmap for each in torch._C._functorch.get_interpreter_stack() or ())


def _views(record: OpSpec) -> str:
    """Says what happens to non-contiguous inputs (call.cpp)."""
    if record.is_elementwise:
        return " Views with any strides are read where they are."
    if record.rows:
        return " Rows at one distance from each other are read where they are; other views are copied."
    return " Views that are not contiguous are copied."


def _have_tangents(tensors: list[torch.Tensor]) -> bool:
    return forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors
    )
