"""The ops under test: their records, their libraries, and the modules that describe them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from twinop import torch_op
from twinop.libraries.declare import CPU_FUNCTIONS
from twinop.libraries.kernel_op import DECLARED, calls_of
from twinop.record.op_spec import OpSpec

from .references import Reference


@dataclass(frozen=True)
class OpUnderTest:
    """An op under test."""

    record: OpSpec
    library: Path
    function: Callable[..., Any]  # the op as a Python function, which writes into no input
    # Has the op's function body, and perhaps the functions `samples` and `reference`.
    module: ModuleType | None = None

    @property
    def place(self) -> str:
        """The file in which a user describes the op."""
        found = getattr(self.module, "__file__", None)
        return Path(found).name if found else f"{self.library.stem.removeprefix('lib')}.py"


_ops: dict[str, OpUnderTest] = {}  # by OpSpec.key


def add_library(path: Path, module: ModuleType | None = None) -> list[OpSpec]:
    """Loads a library that a module describes into torch, as `torch_op.load`; returns its records."""
    ops = torch_op.load(path)
    records = list(ops.records.values())
    for record in records:
        function = ops.functions[record.functional_name]
        _ops[record.key] = OpUnderTest(record, ops.library.path, function, module)
    return records


def op_of(record: OpSpec) -> OpUnderTest:
    return _ops[record.key]


def library_of(record: OpSpec) -> Path:
    return op_of(record).library


def records_under_test() -> dict[str, OpSpec]:
    return {key: each.record for key, each in _ops.items()}


def without_kernels() -> list[str]:
    """Returns the ops under test whose kernels are for CUDA alone, where there is no GPU."""
    if torch.cuda.is_available():
        return []
    return [
        each.record.name for key, each in _ops.items() if key in CPU_FUNCTIONS and not each.record.is_backward
    ]


def reference_of(record: OpSpec) -> Reference:
    """Returns the reference of the op's module, or the default one."""
    describe = getattr(op_of(record).module, "reference", None)
    return (describe and describe(record.name)) or Reference()


def given_calls(record: OpSpec, dtype: str, size: int) -> list[dict[str, Any]] | None:
    """Returns the calls of the module's `samples`, by name, or None; TwinopError: one does not fit."""
    if (declared := DECLARED.get(record.key)) is not None:
        return declared.calls(dtype, size)
    describe = getattr(op_of(record).module, "samples", None)
    where = f"samples({record.name!r}, {dtype!r}, {size}) in {op_of(record).place}"
    return describe and calls_of(record, where, lambda: describe(record.name, dtype, size))


def advice(record: OpSpec, argument: str) -> str:
    """Says where a bound that does not hold can be given: the end of a failing test's message."""
    return (
        f"If the op is right and the bound is not: reference({record.name!r}) in {op_of(record).place} may "
        f"return a twinop.testing.references.Reference with another {argument}"
    )
