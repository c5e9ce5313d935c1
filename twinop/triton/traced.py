"""What a trace of a launcher gives: plans whose kernels are not compiled yet."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..aot_kernels.expression import Expression
from ..aot_kernels.plan import Plan, Pointer, Scalar
from ..record.op_spec import OpSpec


@dataclass(frozen=True)
class TracedLaunch:
    """One launch of a kernel.

    Attributes:
        kernel: the `triton.runtime.JITFunction` that was launched.
        label: the kernel with the line of its definition, "mish_kernel, mish.py:7".
        line: where the launcher launches it, "mish.py:14".
        grid: in programs (blocks).
        arguments: in the order of the kernel's parameters, without those that are constants.
        constants: parameters that are `tl.constexpr`, or None, by name.
        options: of the compiler: num_warps and others, as far as the launch gives them.
    """

    kernel: Any
    label: str
    line: str
    grid: tuple[Expression, Expression, Expression]
    arguments: tuple[Pointer | Scalar, ...]
    constants: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TracedOp:
    """An op whose launcher was traced.

    Attributes:
        record: with the shapes and dtypes of the outputs.
        notes: what calls are refused for want of a sample.
    """

    record: OpSpec
    plans: tuple[Plan[TracedLaunch], ...]
    notes: tuple[str, ...] = ()
