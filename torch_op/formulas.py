"""The derivative formulas of an op.

A record's formula is Python over the op's inputs, outputs and attributes, the incoming `grad`
(`grad_<output>` where there are several outputs), torch, and the other ops by name:
`x = relu_backward(grad, y)`, as in torch's own derivatives.yaml. A formula that gives several gradients,
`x, weight = f(grad)`, is evaluated once. The formulas after it may use them: `residual = grad_x`. An input
without a formula has derivative zero.

Backward ops are ordinary ops; without formulas, their derivatives follow from second_derivatives.py.
"""

import ast
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from twinop.errors import RecordError
from twinop.libraries.declare import DERIVATIVES, SECOND_DERIVATIVES
from twinop.record.op_spec import Gradient, OpSpec
from twinop.record.record_checks import names_in

from .rules import as_tuple, widened

Functions = Mapping[str, Callable[..., Any]]


@dataclass(frozen=True)
class _Formula:
    names: tuple[str, ...]  # the inputs whose gradients it gives; "_": not wanted
    used: set[str]
    values: set[str]  # those of `used` of which it needs more than the shape
    compute: Callable[[dict[str, Any]], Any]


class Formulas:
    """The formulas of one op, and what they need of a call.

    `inputs` and `outputs` are the tensors to keep for the backward pass; of `shapes` only the shapes are.
    """

    def __init__(self, record: OpSpec, functions: Functions) -> None:
        self.record, self._functions = record, functions

    @cached_property
    def _formulas(self) -> list[_Formula]:
        # Made when the op is first differentiated: second derivatives may be registered after the library.
        return _formulas_of(self.record, self._functions)

    @cached_property
    def _used(self) -> set[str]:
        return set().union(*(formula.used for formula in self._formulas))

    @cached_property
    def inputs(self) -> list[str]:
        values = set().union(*(formula.values for formula in self._formulas))
        return [entry.name for entry in self.record.inputs if entry.name in values]

    @cached_property
    def shapes(self) -> list[str]:
        others = self._used.difference(self.inputs)
        return [entry.name for entry in self.record.inputs if entry.name in others]

    @cached_property
    def outputs(self) -> list[str]:
        return [name for name in self.record.outputs if name in self._used]

    @cached_property
    def undifferentiated(self) -> list[str]:
        """The outputs whose gradients no formula takes, as the statistics of a norm."""
        if len(self.record.outputs) == 1 or not self._formulas:
            return []
        return [name for name in self.record.outputs if f"grad_{name}" not in self._used]

    def evaluate(self, scope: dict[str, Any], wanted: set[str]) -> dict[str, Any]:
        """Returns the gradients of the inputs wanted, by name; RecordError: the op has no formulas.

        `scope` has what formulas use, by name: kept tensors, shapes, attributes and incoming gradients.
        """
        if not self._formulas:
            cure = "it can be differentiated once, not twice"
            cure = cure if self.record.is_backward else "detach its inputs"
            raise RecordError(f"{self.record.qualified_name} has no derivative; {cure}")
        needed, selected = set(wanted), []
        for formula in reversed(self._formulas):
            if needed.intersection(formula.names):
                # `grad_x` is an earlier gradient unless the op has an argument of that name.
                needed |= {name.removeprefix("grad_") for name in formula.used - set(scope)}
                selected.append(formula)
        result: dict[str, Any] = {}
        for formula in reversed(selected):
            value = formula.compute(scope)
            values = value if len(formula.names) > 1 else (value,)
            result |= zip(formula.names, values, strict=True)
            scope = {f"grad_{name}": grad for name, grad in zip(formula.names, values, strict=True)} | scope
        return result

    def tangents(
        self, scope: Mapping[str, Any], outputs: Mapping[str, Any], tangents: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Returns the tangents of a call's outputs; RecordError: the op has no forward mode.

        The Jacobian of an elementwise op is diagonal: its product with a tangent is the gradient's formula,
        with the tangent in the place of the incoming gradient. Where a backward op is written in torch's
        operators, torch differentiates it.

        `outputs` has the `size` and the `dtype` of each. Inputs without a tangent have a zero one.
        """
        function = None if self.record.gradients else SECOND_DERIVATIVES.get(self.record.key)
        found: dict[str, torch.Tensor] = {}
        if function is not None:
            outputs_of, given = in_torch_of_call(self.record, function, scope)
            moving = {name: given.pop(name) for name in tangents if name in given}
            # Twice in reverse: the gradient is linear in the cotangent, and torch does not nest forward mode.
            values, pull = torch.func.vjp(lambda each: outputs_of(given | each), moving)  # type: ignore[misc]
            cotangents = {name: torch.zeros_like(value) for name, value in values.items()}
            _, push = torch.func.vjp(lambda cotangents: pull(cotangents)[0], cotangents)  # type: ignore[misc]
            (found,) = push({name: tangents[name].to(value.dtype) for name, value in moving.items()})
        elif not self.record.is_elementwise or not self._formulas:
            raise RecordError(
                f"{self.record.qualified_name} has no forward-mode derivative (jvp, torch.func.jvp, jacfwd). "
                "Use reverse mode: torch.autograd.grad, torch.func.vjp or jacrev"
            )
        shape = next(iter(outputs.values())).size
        wide = {n: each.expand(shape) for n, each in scope.items() if isinstance(each, torch.Tensor)}
        for output, like in outputs.items() if function is None else ():
            terms = []
            for name, tangent in tangents.items():
                incoming = tangent.to(like.dtype).expand(shape)
                grads = {f"grad_{other}": torch.zeros_like(incoming) for other in outputs if other != output}
                grads["grad" if len(outputs) == 1 else f"grad_{output}"] = incoming
                terms.append(self.evaluate({**scope, **wide, **grads}, {name}).get(name))
            summands = [term for term in terms if term is not None]
            found[output] = sum(summands[1:], summands[0]) if summands else torch.zeros_like(incoming)
        return tuple(found[name].to(like.dtype) for name, like in outputs.items())


def _formulas_of(record: OpSpec, functions: Functions) -> list[_Formula]:
    result = []
    for gradient in record.gradients:
        tree = ast.parse(gradient.text, mode="eval")
        code = compile(gradient.text, f"<{record.name}>", "eval")

        def evaluate(scope: dict[str, Any], code: Any = code, gradient: Gradient = gradient) -> Any:
            try:  # the text is the record's own, from a library whose native code runs anyway
                return eval(code, {"torch": torch, **functions, **scope})
            except Exception as error:
                said = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
                if "data-dependent" in said or "aten._local_scalar_dense" in said:
                    said = (
                        "it reads a number out of a tensor, which torch.compile cannot follow. Compute with "
                        "the tensor itself, as torch.arange(n) + position and scatter do"
                    )
                formula = f"{', '.join(gradient.names)} = {gradient.text}"
                raise RecordError(f"{record.qualified_name}: derivative `{formula}` fails: {said}") from error

        # `a.shape` alone needs no more of `a` than that. Broadcasting ops would keep all their inputs alive.
        result.append(_Formula(gradient.names, names_in(tree), names_in(tree, but_shapes=True), evaluate))
    if not result and (function := SECOND_DERIVATIVES.get(record.key)):
        result.append(_differentiated(record, function))
    if not result and (function := DERIVATIVES.get(record.key)):
        result.append(_given(record, function))
    return result


def _given(record: OpSpec, function: Callable[..., Any]) -> _Formula:
    """Makes a formula of a torch function that returns a gradient for each input."""
    names = tuple(entry.name for entry in record.inputs)
    used = set(inspect.signature(function).parameters)

    def compute(scope: dict[str, Any]) -> Any:
        results = as_tuple(function(**{name: scope[name] for name in used}))
        if len(results) != len(names):
            raise RecordError(
                f"{record.qualified_name}: its backward returned {len(results)} gradients; expected one for "
                f"each of {', '.join(names)}, None where there is none"
            )
        return results if len(names) > 1 else results[0]

    return _Formula(names, used, used, compute)


def _differentiated(record: OpSpec, function: Callable[..., Any]) -> _Formula:
    """Differentiates a backward op that is written in torch's operators, in fp32 where it is narrower."""
    used = list(inspect.signature(function).parameters)
    inputs = [entry.name for entry in record.inputs if entry.name in used]
    known = [entry.name for entry in record.inputs] + [entry.name for entry in record.attributes]
    if unknown := [name for name in used if name not in known]:
        raise RecordError(
            f"second derivative {record.qualified_name}: the function takes {', '.join(unknown)}, expected "
            f"some of the inputs and attributes of {record.schema}: {', '.join(known)}"
        )

    def compute(scope: dict[str, Any]) -> tuple[Any, ...]:
        outputs_of, given = in_torch_of_call(record, function, scope)
        outputs, pull = torch.func.vjp(outputs_of, given)  # type: ignore[misc]
        several = len(record.outputs) > 1
        incoming = {name: scope[f"grad_{name}" if several else "grad"] for name in outputs}
        (gradients,) = pull({name: grad.to(outputs[name].dtype) for name, grad in incoming.items()})
        return tuple(gradients.get(name) for name in inputs)

    return _Formula(tuple(inputs), {*used, *(f"grad_{name}" for name in record.outputs)}, {*used}, compute)


def in_torch_of_call(
    record: OpSpec, function: Callable[..., Any], scope: Mapping[str, Any]
) -> tuple[Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """Returns an op in torch's operators as a function of floating tensors by name, and those of the call.

    The function computes in fp32 where tensors are narrower. It returns the outputs by name.
    """
    used = inspect.signature(function).parameters
    inputs = {entry.name for entry in record.inputs}
    tensors = {name: scope[name] for name in used if name in inputs and scope[name] is not None}
    given = {name: each for name, each in tensors.items() if each.is_floating_point() or each.is_complex()}
    fixed = {name: scope[name] for name in used if name not in given}

    def outputs_of(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        wide = {name: widened(tensor) for name, tensor in tensors.items()}
        outputs = function(**fixed, **wide)
        if isinstance(outputs, dict):
            return outputs
        return dict(zip(record.outputs, as_tuple(outputs), strict=True))

    return outputs_of, given
