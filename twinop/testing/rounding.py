"""How far rounding may take an op's results: a running error analysis of its function body.

Every operator of the body adds half a unit or so of its own result, and passes on the errors of its inputs,
multiplied by its derivatives. The sums are first order and in units of the compute type's eps. Each input
counts as wrong by a unit: a right op may compute by another formula than its body, and its results are then
those of inputs next to the given ones (it is backward stable).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from twinop.export.body_in_torch import TorchOps

EXACT = {
    "Abs", "CastLike", "Ceil", "Clip", "Compress", "Concat", "Expand", "Floor", "Gather", "GatherND",
    "Identity", "LeakyRelu", "Max", "Min", "Neg", "Pad", "ReduceMax", "ReduceMin", "Relu", "Reshape", "Round",
    "Sign", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze", "Where",
}  # fmt: skip
"""Operators that choose or move numbers."""
ABSOLUTE = {
    "Celu", "Elu", "Erf", "Gelu", "HardSigmoid", "Mish", "Selu", "Sigmoid", "Softplus", "Swish", "Tanh",
}  # fmt: skip
"""Operators whose errors in ONNX Runtime are absolute below 1."""
SUMS = {"CumSum", "MatMul", "ReduceL1", "ReduceL2", "ReduceMean", "ReduceSum", "ReduceSumSquare", "Sum"}
"""Operators that add numbers up: roundings have the size of what is added, and in long rows of equal numbers
all go one way."""


@dataclass(frozen=True)
class Bounded:
    """A tensor, and how many eps its elements may be wrong by."""

    value: Tensor
    error: Tensor


class RoundingOps(TorchOps):
    """`op` of a body whose values carry bounds of their errors."""

    def input(self, tensor: Tensor) -> Any:
        return Bounded(tensor, tensor.abs().nan_to_num(0, 0)) if tensor.is_floating_point() else tensor

    def rounded(self, value: Bounded, like: Bounded) -> Bounded:  # type: ignore[override]
        """The error of the unrounded value may lead to the next number of the narrower type."""
        step = torch.finfo(self._stored).eps / torch.finfo(torch.float32).eps
        jump = value.value.abs() * step if step > 1 else 0
        return Bounded(super().rounded(value.value, like.value), value.error + jump)

    def Softmax(self, x: Bounded, *, axis: Any = -1) -> Any:
        """In single steps: the derivatives of the whole have both signs."""
        if x.value.numel() == 0:
            return x
        axes = torch.tensor([getattr(axis, "value", axis)])
        powers = self.Exp(self.Sub(x, self.ReduceMax(x, axes)))
        return self.Div(powers, self.ReduceSum(powers, axes))

    def LogSoftmax(self, x: Bounded, *, axis: Any = -1) -> Any:
        """In single steps: where one number is far above the others, log(sum) is 0 with an error of 1."""
        if x.value.numel() == 0:
            return x
        axes = torch.tensor([getattr(axis, "value", axis)])
        centred = self.Sub(x, self.ReduceMax(x, axes))
        return self.Sub(centred, self.Log(self.ReduceSum(self.Exp(centred), axes)))

    def _apply(self, op_type: str, function: Callable[..., Any], inputs: list[Any]) -> Any:
        values = [each.value if isinstance(each, Bounded) else each for each in inputs]
        results = sizes = function(*values)
        if op_type in SUMS:
            values = [each.abs() if each.is_floating_point() else each for each in values]
            sizes = function(*values)
        floating = [_has_error(each) for each in _listed(results)]
        errors = [self._rounding(op_type, each) for each in _listed(sizes)]
        for i, given in enumerate(inputs):
            if isinstance(given, Bounded) and given.error.any() and any(floating):

                def of_one(tensor: Tensor, i: int = i) -> Any:
                    results = _listed(function(*values[:i], tensor, *values[i + 1 :]))
                    return tuple(each for each in results if _has_error(each))

                moved = iter(torch.func.jvp(of_one, (values[i],), (given.error,))[1])
                errors = [
                    a + next(moved).abs() if is_float else a
                    for a, is_float in zip(errors, floating, strict=True)
                ]
        bounded = [
            Bounded(value, error.nan_to_num(0, posinf=torch.inf)) if is_float else value
            for value, error, is_float in zip(_listed(results), errors, floating, strict=True)
        ]
        return bounded[0] if isinstance(results, Tensor) else tuple(bounded)

    def _rounding(self, op_type: str, result: Tensor) -> Tensor:
        if op_type in EXACT or not _has_error(result):
            return torch.zeros_like(result)
        size = result.abs().nan_to_num(0, 0)  # infinity is not rounded
        size = size.clamp(min=torch.finfo(torch.float32).tiny)  # below, fp32 has fewer digits
        return 2 * size if op_type in SUMS else size


class OrtRoundingOps(RoundingOps):
    """The errors of ONNX Runtime's own operators. Those of its Sigmoid and the like are absolute below 1."""

    def _rounding(self, op_type: str, result: Tensor) -> Tensor:
        error = super()._rounding(op_type, result)
        return error.clamp(min=4) if op_type in ABSOLUTE and result.is_floating_point() else error


def _has_error(result: Tensor) -> bool:
    """Whether it is not an integer, nor an output that the body rounds to 8 bits."""
    return result.is_floating_point() and result.itemsize > 1


def _listed(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)
