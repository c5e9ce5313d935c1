"""The two test ops as a user's module would have them: their library, bodies, samples and references."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from twinop import torch_op
from twinop.export import DefaultInput, body
from twinop.libraries.library import find_library
from twinop.testing.references import Reference, narrow, ulps


def library_path() -> Path:
    return find_library("test_ops")


torch_op.load(library_path())


@body(defaults={"weight": DefaultInput(1), "bias": DefaultInput(0)})
def pad_affine(op, x, weight, bias, *, scale, sign, pads):
    y = op.Mul(x, scale)
    if weight is not None:
        y = op.Mul(y, weight)
    shift = bias if bias is not None else 0.0
    # Not Where(..., y - shift, y + shift): ONNX Runtime's Where makes -0 in its first branch +0.
    y = op.Add(y, op.Mul(op.Where(op.Equal(sign, "minus"), -1.0, 1.0), shift))
    return op.Pad(y, pads, None, [-1])


@body
def double_and_sum(op, x):
    # Not ReduceSum: ONNX Runtime's reductions leave an empty tensor as it is (shape (3, 0) stays (3, 0)).
    ones = op.Expand(1.0, op.Concat(op.Shape(x, start=-1), [1], axis=0))
    return op.Add(x, x), op.Squeeze(op.MatMul(x, ones), [-1])


def samples(op: str, dtype: str, size: int) -> list[dict[str, Any]] | None:
    if op == "double_and_sum":
        generator = torch.Generator().manual_seed(size)
        return [{"x": torch.randn(*shape, size, generator=generator)} for shape in ((3,), (2, 3))]
    return list(_pad_affines(size))


def _pad_affines(size: int) -> Iterator[dict[str, Any]]:
    for seed, shape in enumerate([(3, size), (size,), (2, 3, size)]):
        generator = torch.Generator().manual_seed(seed)
        x, weight, bias = (torch.randn(s, generator=generator) for s in (shape, (size,), (size,)))
        attributes = {"scale": 1.7, "sign": "minus", "pads": [2, seed % 3]} if seed % 2 else {}
        for given in ({"weight": weight, "bias": bias}, {"weight": weight}, {"bias": bias}, {}):
            yield {"x": x} | given | attributes


def reference(op: str) -> Reference | None:
    return REFERENCES.get(op)


def _pad_affine(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float = 0.1,
    sign: str = "plus",
    pads: tuple[int, ...] = (0, 1),
) -> Tensor:
    y = narrow(scale) * x if weight is None else narrow(scale) * x * weight
    if bias is not None:
        y = y + bias if sign == "plus" else y - bias
    return F.pad(y, list(pads))


def _pad_affine_magnitude(x: Tensor, weight: Any = None, bias: Any = None, **attributes: Any) -> Tensor:
    size = {"weight": weight, "bias": bias}
    size = {name: None if t is None else t.abs() for name, t in size.items()}
    return _pad_affine(x.abs(), **size, **attributes | {"sign": "plus"})


REFERENCES: dict[str, Reference] = {
    # Its gradient's formula computes in 16 bits, also that of an fp32 weight.
    "pad_affine": Reference(ulps=ulps(2, 2), gradient_ulps=2**16, magnitude=_pad_affine_magnitude),
    "double_and_sum": Reference(
        ulps=ulps(4), magnitude=lambda x: (2 * x.abs(), x.abs().sum(-1)), body_ulps=257
    ),
}
