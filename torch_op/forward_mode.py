"""Forward-mode derivatives (jvp, jacfwd, hessian), where they follow from the derivative formulas.

The Jacobian of an elementwise op is diagonal. So its product with a tangent is the formula of the gradient,
with the tangent in the place of the incoming gradient. Where a backward op is written in torch's operators,
torch differentiates it.
"""

from collections.abc import Mapping
from typing import Any

import torch

from twinop.errors import RecordError
from twinop.libraries.declare import SECOND_DERIVATIVES
from twinop.record.op_spec import OpSpec

from .formulas import Formulas, in_torch_of_call


def tangents_of(
    record: OpSpec,
    formulas: Formulas,
    scope: Mapping[str, Any],
    outputs: Mapping[str, Any],
    tangents: Mapping[str, torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    """Returns the tangents of a call's outputs; RecordError: the op has no forward mode.

    `outputs` has the `size` and the `dtype` of each. Inputs without a tangent have a zero one.
    """
    function = None if record.gradients else SECOND_DERIVATIVES.get(record.key)
    follows = function is not None or (record.is_elementwise and formulas.exist)
    if record.has_repeated_input or not follows:
        raise RecordError(
            f"{record.qualified_name} has no forward-mode derivative (jvp, torch.func.jvp, jacfwd). "
            "Use reverse mode: torch.autograd.grad, torch.func.vjp or jacrev"
        )
    if function is not None:
        outputs_of, given = in_torch_of_call(record, function, scope)
        moving = {name: given.pop(name) for name in tangents if name in given}

        def of_moving(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return outputs_of(given | tensors)

        # Twice in reverse: the gradient is linear in the cotangent, and torch does not nest forward mode.
        values, pull = torch.func.vjp(of_moving, moving)  # type: ignore[misc]
        cotangents = {name: torch.zeros_like(value) for name, value in values.items()}
        _, push = torch.func.vjp(lambda cotangents: pull(cotangents)[0], cotangents)  # type: ignore[misc]
        (found,) = push({name: tangents[name].to(value.dtype) for name, value in moving.items()})
    else:
        found = _of_elementwise(formulas, scope, outputs, tangents)
    return tuple(found[name].to(like.dtype) for name, like in outputs.items())


def _of_elementwise(
    formulas: Formulas,
    scope: Mapping[str, Any],
    outputs: Mapping[str, Any],
    tangents: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    shape = next(iter(outputs.values())).size
    tensors = {name: value.expand(shape) for name, value in scope.items() if isinstance(value, torch.Tensor)}
    found = {}
    for output, like in outputs.items():
        terms = []
        for name, tangent in tangents.items():
            incoming = tangent.to(like.dtype).expand(shape)
            grads = {f"grad_{other}": torch.zeros_like(incoming) for other in outputs if other != output}
            grads["grad" if len(outputs) == 1 else f"grad_{output}"] = incoming
            terms.append(formulas.evaluate({**scope, **tensors, **grads}, {name}).get(name))
        given = [term for term in terms if term is not None]
        found[output] = sum(given[1:], given[0]) if given else torch.zeros_like(incoming)
    return found
