"""Makes the contents of a library from Python files: traces the launchers, compiles the kernels."""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode

from ..aot_kernels.plan import Body, Contents, DeviceOp
from ..building.project import Project
from ..errors import BuildError, ExportError
from ..libraries.declare import load_module
from ..libraries.kernel_op import DECLARED, KernelOp, describe_source
from ..record.op_spec import OpSpec
from .launches import compile_plans
from .trace import SAMPLE_SIZES, Ranks, TracedOp, trace, values_of

_FUTURE = 999  # the compute capability of a GPU newer than all


def make_contents(project: Project, archs: Sequence[int], ptx: bool) -> tuple[Contents, list[str]]:
    """Returns what a library carries of the ops in a project's Python files, and notes for the user.

    The kernels are compiled for `archs` and, with `ptx`, for newer GPUs. BuildError: a file declares no op,
    one of another domain, or one whose name is taken; a launcher cannot be traced, a kernel not be compiled.
    TwinopError: a file cannot be imported.
    """
    files, domain = project.modules, project.domain
    ops = [op for file in files for op in _declared_in(file)]
    places = {name: source.path.name for source in project.sources for _, name in source.ops}
    for op in ops:
        if op.domain != domain:
            raise BuildError(
                f"{op.place}: {op.name} has the domain {op.domain}, the library {domain}. One library has "
                f'one: build it with --domain {op.domain}, or declare the op with domain="{domain}"'
            )
        if op.name in places:
            raise BuildError(
                f"{op.place}: {op.name} is an op of {places[op.name]}, too. Ops of one library have "
                "different names"
            )
        places[op.name] = op.place
    traced = [_traced(op, (*archs, *[_FUTURE] * ptx)) for op in ops]
    plans, kernels = compile_plans([plan for each in traced for plan in each.plans], archs, ptx=ptx)
    if not kernels:
        raise BuildError(f"{ops[0].place}: {ops[0].name} launches no kernel")
    rest = iter(plans)
    notes = [f"{op.name}: {note}" for op, each in zip(ops, traced, strict=True) for note in each.notes]
    found = []
    for op, each in zip(ops, traced, strict=True):
        own = tuple(itertools.islice(rest, len(each.plans)))
        found.append(DeviceOp(each.record, own, tuple(_bodies(op, each, notes))))
    targets = [f"{arch}-real" for arch in archs]
    targets += sorted(
        {f"{image.arch}-virtual" for kernel in kernels for image in kernel.images if image.is_ptx}
    )
    said = ",".join(targets)
    return Contents(domain, tuple(found), tuple(kernels), said, describe_source(files)), notes


def _declared_in(file: Path) -> list[KernelOp]:
    """Imports a Python file, and returns the ops that it declares; BuildError: it declares none."""
    load_module(file)
    ops = [op for op in DECLARED.values() if op.file.resolve() == file]
    if not ops:
        raise BuildError(
            f"{file}: declares no op. Expected @twinop.triton_op before a function of the module"
        )
    return ops


def _traced(op: KernelOp, archs: Sequence[int]) -> TracedOp:
    dtype = op.record.combinations[0][op.record.inputs[0].name]
    samples = op.calls(dtype, SAMPLE_SIZES[0]) or []
    with FakeTensorMode():  # of the others, the shapes alone are needed
        samples += [call for size in SAMPLE_SIZES[1:] for call in op.calls(dtype, size) or []]
    return trace(op.record, op.launcher, samples, archs)


# ---------------------------------------------------------------------------------------------- bodies


def _bodies(op: KernelOp, traced: TracedOp, notes: list[str]) -> Iterator[Body]:
    """Yields the models that run an op on the CPU: one for all ranks where it can be, else one for each."""
    if op.record.is_backward:  # in torch only
        return
    for combination in range(len(traced.record.combinations)):
        ranks = list(dict.fromkeys(plan.ranks for plan in traced.plans if plan.combination == combination))
        try:
            # If the body is the same for two of the ranks, it does not depend on the rank.
            two = sorted(ranks, key=lambda each: abs(max(rank or 0 for rank in each) - 2.4))[:2]
            yield Body(_model(traced.record, combination, two), combination)
            continue
        except ExportError as error:
            refused = error
        if len(ranks) == 1:
            notes.append(f"{op.name} does not run on the CPU in ONNX Runtime: {refused}")
            return
        for each in ranks:
            try:
                yield Body(_model(traced.record, combination, [each]), combination, each)
            except ExportError as error:
                notes.append(f"{op.name} does not run on the CPU in ONNX Runtime: {error}")
                return


def _model(record: OpSpec, combination: int, ranks: Sequence[Ranks]) -> bytes:
    """Makes the model of an op's body for calls of these ranks and all values of the attributes."""
    import onnx_ir as ir

    from ..model.attach import OPSETS
    from ..model.bodies import find_body
    from ..model.calls import make_call
    from ..model.record_body import model_of
    from ..model.record_body import trace as trace_body

    body = find_body(record.key)
    assert body is not None, record
    body.check(record)
    dtypes = record.combinations[combination]
    calls = []
    for each, attributes in itertools.product(ranks, _attributes(record)):
        present = [entry.name for entry, rank in zip(record.inputs, each, strict=True) if rank is not None]
        call = make_call(record, dtypes, present, attributes)
        for value, rank in zip(call.node.inputs, each, strict=True):
            if value is not None and rank is not None:
                value.shape = ir.Shape([None] * rank)
        calls.append(call)
    return model_of(trace_body(body, calls, OPSETS[0]), calls[-1])


def _attributes(record: OpSpec) -> list[dict[str, Any]]:
    """Returns all values of the attributes together; of numbers that the record does not name, two."""
    from ..record.op_schema import onnx_value

    numbers, finite = dict[str, list[Any]](), dict[str, list[Any]]()
    for entry in record.attributes:
        found: Any = record.choices.get(entry.name) or values_of(record, entry, {})
        if entry.kind in ("int", "float") and entry.name not in record.choices:
            numbers[entry.name] = [onnx_value(entry, each) for each in (found[0], found[0] + 1)]
        else:
            finite[entry.name] = [onnx_value(entry, each) for each in found]
    return [
        dict(zip(finite, each, strict=True)) | {name: pair[index] for name, pair in numbers.items()}
        for index in (range(2) if numbers else range(1))
        for each in itertools.product(*finite.values())
    ]
