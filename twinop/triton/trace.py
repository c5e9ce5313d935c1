"""Traces launchers: runs them with symbolic sizes, and makes plans of what they do."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ..aot_kernels.expression import Expression, attribute, size, text_is
from ..aot_kernels.plan import Plan, Pointer, Refuse
from ..errors import BuildError, RecordError
from ..libraries.kernel_op import place_of
from ..record.op_spec import Attribute, OpSpec
from ..record.shapes import evaluate
from .helion import helion_kernels
from .intercept import WithoutDevice, functions_of_symbols, triton_launches
from .outputs import with_dtypes, with_shapes
from .recorder import Output, Recorder, TracedLaunch
from .symbols import Call, Decision, NotAnExpression, OtherBranch, Symbols, guards

HIGHEST_RANK = 6

SAMPLE_SIZES = (48, *(2**k - odd for k in range(18) for odd in (0, 1) if 2**k > odd))
"""The sizes for which samples are made: each power of two that a block may have, and odd sizes."""

_ELEMENTS = (2**20, 2**24, 2**31)  # of inputs that all have one shape, moreover

Ranks = tuple[int | None, ...]
Sizes = tuple[tuple[int, ...] | None, ...]
_Outputs = tuple[Output, ...]


@dataclass(frozen=True)
class TracedOp:
    """An op whose launcher was traced."""

    record: OpSpec  # with the shapes and dtypes of the outputs
    plans: tuple[Plan[TracedLaunch], ...]
    notes: tuple[str, ...] = ()  # calls that are refused for want of a sample, and configurations


def trace(
    record: OpSpec,
    launcher: Callable[..., Any],
    samples: Sequence[Mapping[str, Any]] = (),
    archs: Sequence[int] = (90,),
) -> TracedOp:
    """Traces the launcher of an op for every combination of dtypes.

    There is a plan for each branch that a sample takes, for the calls that take the same one. Where the
    launcher raises an error at another branch, there is a plan for this, too.

    The ranks are those of the samples, and those that follow when the first input, and with it all of the
    same rank, have 1 to 6 dimensions. Without samples, all inputs have 1 to 6. Ranks that the launcher
    refuses for all sizes are left out. What the record says of output shapes must hold; otherwise they follow
    from the traces. BuildError: the launcher does something that a library cannot do.

    Args:
        samples: calls, inputs (tensors) and attributes by name.
        archs: compute capabilities of GPUs that call the launcher.
    """
    if torch.cuda.is_available():
        torch.cuda.init()  # the first fake tensor does it otherwise, and finds a symbolic compute capability
    plans: list[Plan[TracedLaunch]] = []
    notes: dict[str, None] = {}  # without repetitions
    outputs: dict[tuple[Ranks, tuple[Any, ...]], list[_Outputs]] = {}
    for combination in range(len(record.combinations)):
        dtypes: list[_Outputs] = []
        refusal: Any = None
        tracer = _Tracer(record, launcher, combination, notes)
        for ranks, paths in tracer.paths(_calls(record, samples, archs)):
            accepted = [path.outputs for path in paths if path.outputs is not None]
            if not accepted:
                refusal = refusal or paths[0].steps[-1]
                continue
            paths += tracer.refusals(paths)
            plans += (tracer.plan(path) for path in paths)
            dtypes += accepted
            given = (each if isinstance(each, bool | str) else None for each in paths[0].call.attributes)
            outputs.setdefault((ranks, tuple(given)), []).extend(accepted)
        if not dtypes:
            raise BuildError(
                f"{place_of(launcher)}: {record.name} refuses all calls; the first says: {refusal.message}"
            )
        record = with_dtypes(record, combination, dtypes, place_of(launcher))
    return TracedOp(with_shapes(record, outputs, place_of(launcher)), tuple(plans), tuple(notes))


@dataclass
class _Path:
    """A run of the launcher. `outputs`: None where it raised an error."""

    call: Call
    decisions: Sequence[Decision]
    outputs: _Outputs | None
    temporaries: tuple[Expression, ...]
    steps: tuple[Any, ...]

    def takes(self, call: Call) -> bool:
        """Whether the launcher does the same for another call of these ranks."""
        with suppress(ArithmeticError):
            return all(call.value(decision.guard) for decision in self.decisions)
        return False


@dataclass(frozen=True)
class _Tracer:
    record: OpSpec
    launcher: Callable[..., Any]
    combination: int
    notes: dict[str, None]

    def paths(self, calls: Iterable[tuple[Call, bool]]) -> Iterator[tuple[Ranks, list[_Path]]]:
        """Yields the paths that calls take, for each choice of ranks, bools and texts."""
        found: dict[Any, list[_Path]] = {}
        failed = set()
        for call, is_given in calls:
            kind = _ranks(call), self._enumerated(call)
            paths = found.setdefault(kind, [])
            if kind in failed or any(path.takes(call) for path in paths):
                continue
            try:
                paths.append(self.run(call))
            except (BuildError, RecordError):  # the latter: of the shapes that the record requires
                if is_given:
                    raise
                failed.add(kind)
        for (ranks, _), paths in found.items():
            if (ranks, _) not in failed:
                yield ranks, paths

    def refusals(self, paths: Sequence[_Path]) -> list[_Path]:
        """Returns the paths beside these that end in an error at once, and notes the others."""
        known = {(*path.decisions[: i + 1],) for path in paths for i in range(len(path.decisions))}
        taken = {decision for path in paths for decision in path.decisions}
        found = []
        for path in paths:
            for i, decision in enumerate(path.decisions):
                other = (*path.decisions[:i], decision.opposite)
                if other in known or decision.is_value:
                    continue
                known.add(other)
                try:
                    run = self.run(path.call, flipped=i)
                except (BuildError, OtherBranch):
                    run = None
                if run is not None and run.outputs is None:
                    found.append(run)
                elif decision.opposite not in taken:
                    answer = "does not hold" if decision.held else "holds"
                    self.notes[f"{decision.text}: refused where this {answer}, as no sample does"] = None
        return found

    def plan(self, path: _Path) -> Plan[TracedLaunch]:
        conditions = (*self._enumerated(path.call), *guards(path.decisions))
        return Plan(self.combination, _ranks(path.call), path.steps, conditions, path.temporaries)

    def _enumerated(self, call: Call) -> tuple[Expression, ...]:
        return tuple(
            text_is(index, value)
            if isinstance(value, str)
            else Expression.of("==", attribute(index), int(value))
            for index, value in enumerate(call.attributes)
            if self._is_enumerated(index)
        )

    def _is_enumerated(self, index: int) -> bool:
        return self.record.attributes[index].kind in ("bool", "str")

    def run(self, call: Call, flipped: int | None = None) -> _Path:
        """Runs the launcher for a call; `flipped`: as in `Symbols`."""
        symbols = Symbols(self.record, self.launcher, call, flipped)
        try:
            outputs, temporaries, steps = self._record(recorder := Recorder(symbols))
        except NotAnExpression as error:
            raise BuildError(
                f"{symbols.line(error)}: the library cannot compute {error} from sizes and attributes"
            ) from error
        if flipped is None:
            self.notes.update(dict.fromkeys(recorder.notes))
        return _Path(call, symbols.decisions, outputs, temporaries, steps)

    def _record(self, recorder: Recorder) -> tuple[_Outputs | None, tuple[Expression, ...], tuple[Any, ...]]:
        """Returns the outputs, the bytes of the temporary tensors, and the steps."""
        symbols = recorder.symbols
        call = symbols.call
        attributes = {
            entry.name: value if self._is_enumerated(index) else symbols.number(attribute(index))
            for index, (entry, value) in enumerate(zip(self.record.attributes, call.attributes, strict=True))
        }
        fake = FakeTensorMode(shape_env=symbols)
        fake.cache_enabled = False
        with fake, functions_of_symbols(recorder), triton_launches(recorder), helion_kernels():
            inputs = self._inputs(recorder, call, attributes)
            with recorder, WithoutDevice(recorder):
                try:
                    returned = self.launcher(*inputs, **attributes)
                except (BuildError, NotAnExpression):
                    raise
                except Exception as error:  # what the launcher says of these sizes
                    said = str(error).partition("\nException raised from ")[0]  # torch's own stack
                    message = f"{symbols.line(error)}: {type(error).__name__}: {said}".rstrip(": ")
                    return None, (), (Refuse(symbols.described(message)),)
                return recorder.finish(returned, self.record)

    def _inputs(self, recorder: Recorder, call: Call, attributes: Mapping[str, Any]) -> list[Any]:
        dtypes, required = self.record.combinations[self.combination], self.record.input_shapes
        shapes: dict[str, Any] = {
            entry.name: sizes and tuple(recorder.symbols.number(size(index, d)) for d in range(len(sizes)))
            for index, (entry, sizes) in enumerate(zip(self.record.inputs, call.sizes, strict=True))
        }
        for name, text in required.items():
            if shapes[name] is not None:
                shapes[name] = evaluate(self.record, text, shapes, attributes)
        outputs = self.record.outputs
        written = {name: Pointer("output", outputs.index(each)) for each, name in self.record.written.items()}
        inputs: list[Any] = []
        for index, (name, shape) in enumerate(shapes.items()):
            if shape is None:
                inputs.append(None)
                continue
            recorder.symbols.in_torch = True
            tensor = torch.empty(shape, dtype=getattr(torch, dtypes[name]), device="cuda")
            recorder.symbols.in_torch = False
            recorder.add_input(written.get(name, Pointer("input", index)), tensor)
            inputs.append(tensor)
        return inputs


def _ranks(call: Call) -> Ranks:
    return tuple(None if sizes is None else len(sizes) for sizes in call.sizes)


def _calls(
    record: OpSpec, samples: Sequence[Mapping[str, Any]], archs: Sequence[int]
) -> Iterator[tuple[Call, bool]]:
    """Yields the calls to trace, with all bools and texts; whether a launcher must take them."""
    if wrong := [entry.name for entry in record.attributes if entry.kind == "int[]"]:
        raise BuildError(f"{record.name}: {wrong[0]} is an int[]; launchers take single numbers")
    for sizes, given in _samples(record, samples):
        values = [values_of(record, entry, given) for entry in record.attributes]
        first = next(len(shape) for shape in sizes if shape is not None)
        for rank in dict.fromkeys((first, *range(1, HIGHEST_RANK + 1))):
            ranked = tuple(
                shape if shape is None or len(shape) != first else ((3,) * (rank - first) + shape)[-rank:]
                for shape in sizes
            )
            for attributes in itertools.product(*values):
                for arch in archs:
                    yield Call(ranked, attributes, arch), rank == first or not samples


def _samples(
    record: OpSpec, samples: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[Sizes, Mapping[str, Any]]]:
    """Yields the shapes of the samples, or of inputs that all have one, and the attributes."""
    for sample in samples:
        given = [sample.get(entry.name) for entry in record.inputs]
        yield tuple(None if tensor is None else tuple(tensor.shape) for tensor in given), sample
    for count in () if samples else (*SAMPLE_SIZES, *_ELEMENTS):
        yield tuple((count,) for _ in record.inputs), {}
        yield tuple(None if entry.optional else (count,) for entry in record.inputs), {}


def values_of(record: OpSpec, entry: Attribute, given: Mapping[str, Any]) -> Sequence[Any]:
    """Returns the values of an attribute to trace: all of them for bools and texts, else the sample's."""
    if entry.kind == "bool":
        return (False, True)
    if entry.kind == "str":
        if entry.name not in record.choices:
            raise BuildError(
                f'{record.name}: {entry.name} is a str; name its values: choices="{entry.name} = a | b"'
            )
        return record.choices[entry.name]
    start = given.get(entry.name, 1 if entry.default is None else entry.default)
    return (float(start) if entry.kind == "float" else start,)
