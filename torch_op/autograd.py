"""Autograd of an op from its derivative formulas (formulas.py)."""

import hashlib
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.compiler.config
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch.autograd import forward_ad

from twinop.errors import RecordError
from twinop.libraries.declare import DERIVATIVES, SECOND_DERIVATIVES
from twinop.record.op_spec import DOMAIN, OpSpec

from .arguments import bind, completion_of, numbers_as_tensors, signature_of, tensors_of
from .formulas import Formulas
from .rules import as_tuple, narrow


def make_function(
    record: OpSpec, op: Callable[..., Any], functions: Mapping[str, Callable[..., Any]]
) -> tuple[Callable[..., Any], Callable[..., Any], type[torch.autograd.Function]]:
    """Returns the op's Python function, its kernel for torch's Autograd dispatch key, and its derivative.

    If a torch.func transform is active, the function calls `torch.autograd.Function` itself, because
    transforms do not see through the Autograd kernel of a dispatcher op.
    """
    _tell_caches(record)
    signature = signature_of(record)
    formulas = Formulas(record, functions)
    names = list(signature.parameters)
    complete = completion_of(signature)

    def kept_of(ctx: Any) -> dict[str, Any]:
        return dict(zip([*formulas.inputs, *formulas.outputs], ctx.saved_tensors, strict=True))

    class OpFunction(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*args: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return op(*args)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            arguments = dict(zip(names, inputs, strict=True))
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
            kept = [arguments[name] for name in formulas.inputs]
            kept += [results[name] for name in formulas.outputs]
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
            wanted = {name for name, needed in zip(names, ctx.needs_input_grad, strict=True) if needed}
            gradients = formulas.evaluate(incoming | ctx.attributes | ctx.shapes | saved, wanted)
            return tuple(gradients.get(name) if name in wanted else None for name in names)

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            saved = kept_of(ctx)
            given = {n: tangent for n, tangent in zip(names, tangents, strict=True) if tangent is not None}
            found = formulas.tangents(ctx.attributes | ctx.shapes | saved, ctx.outputs, given)
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
            return OpFunction.apply(*arguments)
        with torch._C._AutoDispatchBelowAutograd():
            return op(*arguments)

    broadcasts = record.broadcasts

    def function(*args: Any, **kwargs: Any) -> Any:
        if broadcasts:
            args, kwargs = tuple(numbers_as_tensors(record, signature, args, kwargs)), {}
        if _are_transforms_active_but_vmap():
            return OpFunction.apply(*bind(signature, args, kwargs).values())
        return op(*args, **kwargs)

    function.__name__ = function.__qualname__ = record.functional_name
    function.__module__ = "twinop.torch_op"
    function.__doc__ = f"{record.domain}::{record.schema}\n\nDtypes: {record.dtypes}."
    function.__signature__ = signature  # type: ignore[attr-defined]
    return function, kernel, OpFunction


_told: set[str] = set()
_tag = ""


def _tell_caches(record: OpSpec) -> None:
    """Adds an op's meaning to the key of torch.compile's caches on disk: their graphs have its derivative,
    and would have the old one after the op was built with another."""
    global _tag
    functions = [DERIVATIVES.get(record.key), SECOND_DERIVATIVES.get(record.key)]
    codes = [code for each in functions if (code := getattr(each, "__code__", None))]
    parts = [(c.co_code, c.co_names, [v for v in c.co_consts if not hasattr(v, "co_code")]) for c in codes]
    _told.add(hashlib.sha256(repr((record, parts)).encode()).hexdigest())
    digest = hashlib.sha256("".join(sorted(_told)).encode()).hexdigest()[:16]
    config: Any = torch.compiler.config
    # It has no value where somebody has deleted theirs, as pytest's monkeypatch does.
    before, _tag = getattr(config, "cache_key_tag", "").removesuffix(_tag), f" twinop {digest}"
    config.cache_key_tag = before + _tag


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


def _have_tangents(tensors: list[torch.Tensor]) -> bool:
    return forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors
    )
