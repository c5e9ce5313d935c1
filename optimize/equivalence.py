"""Compares an optimised model with the original."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from types import MappingProxyType
from typing import Any
from typing import cast as typed

import numpy as np
import onnx_ir as ir

from twinop import deploy
from twinop.deploy.ort_runs import Answer, NotRunnable, check_shown
from twinop.errors import ExportError, TwinopError, option
from twinop.model.weights import clip
from twinop.record.tolerance import MAX_USABLE_ERROR, NOISE_FACTOR

from . import decoders, inputs
from . import graph as g
from .hidden import Place, shown
from .inputs import Case, Sizes
from .precision import MOST_ELEMENTS
from .sliced import Runnable
from .sliced import run_any as run
from .symbolic_shapes import infer_types

Outputs = list[list[Any]]  # the outputs of each case: arrays, or lists of arrays for sequences
Errors = list[list[float]]  # the relative error of each output of each case

ACCEPTED = {"float32": 1e-4, "float64": 1e-9, "float16": 2e-3, "bfloat16": 1.6e-2}
"""The relative error that is always accepted: sums in another order have as much."""
_LARGE, _TIMES_TYPICAL = 1e4, 1e3  # numbers that hide scores and logits are far larger than the rest
LAST_BITS = 2.0**-22  # two fp32 numbers beside each other, twice
IDS = "the ids of the largest rows"
_FEW = 16  # constants of no more elements are sizes and bounds, where the last bits decide
_BESIDE_10000 = 2.0**-10  # what an fp32 score keeps to which a mask has added -10000


def accepted_error(dtype: str, own: float, times: float = 1.0) -> float:
    """Returns the largest accepted error of a result, given the original's own where last bits differ;
    `times`: how many times what is accepted of a whole value."""
    return max(times * ACCEPTED[dtype], NOISE_FACTOR * own if own <= MAX_USABLE_ERROR * times else 0.0)


def has_steps(model: ir.Model) -> bool:
    """Whether a model rounds to a few numbers itself, so that last bits may change much."""
    return any("QuantizeLinear" in node.op_type for node in model.graph)


class NotEquivalent(Exception):
    """A rewritten model fails or computes something else than the original; the text says which."""

    def __init__(self, text: str, rewrite: str = "") -> None:
        super().__init__(text)
        self.rewrite = rewrite  # that is the cause, if it is known

    def within(self, segment: str) -> "NotEquivalent":
        """Returns the same of a segment, which the text names."""
        return NotEquivalent(f"{segment}: {self}" if segment else str(self), self.rewrite)


def relative_error(expected: Any, found: Any, typical: float = 0.0) -> float:
    """Returns |found - expected| / |expected| in the 2-norm; infinity if shapes or NaN and inf differ.

    Of integers and truth values it is the share of those that differ. Numbers that are much larger than the
    typical one, such as the lowest number in masked logits, have an error of their own: beside them, no other
    number would count. One of the size of `typical` has no larger error than that: all may be almost 0.
    """
    if isinstance(expected, list):  # a sequence
        if len(expected) != len(found):
            return inf
        return max((relative_error(a, b, typical) for a, b in zip(expected, found, strict=True)), default=0.0)
    expected, found = np.asarray(expected), np.asarray(found)
    if expected.shape != found.shape:  # a Loop of no trips returns [0, 0], whatever a trip would
        return 0.0 if not expected.size and not found.size and expected.ndim == found.ndim else inf
    if expected.dtype.kind in "OSU":
        return 0.0 if (expected == found).all() else inf
    if expected.dtype.kind in "iub":
        return float((expected != found).mean()) if expected.size else 0.0
    a, b = expected.reshape(-1).astype(np.float64), found.reshape(-1).astype(np.float64)
    finite = np.isfinite(a)
    if not finite.all():
        if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
            return inf
        a, b = a[finite], b[finite]
    if not np.isfinite(b).all():
        return inf
    if np.abs(a).max(initial=0.0) < _LARGE:
        return _norm_error(a, b, typical)
    large = np.abs(a) >= max(_LARGE, _TIMES_TYPICAL * _typical(a))
    return max(_norm_error(a[part], b[part], typical) for part in (large, ~large))


def _typical(array: np.ndarray) -> float:
    ordinary = np.abs(array[(array != 0) & (np.abs(array) < _LARGE)])
    return float(np.median(ordinary)) if ordinary.size else 0.0


def _norm_error(a: np.ndarray, b: np.ndarray, typical: float) -> float:
    with np.errstate(over="ignore"):
        scale = float(np.abs(a).max(initial=0.0)) or typical or 1.0  # the lowest number's square overflows
        # Not np.linalg.norm: its BLAS keeps threads waiting, on cores that ONNX Runtime needs.
        whole, apart = (float(np.einsum("i,i", each, each)) ** 0.5 for each in (a / scale, (a - b) / scale))
        return apart / (max(whole, typical / scale * a.size**0.5) or 1.0)


@dataclass(frozen=True)
class Reference:
    """Inputs, and what the original computes for them."""

    cases: list[Case]  # typical ones, and then edge cases
    outputs: Outputs  # the original's, in ONNX Runtime as it is
    edge: list[str]  # what the inputs of the last cases are, such as "zeros"
    sizes: list[float]  # of the typical number of each output in the typical cases
    note: str = ""  # what a user should know about the original's runs
    places: Sequence[Place | None] = ()  # where each output has what masks hide; empty: compared whole
    skipped: Sequence[str] = ()  # a note on each case that is not compared as the original does not run on it

    @property
    def typical(self) -> int:
        """The number of typical cases."""
        return len(self.cases) - len(self.edge)

    def uncompared(self, graph: ir.Graph, allowed: bool = True) -> list[str]:
        """Returns a note for each output with nothing to compare in the typical cases; see `check_shown`."""
        cure = f"Give inputs for which it has finite numbers with {option('inputs_file')}"
        return check_shown(graph, self.outputs[: self.typical], allowed, cure)

    def unchanging(self, graph: ir.Graph) -> list[str]:
        """Returns a note for each output that has the same numbers in two cases that follow each other."""
        return [
            f"output {value.name} is the same for other inputs: it may depend on none"
            for value, *found in zip(graph.outputs, *self.outputs[: self.typical], strict=True)
            if _is_float(found[0]) and found[0].size and any(map(np.array_equal, found, found[1:]))
        ]

    def without(self, is_left_out: Callable[[Case], bool]) -> "Reference":
        """Returns the reference without some of its cases."""
        return self.some([index for index, case in enumerate(self.cases) if not is_left_out(case)])

    def some(self, chosen: Sequence[int]) -> "Reference":
        """Returns the reference with the cases of these indices only."""
        edge = [self.edge[index - self.typical] for index in chosen if index >= self.typical]
        cases, outputs = [self.cases[index] for index in chosen], [self.outputs[index] for index in chosen]
        return replace(self, cases=cases, outputs=outputs, edge=edge)

    def errors(self, found: Outputs, dtype: ir.DataType | None = None) -> Errors:
        """Returns the errors of the outputs of all cases, infinite for one without outputs; `dtype`: to whose
        range the finite numbers are limited."""
        errors = []
        for index, (case, own, outputs) in enumerate(zip(self.cases, self.outputs, found, strict=True)):
            expected = [a if dtype is None else clip(a, dtype) for a in own]
            typical = self.sizes if index >= self.typical else [0.0] * len(own)
            places = self.places or [None] * len(own)
            if not outputs:
                errors.append([inf] * len(own))
                continue
            pairs = [[*map(shown, some, [case] * len(own), places)] for some in (expected, outputs)]
            errors.append([*map(relative_error, *pairs, typical)])
        return errors

    def check(self, errors: Errors, noise: Callable[[tuple[int, ...]], Errors], dtype: str) -> float:
        """Returns the largest error of the typical cases; NotEquivalent: an error is not accepted. `noise`
        returns those of the original in the cases, by index, where an error is not rounding."""
        large = self.beyond_rounding(errors, dtype)
        for index, noises in zip(large, noise(large) if large else (), strict=True):
            for error, own in zip(errors[index], noises, strict=True):
                if error <= ACCEPTED[dtype]:
                    continue
                is_edge = index >= self.typical
                if is_edge and not own <= MAX_USABLE_ERROR:
                    continue
                accepted = accepted_error(dtype, own)
                if not error <= accepted:
                    where = f" for {self.edge[index - self.typical]}" if is_edge else ""
                    text = f"relative error {error:.1e}, accepted {accepted:.1e}"
                    raise NotEquivalent(f"differs from the original{where}: {text}")
        return self.largest(errors)

    def beyond_rounding(self, errors: Errors, dtype: str) -> tuple[int, ...]:
        """Returns the cases, by index, with errors that are not accepted whatever the original's are."""
        return tuple(at for at, row in enumerate(errors) if not all(each <= ACCEPTED[dtype] for each in row))

    def largest(self, errors: Errors) -> float:
        """Returns the largest error of the typical cases."""
        return max((error for each in errors[: self.typical] for error in each), default=0.0)


def generated(
    original: Runnable, model: ir.Model, padding: str | None, library: deploy.Libraries
) -> tuple[Reference, Sizes]:
    """Runs the original, in fp32, on generated inputs that it accepts and for which its outputs can be
    compared; returns the reference and sizes. ExportError: it cannot be loaded, or runs on no inputs that
    were tried."""
    reasons, best = list[Exception](), typed(tuple[Reference, Sizes] | None, None)
    hidden = inputs.hidden(padding) if any(map(inputs.is_mask, model.graph.inputs)) else ["right"]

    def tried(
        sizes: Sizes, hidden: Sequence[str] = hidden, others: Sequence[Sizes] = (), notes: Sequence[str] = ()
    ) -> tuple[Reference, Sizes] | None:
        nonlocal best
        other = replace(sizes, batch=1, length=sizes.length + 2 * (sizes.length % 2))
        others = others or [other] * (1 + (len(hidden) == 1))  # two cases of the same sizes
        kinds = [(sizes, hide) for hide in hidden] + [(other, "nothing") for other in others]
        for positive in (False, True):
            try:
                make = partial(inputs.generate, model, positive=positive)
                cases = [make(each, hide=hide, seed=seed) for seed, (each, hide) in enumerate(kinds)]
            except inputs.TooLarge as error:
                reasons.append(error)
                break
            try:
                found = reference(original, model, library, cases)
                found = replace(found, skipped=[*found.skipped, *notes])
            except (TwinopError, NotRunnable) as error:
                if not reasons:
                    try:
                        run(original, library, may_skip=True)
                    except (TwinopError, NotRunnable) as refused:
                        raise ExportError(f"the original cannot be loaded on the CPU: {refused}") from refused
                reasons.append(error)
                note = _skip_note("a mask that hides everything", str(error).splitlines()[0])
                return tried(sizes, hidden[:-1], others, [note]) if hidden[-1:] == ["everything"] else None
            if best is None or len(found.uncompared(model.graph)) < len(best[0].uncompared(model.graph)):
                best = found, sizes
            if not best[0].uncompared(model.graph):
                return best
        return None

    steps, may_hide = decoders.runs(model)
    for count in range(len(steps), 1, -1):  # some models take no prompt, or no tokens after it
        if found := tried(steps[0], hidden if may_hide else (), steps[:count]):
            return found[0], steps[count - 1]
    for sizes in inputs.SIZES:
        fitting = None if (found := tried(sizes)) or sizes.step else inputs.of_weights(model, sizes)
        if found or (fitting and (found := tried(fitting))):
            return found
    if best is not None:
        return best
    if isinstance(reasons[0], NotRunnable):  # whatever its inputs are
        raise reasons[0]
    reason = str(reasons[0]).splitlines()[0]
    raise ExportError(
        f"the original does not run on generated inputs ({reason}). Give it inputs with "
        f"{option('inputs_file', 'file.npz')}: {', '.join(str(value.name) for value in model.graph.inputs)}"
    )


def reference(
    original: Runnable,
    model: ir.Model,
    library: deploy.Libraries,
    typical: list[Case],
    hidden: Sequence[str] = (),
    others: Mapping[str, Case] = MappingProxyType({}),
) -> Reference:
    """Runs the original on cases, and on others and edge cases that are made of the last of them.

    Where an output has nothing to compare in them, the first case runs with the other branches of an If, too:
    a decoder returns empty caches of an encoder in the branch that reads them. In some of the edge cases
    masks hide what is `hidden` (`inputs.generate`). NotRunnable, TwinopError: the original does not run.
    """
    edge = inputs.edge_cases(model, typical[-1], hidden) | {**others}
    found = _run_original(original, library, typical, edge)
    if found.uncompared(model.graph) and (other := inputs.other_branch(model, typical[0])):
        with suppress(TwinopError, NotRunnable):
            return _run_original(original, library, [other, *typical], edge)
    return found


def _run_original(
    original: Runnable, library: deploy.Libraries, typical: list[Case], edge: dict[str, Case]
) -> Reference:
    answer = run(original, library, [*typical, *edge.values()], required=len(typical), may_skip=True)
    notes = skip_notes([*edge], answer, len(typical))
    ran = zip(edge.items(), answer.outputs[len(typical) :], strict=True)
    edge = {name: case for (name, case), found in ran if found}
    outputs = [each for each in answer.outputs if each]
    cases = [*typical, *edge.values()]
    sizes = [
        max((_typical(each[np.isfinite(each)]) for each in values if _is_float(each)), default=0.0)
        for values in zip(*outputs[: len(typical)], strict=True)
    ]
    return Reference(cases, outputs, list(edge), sizes, answer.note, skipped=notes)


def skip_notes(edge: Sequence[str], answer: Answer, typical: int) -> list[str]:
    """Returns a note on each edge case on which the original did not run; they follow the typical cases."""
    return [_skip_note(edge[index - typical], why) for index, why in answer.failed.items()]


def _skip_note(case: str, why: str) -> str:
    return f"not compared for {case}, on which the original does not run: {why}"


def with_ids(
    original: Runnable, model: ir.Model, library: deploy.Libraries, reference: Reference
) -> Reference:
    """Returns a reference with the ids that may give the largest numbers (`inputs.cases_of_ids`), too."""
    sizes = [sum(array.size for array in case.values()) for case in reference.cases[: reference.typical]]
    names, cases = inputs.cases_of_ids(model, reference.cases[sizes.index(max(sizes))])
    what = f"{IDS} of {names}"
    try:
        outputs = run(original, library, cases).outputs if cases else []
    except (TwinopError, NotRunnable) as error:  # it does not take so many sequences
        return replace(reference, skipped=[*reference.skipped, _skip_note(what, str(error).splitlines()[0])])
    edge, outputs = reference.edge + [what] * len(cases), reference.outputs + outputs
    return replace(reference, cases=reference.cases + cases, outputs=outputs, edge=edge)


def _is_float(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind == "f"


def add_magnitudes(
    model: ir.Model, dtypes: Collection[ir.DataType], known: Collection[str | None] = ()
) -> dict[str, str]:
    """Adds outputs to a model, in place: the largest magnitude of each value of these dtypes that its nodes
    compute, but for known ones. Returns the names of these values, by that of the output."""
    values, found = [value for node in model.graph for value in node.outputs], dict[str, str]()
    if any(value.dtype is None for value in values):
        infer_types(model)
    for value in [value for value in values if value.dtype in dtypes]:
        is_tensor = value.name and isinstance(value.type, ir.TensorType)
        if is_tensor and value.name not in known and not value.is_graph_output():
            wide = ir.node("Cast", [value], {"to": ir.DataType.FLOAT})
            size = ir.node("Abs", wide.outputs)
            largest = ir.node("ReduceMax", size.outputs, {"keepdims": 0}, name=f"{value.name} (largest)")
            [output] = largest.outputs
            output.name, output.dtype, output.shape = largest.name, ir.DataType.FLOAT, ir.Shape([])
            model.graph.extend([wide, size, largest])
            model.graph.outputs.append(output)
            found[str(output.name)] = str(value.name)
    return found


def nudge_weights(model: ir.Model, by: float = LAST_BITS) -> ir.Model:
    """Changes the last bits of a model's weights in place, but for the largest ones."""
    for value in model.graph.initializers.values():
        tensor = value.const_value
        is_float = tensor is not None and tensor.dtype is ir.DataType.FLOAT
        if tensor is not None and is_float and _FEW < tensor.size <= MOST_ELEMENTS:
            value.const_value = ir.tensor(_nudged(tensor.numpy(), by, 0))
    return model


def noise(nudged: Runnable, library: deploy.Libraries, reference: Reference, by: float = LAST_BITS) -> Errors:
    """Returns by how much the original differs from itself where the last bits of its numbers differ, with
    ONNX Runtime's graph optimisations and without. `nudged` has other weights; inputs change by a factor."""
    runs = [[[0.0] * len(each) for each in reference.outputs]]
    for seed, optimize in enumerate((True, False)):  # large inputs saturate a softmax: one nudge shows little
        near = list[Case]()
        for case in reference.cases:
            hides_all = any(each.all() for each in inputs.hidden_tokens(case))
            size = _BESIDE_10000 if hides_all else by
            near.append({name: _nudged(array, size, seed) for name, array in case.items()})
        with suppress(TwinopError, NotRunnable):
            runs.append(reference.errors(run(nudged, library, near, optimize=optimize).outputs))
    return largest_of(runs)


def largest_of(runs: Sequence[Errors]) -> Errors:
    """Returns the largest one of several runs' errors, each."""
    return [[max(each) for each in zip(*rows, strict=True)] for rows in zip(*runs, strict=True)]


def _nudged(array: np.ndarray, by: float, seed: int) -> np.ndarray:
    """Changes the last bits of numbers: a result that depends on them is not certain."""
    if array.dtype != np.float32:
        return array
    signs = np.random.default_rng(seed).random(array.shape, np.float32) < 0.5
    return np.asarray(array * np.where(signs, np.float32(1 - by), np.float32(1)))  # larger may be infinite


def confirm_shapes(model: ir.Model, reference: Reference) -> None:
    """Keeps of the shapes of inputs and outputs what no run contradicts: ONNX Runtime ignores the rest."""
    known: list[dict[str, int]] = [{} for _ in reference.cases]  # the sizes of each case, by name
    given = {
        value: [case[name] for case in reference.cases]
        for value in model.graph.inputs
        if (name := str(value.name)) in reference.cases[0]
    }
    results = zip(model.graph.outputs, zip(*reference.outputs, strict=True), strict=True)
    for value, found in (*given.items(), *results):
        if not all(isinstance(each, np.ndarray) for each in found):
            continue
        shape = g.dims(value)
        if shape is None or any(each.ndim != len(shape) for each in found):
            shape = [None] * found[0].ndim
        for axis, dim in enumerate(shape):
            pairs = [(names, each.shape[axis]) for names, each in zip(known, found, strict=True) if each.size]
            wanted = [names.setdefault(dim, n) if isinstance(dim, str) else dim for names, n in pairs]
            if [size for _, size in pairs] != wanted:
                shape[axis] = f"{value.name}_{axis}" if value in given else None
        value.shape = ir.Shape(shape)
