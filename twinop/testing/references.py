"""What ops mean in fp64, and how far from that a result may be: where the function body does not say it.

An op needs no `Reference`. Its fp64 meaning is its function body (`twinop.export.body_in_torch`), and a
result may differ from it by the rounding errors of the body's operators (`rounding.py`), that of a kernel
written in Python also by as much as torch.testing.assert_close allows. A `Reference` makes
that tighter, or says it where the body cannot: where its formula cancels, or its kernel computes by another
one. The function `reference(op)` in the module of the op's body returns it.

An error is counted in units of the last place: |result - exact| / (eps of the dtype * magnitude).
`ulps.py` measures.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from twinop.record.tolerance import scale_of

Results = Tensor | tuple[Tensor, ...]

# A value that is rounded once has an error of half a unit; what fp32 adds to that is small in 16 bits.
ONE_ROUNDING = 0.51

TORCH_TOLERANCES = {
    "float64": (1e-7, 1e-7),
    "float32": (1.3e-6, 1e-5),
    "float16": (1e-3, 1e-5),
    "bfloat16": (1.6e-2, 1e-5),
}
"""What torch.testing.assert_close takes as equal: |error| <= atol + rtol * |exact|, as (rtol, atol). Where
all are below 1, atol is a share of the largest: it would take zeros for small results. Kernels written
in Python need no more: they compute in their own order and with the compiler's exp and erf."""


@dataclass(frozen=True)
class Reference:
    """What the results of an op are measured by; without one, its function body alone."""

    # The op on fp64 tensors, differentiable; by default its body.
    compute: Callable[..., Results] | None = None
    # The largest error of kernels by dtype, on any device; by default the body's rounding errors.
    ulps: dict[str, float] | None = None
    # Of each output, what an error is measured by; by default |exact|, and without `ulps` what is rounded in
    # the body. Where the inputs cancel, as in x - mean, it is that of what cancels.
    magnitude: Callable[..., Results] | None = None
    body_ulps: float | None = None  # as ulps, for the body in ONNX Runtime, whose errors are absolute below 1
    gradient_ulps: float = 16  # of a gradient, against the largest of its kind
    # Moves inputs into the op's domain and away from the kinks of its derivative.
    smooth: Callable[[Tensor], Tensor] = lambda x: x

    def allowed(self, dtype: str) -> float:
        return ONE_ROUNDING if self.ulps is None else self.ulps[dtype]

    def allowed_of_body(self, dtype: str) -> float:
        allowed = self.body_ulps
        if allowed is None:
            allowed = 1 if self.ulps is None else 8
        return min(allowed, 1) if dtype in ("float16", "bfloat16") else allowed  # rounded once, at the end


def as_close_as_torch_asks(result: Tensor, exact: Tensor) -> Tensor:
    """Returns which elements are equal within `TORCH_TOLERANCES`."""
    rtol, atol = TORCH_TOLERANCES[str(result.dtype).removeprefix("torch.")]
    atol *= min(scale_of(exact), 1.0)
    return torch.isclose(result.cpu().double(), exact.double(), rtol, atol, equal_nan=True)


def ulps(float32: float, float64: float | None = None, half: float = ONE_ROUNDING) -> dict[str, float]:
    return {"float32": float32, "float64": float64 or float32, "float16": half, "bfloat16": half}


def narrow(number: float) -> float:
    """ONNX's float attributes are fp32, and so are twinop's."""
    return float(np.float32(number))
