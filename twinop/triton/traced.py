"""What a trace of a launcher gives: plans whose kernels are not compiled yet."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..aot_kernels.expression import Expression
from ..aot_kernels.plan import Plan, Pointer, Scalar
from ..record.op_spec import OpSpec


@dataclass(frozen=True)
class TracedLaunch:
    """One launch of a kernel."""

    kernel: Any  # the `triton.runtime.JITFunction`
    label: str  # the kernel and the line of its definition, "mish_kernel, mish.py:7"
    line: str  # where the launcher launches it, "mish.py:14"
    grid: tuple[Expression, Expression, Expression]  # in programs (blocks)
    arguments: tuple[Pointer | Scalar, ...]  # in the order of the kernel's parameters, without constants
    constants: Mapping[str, Any] = field(default_factory=dict)  # that are `tl.constexpr`, or None, by name
    options: Mapping[str, Any] = field(default_factory=dict)  # the compiler's, such as num_warps


@dataclass(frozen=True)
class TracedOp:
    """An op whose launcher was traced."""

    record: OpSpec  # with the shapes and dtypes of the outputs
    plans: tuple[Plan[TracedLaunch], ...]
    notes: tuple[str, ...] = ()  # what calls are refused for want of a sample
