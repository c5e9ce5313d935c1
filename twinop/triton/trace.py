"""Traces launchers: runs them with symbolic sizes, and makes plans of what they do."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ..aot_kernels.expression import Expression, attribute, text_is
from ..aot_kernels.nvrtc import cuda_launches
from ..aot_kernels.plan import Refuse
from ..errors import BuildError
from ..record import Attribute, Record, entries
from ..shapes import evaluate
from .explore import TooManyBranches, explore
from .expressions import NotAnExpression
from .intercept import Choose, Indexing, first_configuration, functions_of_symbols, triton_launches
from .outputs import with_dtypes, with_shapes
from .recorder import Output, Recorder
from .symbols import Call, Decision, Symbols, tightest
from .traced import TracedOp, TracedPlan

MOST_PLANS = 64
"""The most plans for one combination of dtypes, ranks and attributes."""

HIGHEST_RANK = 6

Ranks = tuple[int | None, ...]
Sizes = tuple[tuple[int, ...] | None, ...]
_Outputs = tuple[Output, ...]


def trace(
    record: Record,
    launcher: Callable[..., Any],
    samples: Sequence[Mapping[str, Any]] = (),
    choose: Choose = first_configuration,
) -> TracedOp:
    """Traces the launcher of an op for every combination of dtypes.

    The ranks are those of the samples, and those that follow when the first input, and with it all of the
    same rank, have 1 to 6 dimensions. Without samples, all inputs have 1 to 6. Ranks that the launcher
    refuses for all sizes are left out.

    Args:
        record: of the op. What it says of output shapes must hold; otherwise they follow from the traces.
        launcher: takes the inputs and, by name, the attributes.
        samples: calls, inputs (tensors) and attributes by name.
        choose: chooses configurations of `triton.autotune`.

    Raises:
        BuildError: the launcher does something that a library cannot do, or has too many branches.
    """
    if torch.cuda.is_available():
        torch.cuda.init()  # the first fake tensor does it otherwise, and finds a symbolic compute capability
    tracer = _Tracer(record, launcher, choose)
    plans: list[TracedPlan] = []
    outputs: dict[Ranks, list[_Outputs]] = {}
    for combination in range(len(record.combinations)):
        dtypes: list[_Outputs] = []
        refusal: Any = None
        for call, is_given in _calls(record, samples):
            try:
                found = tracer.plans(combination, call)
            except BuildError:
                if is_given:
                    raise
                continue
            accepted = [of_path for _, of_path in found if of_path is not None]
            if not accepted:
                refusal = refusal or found[0][0].steps[-1]
                continue
            plans += (plan for plan, _ in found)
            dtypes += accepted
            outputs.setdefault(_ranks(call), []).extend(accepted)
        if not dtypes:
            raise BuildError(
                f"{tracer.place}: {record.name} refuses all calls; the first says: {refusal.message}"
            )
        record = with_dtypes(record, combination, dtypes, tracer.place)
    return TracedOp(with_shapes(record, outputs, tracer.place), tuple(plans))


@dataclass(frozen=True)
class _Tracer:
    record: Record
    launcher: Callable[..., Any]
    choose: Choose

    @property
    def place(self) -> str:
        code = self.launcher.__code__
        return f"{Path(code.co_filename).name}:{code.co_firstlineno}"

    def plans(self, combination: int, call: Call) -> list[tuple[TracedPlan, _Outputs | None]]:
        """Returns the plans for dtypes, ranks, and texts and bools of a call, and the outputs of each.

        There are no outputs where the launcher raised an error.
        """
        given = tuple(
            text_is(index, value)
            if isinstance(value, str)
            else Expression.of("==", attribute(index), int(value))
            for index, value in enumerate(call.attributes)
            if self._is_enumerated(index)
        )

        def run(other: Call) -> tuple[list[Decision], tuple[_Outputs | None, Any, Any]]:
            symbols = Symbols(self.record, other)
            return symbols.decisions, self._run(Recorder(symbols, self.launcher), combination)

        try:
            paths = explore(run, call, MOST_PLANS)
        except TooManyBranches:
            raise BuildError(
                f"{self.place}: {self.record.name} has more than {MOST_PLANS} branches that depend on sizes "
                "or attributes. Use fewer comparisons, or bound the sizes with an assert"
            ) from None
        return [
            (
                TracedPlan(combination, _ranks(call), (*given, *tightest(decisions)), temporaries, steps),
                outputs,
            )
            for decisions, (outputs, temporaries, steps) in paths
        ]

    def _is_enumerated(self, index: int) -> bool:
        return self.record.attributes[index].kind in ("bool", "str")

    def _run(
        self, recorder: Recorder, combination: int
    ) -> tuple[_Outputs | None, tuple[Expression, ...], tuple[Any, ...]]:
        """Runs the launcher, and returns the outputs, the bytes of the temporary tensors, and the steps."""
        symbols = recorder.symbols
        call = symbols.call
        attributes = {
            entry.name: value if self._is_enumerated(index) else symbols.attribute(index)
            for index, (entry, value) in enumerate(zip(self.record.attributes, call.attributes, strict=True))
        }
        with ExitStack() as stack:
            fake = FakeTensorMode(shape_env=symbols)
            fake.cache_enabled = False
            stack.enter_context(fake)
            stack.enter_context(functions_of_symbols(recorder))
            stack.enter_context(triton_launches(recorder, self.choose))
            stack.enter_context(cuda_launches(recorder))
            inputs = self._inputs(recorder, combination, call, attributes)
            stack.enter_context(recorder)
            stack.enter_context(Indexing())
            try:
                returned = self.launcher(*inputs, **attributes)
            except BuildError:
                raise
            except NotAnExpression as error:
                raise BuildError(
                    f"{self._line(error)}: the library cannot compute {error} from sizes and attributes"
                ) from error
            except Exception as error:  # what the launcher says of these sizes
                message = f"{self._line(error)}: {type(error).__name__}: {error}".rstrip(": ")
                return None, (), (Refuse(symbols.described(message)),)
            return recorder.finish(returned, len(self.record.outputs))

    def _inputs(
        self, recorder: Recorder, combination: int, call: Call, attributes: Mapping[str, Any]
    ) -> list[Any]:
        dtypes, required = self.record.combinations[combination], entries(self.record.input_shapes)
        shapes: dict[str, Any] = {
            entry.name: sizes and tuple(recorder.symbols.size(index, d) for d in range(len(sizes)))
            for index, (entry, sizes) in enumerate(zip(self.record.inputs, call.sizes, strict=True))
        }
        for name, text in required.items():
            if shapes[name] is not None:
                shapes[name] = evaluate(self.record, text, shapes, attributes)
        inputs: list[Any] = []
        for index, (name, shape) in enumerate(shapes.items()):
            if shape is None:
                inputs.append(None)
                continue
            recorder.symbols.in_torch = True
            tensor = torch.empty(shape, dtype=getattr(torch, dtypes[name]), device="cuda")
            recorder.symbols.in_torch = False
            recorder.add_input(index, tensor)
            inputs.append(tensor)
        return inputs

    def _line(self, error: BaseException) -> str:
        """Returns the last line of the launcher's file in a traceback."""
        code = self.launcher.__code__
        number, trace = code.co_firstlineno, error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == code.co_filename:
                number = trace.tb_lineno
            trace = trace.tb_next
        return f"{Path(code.co_filename).name}:{number}"


def _ranks(call: Call) -> Ranks:
    return tuple(None if sizes is None else len(sizes) for sizes in call.sizes)


def _calls(record: Record, samples: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Call, bool]]:
    """Yields a call to begin with for each choice of ranks, bools and texts; whether it must be traced."""
    if wrong := [entry.name for entry in record.inputs if entry.repeated]:
        raise BuildError(f"{record.name}: {wrong[0]} is a Tensor[]; launchers in Python take single tensors")
    if wrong := [entry.name for entry in record.attributes if entry.kind == "int[]"]:
        raise BuildError(f"{record.name}: {wrong[0]} is an int[]; launchers take single numbers")
    for sizes, is_given in _sizes(record, samples):
        for attributes in itertools.product(*(_values(record, entry) for entry in record.attributes)):
            yield Call(sizes, attributes), is_given


def _sizes(
    record: Record, samples: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[tuple[tuple[int, ...] | None, ...], bool]]:
    seen: set[Ranks] = set()
    given = [
        tuple(
            None if sample.get(entry.name) is None else tuple(sample[entry.name].shape)
            for entry in record.inputs
        )
        for sample in samples
    ]
    other = tuple(None if entry.optional else (67,) for entry in record.inputs)
    every = tuple((67,) for _ in record.inputs)
    for sizes in [*given, *([] if given else [every, other])]:
        first = next(len(shape) for shape in sizes if shape is not None)
        for rank in (first, *range(1, HIGHEST_RANK + 1)):
            new = tuple(
                shape if shape is None or len(shape) != first else ((3,) * (rank - first) + shape)[-rank:]
                for shape in sizes
            )
            if _ranks(Call(new)) not in seen:
                seen.add(_ranks(Call(new)))
                yield new, rank == first or not given


def _values(record: Record, entry: Attribute) -> Sequence[Any]:
    """Returns the values of an attribute to trace: all of them for bools and texts, or one to begin with."""
    if entry.kind == "bool":
        return (False, True)
    if entry.kind == "str":
        if entry.name not in record.attribute_choices:
            raise BuildError(
                f'{record.name}: {entry.name} is a str; name its values: choices="{entry.name} = a | b"'
            )
        return record.attribute_choices[entry.name]
    start = 1 if entry.default is None else entry.default
    return (float(start) if entry.kind == "float" else start,)
