"""What is measured of each op: shapes, dtypes, directions, inputs and exact results, from the op's record."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from twinop import torch_op
from twinop.cli.console import err
from twinop.errors import TwinopError
from twinop.model.bodies import find_body
from twinop.record.op_spec import DOMAIN, OpSpec
from twinop.record.shapes import input_shapes, output_shapes
from twinop.testing.samples import make_sample, torch_dtype, why_not_derived
from twinop.testing.target import load
from twinop.testing.under_test import library_of
from twinop.torch_op.rules import as_tuple

from .entries import ENTRIES, Entry, entry_of
from .measurements import BenchError, chosen
from .timing import Run

FORWARD, BACKWARD = "forward", "backward"
ROWS, ELEMENTWISE = "rows", "elementwise"
ROW_SHAPES = ((32768, 4096), (32768, 1024), (8192, 16384), (16384, 11008))  # rows x columns
SHAPES = {  # the most important first
    ("cuda", ROWS): (*ROW_SHAPES, (4096, 65536), (32768, 4095), (32768, 5120)),
    ("cuda", ELEMENTWISE): tuple((1 << exponent,) for exponent in (28, 26, 27, 25, 24)),
    ("cpu", ROWS): ((512, 4096), (64, 1024), (256, 16384)),
    ("cpu", ELEMENTWISE): tuple((1 << exponent,) for exponent in (20, 16, 24)),
}
BACKWARD_SHAPES = {ROWS: len(ROW_SHAPES), ELEMENTWISE: 2}  # how many


@dataclass(frozen=True)
class Case:
    """One cell to measure: an op on one shape and dtype. `shape` is the shape of the first output."""

    name: str
    entry: Entry
    dtype: str
    shape: tuple[int, ...]
    direction: str = FORWARD

    @property
    def record(self) -> OpSpec:
        return torch_op.records()[self.entry.op]

    def label(self) -> dict[str, str]:
        """Returns the fields that name this cell in a file."""
        exponent = self.shape[0].bit_length() - 1
        return {
            "family": family_of(self.record),
            "direction": self.direction,
            "dtype": self.dtype,
            "op": self.name,
            "shape": f"2^{exponent}" if self.shape == (1 << exponent,) else "x".join(map(str, self.shape)),
        }


def family_of(record: OpSpec) -> str:
    """Returns whether an op is row-wise or elementwise. swiglu counts as row-wise: a layer has rows."""
    return ROWS if not record.is_elementwise or "swiglu" in record.name else ELEMENTWISE


def choose(names: str, library: Path | None = None) -> dict[str, Entry]:
    """Returns the entries with these comma-separated names, or without names all of the built ops.

    With a `library`, a Python file of an op or a project, they are of its ops. BenchError: a name is unknown,
    or its op is not in the built libraries.
    """
    built = built_entries() if library is None else entries_of(library)
    return {name: built[name] for name in chosen("--ops", names, list(built))} if names else built


def built_entries() -> dict[str, Entry]:
    """Returns the entries of the built ops; of those of floats without one, made from their record."""
    records = torch_op.records()
    found = {name: entry for name, entry in ENTRIES.items() if entry.op in records}
    known = {entry.op for entry in ENTRIES.values()}
    for name, record in records.items():
        own = record.domain == DOMAIN and not record.is_backward
        floats = not any("int" in dtype or "float8" in dtype for dtype in record.combinations[0].values())
        if own and name not in known and floats and (record.is_elementwise or record.rows):
            found[name] = entry_of(record)
    return found


def entries_of(target: Path) -> dict[str, Entry]:
    """Returns the entries of the ops of a library, the Python file of an op, or a project.

    An op without a function body, with sizes from data, or whose inputs cannot be derived, is reported and
    skipped. BenchError: no op is left.
    """
    found: dict[str, Entry] = {}
    for record in load(str(target)):
        if record.is_backward:
            continue
        try:
            if record.sizes:
                raise BenchError(f"{record.qualified_name}: its output shapes are data-dependent")
            if find_body(record.key) is None:
                raise BenchError(f"{record.qualified_name} has no function body: nothing to compare it with")
            sample = make_sample(record, record.combinations[0], (4, 4), tame=True)
        except TwinopError as reason:
            err.print(f"not measured: {reason}", soft_wrap=True)
            continue
        names = " ".join(sample.tensors())
        found[record.name] = entry_of(record, library_of(record), sample.attributes, names)
    if not found:
        raise BenchError(f"{target}: it has no op that can be measured")
    return found


def cases_of(name: str, entry: Entry, device: str, *, quick: bool = False) -> list[Case]:
    """Returns the cells of an op, the most important first. On a CPU backward is that of a user's ops."""
    record, on_cpu = torch_op.records()[entry.op], device == "cpu"
    family = family_of(record)
    shapes: Sequence[tuple[int, ...]] = SHAPES[device, family]
    back = shapes if on_cpu else shapes[: BACKWARD_SHAPES[family]]
    if not entry.backward or (on_cpu and entry.library is None):
        back = ()
    dtypes: tuple[str, ...] = ("float32",) if on_cpu else ("bfloat16", "float16", "float32")
    if entry.library is not None:
        taken = {c[record.inputs[0].name] for c in record.combinations}
        dtypes = tuple(dtype for dtype in dtypes if dtype in taken)
    if quick:
        shapes, back, dtypes = shapes[: 1 if on_cpu else 2], back[:1], dtypes[:1]
    ways = ((FORWARD, shapes), (BACKWARD, back))
    return [Case(name, entry, dtype, shape, way) for way, each in ways for dtype in dtypes for shape in each]


@dataclass
class Sample:
    """A case with its tensors by name."""

    case: Case
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]  # to be overwritten; or the gradients that backward starts from

    @classmethod
    def drawn(cls, case: Case, device: torch.device) -> "Sample":
        """Draws random tensors."""
        record, inputs = case.record, _draw_inputs(case, device)
        given = {
            each.name: list(inputs[each.name].shape) if each.name in inputs else None
            for each in record.inputs
        }
        attributes = {each.name: each.default for each in record.attributes} | dict(case.entry.attributes)
        shapes, dtype = output_shapes(record, given, attributes), torch_dtype(case.dtype)
        outputs = {name: torch.randn(shapes[name], dtype=dtype, device=device) for name in record.outputs}
        return cls(case, inputs, outputs)

    @property
    def bytes(self) -> int:
        """Each tensor once. Backward reads the inputs and gradients and writes gradients of the inputs."""
        tensors = [*self.inputs.values(), *self.outputs.values()]
        tensors += self.inputs.values() if self.case.direction == BACKWARD else ()
        return sum(tensor.nbytes for tensor in tensors)

    def exact(self) -> tuple[Tensor, ...]:
        """Computes the outputs, or the gradients of the inputs, in float64."""
        inputs = [t.double() if t.is_floating_point() else t for t in self.inputs.values()]
        grads = [tensor.double() for tensor in self.outputs.values()]
        return as_tuple(run_of(self.case, self.case.entry.eager, inputs, grads)())


def _draw_inputs(case: Case, device: torch.device) -> dict[str, Tensor]:
    """Draws normally distributed inputs, weights around one; or takes those of a user's module."""
    record, entry = case.record, case.entry
    if entry.library is not None and why_not_derived(record):
        dtypes = next(c for c in record.combinations if c[record.inputs[0].name] == case.dtype)
        return make_sample(record, dtypes, case.shape).to(str(device)).tensors()
    first = (*case.shape[:-1], 2 * case.shape[-1]) if entry.op == "swiglu_packed" else case.shape
    shapes = input_shapes(record, first, entry.attributes)
    inputs = {}
    for name in entry.input_names:
        tensor = torch.randn(shapes[name], dtype=torch_dtype(case.dtype), device=device)
        if name == "weight":
            tensor = 1 + tensor / 8
        inputs[name] = tensor.abs() + 0.01 if name in entry.positive else tensor
    return inputs


def run_of(
    case: Case, function: Callable[..., Any], inputs: Sequence[Tensor], grads: Sequence[Tensor]
) -> Run:
    """Returns a run of a function in torch; if the case is backward, that of backward alone, from `grads`."""
    if case.direction == FORWARD:
        return partial(function, *inputs)
    given = [tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in inputs]
    with torch.enable_grad():
        outputs = as_tuple(function(*given))
    leaves = [tensor for tensor in given if tensor.requires_grad]
    return partial(torch.autograd.grad, outputs, leaves, list(grads), retain_graph=True)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Returns the relative error in the 2-norm; NaN is infinite, infinity right beyond the range."""
    if actual.shape != expected.shape:
        return float("inf")
    beyond = torch.isinf(actual) & (actual == expected.to(actual.dtype))
    error = torch.linalg.vector_norm((actual.double() - expected).masked_fill_(beyond, 0))
    value = float(error / torch.linalg.vector_norm(expected.masked_fill(beyond, 0)))
    return value if value == value else float("inf")
