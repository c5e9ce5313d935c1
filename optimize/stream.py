"""Compares every segment of a written file with the original, one in memory at a time.

A segment of the original runs once, in its own dtype, and the same one of the result twice: from what the
original's segments before have returned, so that errors of others hide nothing, and from what its own have,
so that the outputs show what accumulates. Decoders run a prompt and a step after it.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import product
from math import inf
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

from twinop import deploy
from twinop.deploy.ort_process import SERVER, Endless
from twinop.deploy.ort_runs import Earlier, NotRunnable, check_shown
from twinop.errors import ExportError, TwinopError
from twinop.model import weights
from twinop.record.op_spec import DOMAIN
from twinop.record.tolerance import MAX_USABLE_ERROR, nudged

from . import decoders, equivalence, inputs, sliced
from . import graph as g
from .inputs import Case, Sizes
from .segments import Part, Segment, extract
from .sliced import Found
from .symbolic_shapes import infer_types
from .user_ops import set_dtype
from .widen import dtypes, round_results, widen

PROMPT = 16  # tokens
_MOST_WINDOW = 512  # tokens; larger windows are reduced
_REDUCED = 5  # tokens
_SOON = 0.1  # seconds
_HALF_OF_FP16 = 65504 / 2
_OF_CONVERTED = 4.0  # times a last bit, where a result has another dtype: all in a segment is rounded
_OF_CHANNELS = 4.0  # times what is accepted of a whole value: the largest of many errors
ONLY_16: Mapping[str, Sequence[int]] = {
    "CustomLinearQ": (), "CustomLinearQSwiglu": (), "CustomLinearFp8": (1, 3), "CustomLinearW8": (2,),
    "CustomLinearW8Swiglu": (2,),
}  # fmt: skip
"""Nodes that have no kernel in fp32, and which of their inputs have fp32 nevertheless."""
_SIZES = [Sizes(1, 32), *inputs.SIZES]
_MIXTURES, _TABLE = ("MoE", "QMoE"), "GatherBlockQuantized"

State = dict[str, list[np.ndarray]]  # values that cross, by name: of each case


class _DoesNotRun(ExportError):
    """The original does not run on the inputs."""


@dataclass
class Streamed:
    """What all segments have in common, and what was found."""

    original: ir.Model
    result: ir.Model
    library: deploy.Libraries
    dtype: str
    shown: Callable[[str, Case, Any], Any]
    cases: list[Case]  # the inputs of the graph: of a prompt and of a step after it, or of the only case
    caches: Mapping[str, str] = field(default_factory=dict)  # the outputs that a step reads, by its inputs
    windows: Mapping[int, int] = field(default_factory=dict)  # smaller ones for those too large to run
    exact: State = field(default_factory=dict)  # values of the original
    noisy: State = field(default_factory=dict)  # of the original where last bits differ
    own: State = field(default_factory=dict)  # of the result
    error: float = 0.0  # the largest relative one of what a segment computes from the original's values
    own_error: float = 0.0  # that of an output of the graph, from the result's own values
    own_noise: float = 0.0  # that of the original where the last bits of its values differ
    notes: list[str] = field(default_factory=list)  # on outputs of the graph with nothing to compare


def stream(
    segments: Sequence[Segment],
    original: ir.Model,
    result: ir.Model,
    library: deploy.Libraries,
    dtype: str,
    cases: Sequence[Case] = (),
    progress: Callable[[int, int], None] = lambda index, count: None,
    shown: Callable[[str, Case, Any], Any] = lambda name, case, value: value,
) -> Streamed:
    """Runs all segments of both models, and compares what they return.

    Args:
        original: in its own dtypes; sizes of its caches are numbers (`decoders.set_sizes`).
        result: as it was written; its large weights are those of the file.
        dtype: the result's, which decides what is accepted.
        cases: the inputs of the only case, if they are given; by default inputs are generated.
        progress: called with the index of each segment and the number of all.
        shown: returns the positions of a value, by name, that a case's padding masks show.

    Raises:
        NotEquivalent: a segment of the result fails or computes something else; the text names it.
        NotRunnable, Endless: ONNX Runtime cannot run a segment on the CPU, or not to its end.
        ExportError: the original does not run.
    """
    errors = list[Exception]()
    make = partial(Streamed, original, result, library, dtype, shown)
    for run in _runs(make, original, result, cases, errors):
        try:
            with ThreadPoolExecutor(1) as pool:  # the original of the next one runs while one is compared
                ahead = deque[Future[_Forms]]()
                try:
                    for index, segment in enumerate(segments):
                        for each in segments[index + len(ahead) : index + 2]:
                            ahead.append(pool.submit(copy_context().run, _run_original, run, each))
                        progress(index, len(segments))
                        _compare(run, segment, *ahead[0].result())
                        ahead.popleft()
                        _forget(run, segments[index + 1 :])
                except KeyboardInterrupt:
                    while wait(ahead, _SOON).not_done:  # it may run for minutes, for nobody
                        SERVER.close()
                    raise
            return run
        except (_DoesNotRun, NotRunnable) as error:
            errors.append(error)
    raise errors[0]


def _runs(
    run: Callable[..., Streamed],
    original: ir.Model,
    result: ir.Model,
    cases: Sequence[Case],
    errors: list[Exception],
) -> Iterator[Streamed]:
    """Yields runs to try: the sizes of a model's inputs are not always known."""
    if cases:
        yield run([dict(cases[0])])
        return
    whole = original.clone()
    whole.graph.meta.update(original.graph.meta)
    sliced.fold_moves(whole)  # tables show how many rows they have
    windows = {number for node in (*whole.graph, *result.graph) for number in _windows(node).values()}
    large = sorted(each for each in windows if each > _MOST_WINDOW)
    held = [node for node in whole.graph if g.attribute(node, "sliding_window_cache", 0)]
    if any(isinstance((g.dims(node.inputs[3]) or [0, 0])[-2], int) for node in held):
        large = []  # the size of the cache is declared
    # Each gets a number of its own, so that a window that a rewrite has changed is another one here, too.
    smaller = {window: _REDUCED + index for index, window in enumerate(large)}
    _reduce_windows(whole, smaller)
    sizes = decoders.run_sizes(whole)
    if sizes is not None and (window := decoders.cache_window(whole)):
        steps = [_decoder_case(whole, sizes(1, before, 1), before, 1) for before in (window + 9, window)]
        yield run(steps, windows=smaller)
    elif sizes is not None:
        new = max([PROMPT, *(smaller.get(each, each) + 8 for each in windows)])
        lengths = ((0, new), (new, 1))
        steps = [_decoder_case(whole, sizes(1, *each, new + 1), *each) for each in lengths]
        yield run(steps, decoders.caches(original), smaller)
    else:
        for each in _SIZES:
            try:
                yield run([inputs.generate(whole, each, hide="nothing")])
            except ExportError as error:
                errors.append(error)


def _windows(node: ir.Node) -> dict[str, int]:
    """Returns the attributes of an attention that are a window."""
    is_attention = node.op_type in (decoders.ATTENTION, "CustomAttentionCached")
    names = ("local_window_size", "window") if is_attention else ()
    return {name: node.attributes[name].as_int() for name in names if name in node.attributes}


def _reduce_windows(model: ir.Model, smaller: Mapping[int, int]) -> None:
    """Makes windows smaller that are too large to run. The check is the same with a smaller window, and a
    prompt that is longer than it: the same code compares a place with a number."""
    for node in model.graph:
        for name, number in _windows(node).items():
            node.attributes[name] = ir.AttrInt64(name, smaller.get(number, number))


def _decoder_case(model: ir.Model, sizes: Sizes, before: int, new: int) -> Case:
    """Generates the inputs of new tokens after others: positions are those of the tokens."""
    case = inputs.generate(model, sizes, hide="nothing", seed=before)
    for value in model.graph.inputs:
        name = str(value.name)
        if (array := case.get(name)) is None:
            continue
        reads = {(use.node.op_type, use.idx): use.node for use in value.uses()}
        table = g.dims(reads[_TABLE, 1].inputs[0]) if (_TABLE, 1) in reads else None
        if table and isinstance(table[0], int):
            case[name] = np.random.default_rng(before).integers(0, table[0], array.shape).astype(array.dtype)
        elif array.dtype.kind == "i" and "position" in name.lower() and array.shape[-1:] == (new,):
            case[name] = np.broadcast_to(np.arange(before, before + new), array.shape).astype(array.dtype)
        elif inputs.is_cache(value) and not before:
            case[name] = np.zeros_like(array)  # rows that are not yet written
    return case


# ------------------------------------------------------------------------------------ one segment


_Forms = tuple[ir.Model, ir.Model, Sequence[ir.Value]]
"""The original's part and the result's as they run, and what chooses experts in the former."""


def _run_original(run: Streamed, segment: Segment) -> _Forms:
    """Runs the original's part of a segment, and keeps what others read."""
    count = len(run.cases)
    original, result = _form(run, run.original, segment.original), _form(run, run.result, segment.result)
    routers = _routers(original, result)
    for each in routers:  # their sizes are those of what is fed in their place
        original.graph.outputs.extend([] if each.is_graph_output() else [each])
    exact, noisy = (_given(run, original, state, at) for state, at in ((run.exact, 0), (run.noisy, count)))
    near = _near(run)
    with _naming(segment.name, _DoesNotRun, "the original fails"):
        found = sliced.run(original.clone(), [*exact, *map(near, noisy)], run.library)
    _keep(run.exact, found[:count])
    _keep(run.noisy, found[count:])
    return original, result, routers


def _compare(
    run: Streamed, segment: Segment, original: ir.Model, result: ir.Model, routers: Sequence[ir.Value]
) -> None:
    """Runs the result's part of a segment, and compares what it returns with the original's."""
    count, name = len(run.cases), segment.name
    outputs = [str(value.name) for value in result.graph.outputs]
    if unknown := [each for each in outputs if each not in run.exact]:
        raise equivalence.NotEquivalent(
            f"{name}: it returns {unknown[0]}, which the original does not compute"
        )
    given, own = _given(run, result, run.exact, None), _given(run, result, run.own, count)
    known = {value.name for node in original.graph for value in node.outputs}
    is_narrow = run.dtype == "float16"
    measured = equivalence.add_magnitudes(result, [ir.DataType.FLOAT16], known) if is_narrow else {}
    with _naming(name, equivalence.NotEquivalent, "the result fails"):
        found = sliced.run(result.clone(), [*given, *own], run.library)
    _keep(run.own, found[count:])
    exact = _given(run, original, run.exact, None)
    expected = [{each: run.exact[each][case] for each in outputs} for case in range(count)]
    _check(run, name, expected, found[:count], _noise(run, name, original, exact))
    _check_outputs(run, name, outputs)
    _check_inside(run, segment, original, found[:count], measured)
    if routers:
        _force_experts(run, segment, routers, exact[0], given[0])


def _form(run: Streamed, model: ir.Model, part: Part) -> ir.Model:
    """Returns a part of a model in the form that the CPU can run."""
    made = extract(model, part)
    _reduce_windows(made, run.windows)
    decoders.make_runnable(made)
    if ir.DataType.BFLOAT16 in {each for graph in made.graphs() for each in dtypes(graph)}:
        if any(value.dtype is None for node in made.graph for value in node.outputs):
            infer_types(made)
        narrow = [node for node in made.graph if node.domain == DOMAIN and node.op_type in ONLY_16]
        for graph in made.graphs():
            widen(graph, set())
        for node in narrow:
            compute_in(ir.DataType.BFLOAT16, node)
    return made


def compute_in(dtype: ir.DataType, node: ir.Node) -> None:
    """Lets a node without a kernel in fp32 compute in 16 bits, which it has."""
    kept, made = ONLY_16.get(node.op_type, ()), 0 if node.op_type in ONLY_16 else 2
    for index, value in enumerate(node.inputs):
        if index not in kept and value is not None and value.dtype is ir.DataType.FLOAT:
            node.replace_input_with(index, g.add(node, "Cast", [value], {"to": int(dtype)}))
    for result in node.outputs[made:]:
        set_dtype(result, dtype)


def rounded(model: ir.Model, dtype: ir.DataType) -> ir.Model:
    """Lets the CPU compute a model of 16 bits in fp32, in place, and round each result, as GPUs do."""
    round_results(model)
    for node in [node for node in model.graph if node.domain == DOMAIN]:
        if node.op_type in ONLY_16 or node.op_type.endswith(("Fp8", "QuantizeRows")):
            compute_in(dtype, node)
    return model


def _given(run: Streamed, model: ir.Model, state: State, first: int | None) -> list[dict[str, Any]]:
    """Returns the inputs of a segment's cases; `first`: the index of the prompt's case in the call, None if
    what it returns is in `state`."""
    outputs, made = {value.name for value in model.graph.outputs}, []
    for index, case in enumerate(run.cases):
        given = dict[str, Any]()
        for value in model.graph.inputs:
            name = str(value.name)
            after = run.caches.get(name) if index else None
            if after in outputs and first is not None:
                given[name] = Earlier(first, str(after))
                continue
            known = state[after][0] if after in state else state[name][index] if name in state else None
            if (array := case.get(name) if known is None else known) is None:
                continue  # an initializer that is an input, too
            is_other = value.dtype is not None and value.dtype.numpy() != array.dtype
            given[name] = weights.narrow(array, value.dtype) if is_other and value.dtype else array
        made.append(given)
    return made


def _forget(run: Streamed, rest: Sequence[Segment]) -> None:
    """Frees what no other segment reads."""
    parts = [part for each in rest for part in (each.original, each.result)]
    needed = {*run.caches.values()}.union(*(part.inputs + part.outputs for part in parts))
    for state in (run.exact, run.noisy, run.own):
        for name in {*state} - needed:
            del state[name]


def _keep(state: State, found: Sequence[Found]) -> None:
    state.update({name: [each[name] for each in found] for name in found[0]})


@contextmanager
def _naming(segment: str, kind: type[Exception], what: str) -> Iterator[None]:
    """Names the segment in errors of its run."""
    try:
        yield
    except (NotRunnable, Endless) as error:
        raise type(error)(f"{segment}: {error}") from error
    except TwinopError as error:
        raise kind(f"{segment}: {what}: {str(error).splitlines()[0]}") from error


# ------------------------------------------------------------------------------------ comparing


def _near(run: Streamed) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Returns what changes the last bits of inputs, those of the coarser dtype."""
    by = equivalence.LAST_BITS if run.dtype == "float32" else float(ml_dtypes.finfo(run.dtype).eps)
    kinds = {value.dtype for value in run.original.graph.initializers.values()}
    if ir.DataType[run.dtype.replace("float32", "float").replace("float64", "double").upper()] not in kinds:
        by = _OF_CONVERTED * max(by, float(ml_dtypes.finfo("float16").eps) * (ir.DataType.FLOAT16 in kinds))

    def near(case: Mapping[str, Any]) -> dict[str, Any]:
        arrays = {name: nudged(each, by) for name, each in case.items() if isinstance(each, np.ndarray)}
        return {**case, **arrays}

    return near


def _noise(
    run: Streamed, segment: str, original: ir.Model, cases: Sequence[Mapping[str, Any]]
) -> Callable[[int], list[Found]]:
    """Returns what runs the original where last bits differ, and where each operator rounds to its dtype:
    once, when it is first called, with the index of a case, whose outputs it returns."""

    @cache
    def variants() -> list[list[Found]]:
        found, rounded = list[list[Found]](), round_results(original.clone())
        is_half = {name for name, each in cases[0].items() if getattr(each, "dtype", None) == np.float16}
        wide = [{**case, **{name: case[name].astype(np.float32) for name in is_half}} for case in cases]
        for model, some in ((original.clone(), [*map(_near(run), cases)]), (rounded, wide)):
            with _naming(segment, _DoesNotRun, "the original fails"):
                found.append(sliced.run(model, some, run.library, optimize=model is not rounded))
        return found

    return lambda case: [each[case] for each in variants()]


def _check(
    run: Streamed,
    segment: str,
    expected: Sequence[Found],
    found: Sequence[Found],
    noise: Callable[[int], list[Found]],
) -> None:
    """Raises NotEquivalent if a value, or a channel of it, differs more than rounding does."""
    measures = ((equivalence.relative_error, 1.0, ""), (channel_error, _OF_CHANNELS, " of a channel"))
    values = [(case, name) for case, outputs in enumerate(expected) for name in outputs]
    for (case, name), (measure, times, what) in product(values, measures):
        see = partial(run.shown, name, run.cases[case % len(run.cases)])  # of all experts there are more
        exact, given = (see(each[case][name]) for each in (expected, found))
        error, accepted = measure(exact, given), times * equivalence.ACCEPTED[run.dtype]
        if measure is equivalence.relative_error:
            run.error = max(run.error, error)
        if error <= accepted:
            continue
        own = max(measure(exact, see(each[name])) for each in noise(case))
        accepted = equivalence.accepted_error(run.dtype, own, times)
        if not error <= accepted:
            text = f"{segment}: {name} differs from the original: relative error{what} {error:.1e}, accepted"
            raise equivalence.NotEquivalent(f"{text} {accepted:.1e}")


def channel_error(expected: Any, found: Any) -> float:
    """Returns the largest error of a channel, relative to its own size or the value's, if that is larger. A
    channel has the numbers of all tokens; one that differs does not show in an error of the whole."""
    if isinstance(expected, list):
        return 0.0
    a, b = (np.asarray(each) for each in (expected, found))
    if a.dtype.kind not in "fV" or a.ndim < 2 or a.shape != b.shape or not a.size:
        return 0.0
    a, b = a.astype(np.float32), b.astype(np.float32)
    finite = np.isfinite(a)
    if not finite.all():  # `relative_error` compares where
        a, b = np.where(finite, a, 0), np.where(finite, b, 0)
    scale = np.abs(a).max(initial=0.0) or np.float32(1)
    a, b = a / scale, b / scale
    own = np.sqrt(np.mean(a * a, axis=-2))
    typical = float(np.sqrt(np.mean(a * a)))
    error = np.sqrt(np.mean((a - b) ** 2, axis=-2)) / np.maximum(own, typical or 1.0)
    return float(error.max(initial=0.0)) if np.isfinite(error).all() else inf


def _check_outputs(run: Streamed, segment: str, outputs: Sequence[str]) -> None:
    """Compares the graph's outputs where each segment had what those before it have returned."""
    values = {str(value.name): value for value in run.original.graph.outputs}
    for name in (each for each in outputs if each in values):
        graph, shown = SimpleNamespace(outputs=[values[name]]), [[each] for each in run.exact[name]]
        run.notes += check_shown(graph, shown, True, "")
        states = (state[name] for state in (run.exact, run.noisy, run.own))
        for case, *arrays in zip(run.cases, *states, strict=True):
            exact, noisy, own = (run.shown(name, case, each) for each in arrays)
            error, noise = equivalence.relative_error(exact, own), equivalence.relative_error(exact, noisy)
            run.own_error = max(run.own_error, error)
            run.own_noise = max(run.own_noise, noise)
            # Each segment has been compared with less.
            accepted = equivalence.accepted_error(run.dtype, min(noise, MAX_USABLE_ERROR))
            if not error <= accepted:
                text = (
                    f"{segment}: {name} differs from the original after all segments before: relative error"
                )
                text += f" {error:.1e}, accepted {accepted:.1e}"
                raise equivalence.NotEquivalent(text)


def _check_inside(
    run: Streamed, segment: Segment, original: ir.Model, found: Sequence[Found], measured: Mapping[str, str]
) -> None:
    """Refuses what makes numbers near the end of fp16 that the original does not have."""
    sizes = {name: max(float(each[output]) for each in found) for output, name in measured.items()}
    large = {name: size for name, size in sizes.items() if not size <= _HALF_OF_FP16}
    if not large:
        return
    plain = original.clone()
    equivalence.add_magnitudes(plain, [ir.DataType.FLOAT16, ir.DataType.FLOAT])
    with _naming(segment.name, _DoesNotRun, "the original fails"):
        before = sliced.run(plain, _given(run, original, run.exact, None), run.library)
    arrays = [array for each in before for array in each.values() if array.dtype.kind == "f"]
    sizes_before = [np.abs(array.astype(np.float64)).max(initial=0) for array in arrays]
    if (most := max(sizes_before, default=0.0)) <= _HALF_OF_FP16:
        name, size = max(large.items(), key=lambda each: each[1])
        raise equivalence.NotEquivalent(
            f"{segment.name}: {name} reaches {size:.0f}, more than half of "
            f"what float16 has, where the original's numbers stay below {most:.0f}"
        )


# ------------------------------------------------------------------------------------ mixture of experts


def _routers(original: ir.Model, result: ir.Model) -> list[ir.Value]:
    """Returns the values of the original that choose experts, and that the result has, too."""
    known = {value.name for node in result.graph for value in node.outputs}
    places = {("", "TopK"): 0, **{(g.MICROSOFT, op_type): 1 for op_type in _MIXTURES}}
    nodes = [(node, places.get((node.domain, node.op_type))) for node in original.graph]
    found = dict.fromkeys(node.inputs[index] for node, index in nodes if index is not None)
    return [value for value in found if value is not None and value.name in known]


def _force_experts(
    run: Streamed,
    segment: Segment,
    routers: Sequence[ir.Value],
    exact: Mapping[str, Any],
    given: Mapping[str, Any],
) -> None:
    """Compares both forms once with each expert, whatever the tokens are: what chooses experts is fed."""
    names = [str(value.name) for value in routers]
    models = []
    for model, part in ((run.original, segment.original), (run.result, segment.result)):
        types = {str(value.name): value.type for value in routers}
        for value in [value for node in model.graph for value in node.outputs if value.name in types]:
            value.type = value.type or types[str(value.name)]
        outputs = [each for each in segment.result.outputs if each not in names]
        models.append(_form(run, model, Part([*part.inputs, *names], outputs)))
    first = run.exact[names[0]][0]
    experts, tokens = first.shape[-1], first.size // first.shape[-1]
    cases = list[dict[str, np.ndarray]]()
    for start in range(0, experts, tokens):
        order = (np.arange(tokens)[:, None] + start + np.arange(experts)) % experts  # the best one first
        logits = np.zeros((tokens, experts), np.float32)
        np.put_along_axis(logits, order, np.linspace(4, -4, experts, dtype=np.float32)[None, :], 1)
        shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        fed = {}
        for name in names:
            before = run.exact[name][0]
            is_share = bool((before >= 0).all() and (before <= 1).all())
            fed[name] = (shares if is_share else logits).reshape(before.shape).astype(before.dtype)
        cases.append(fed)
    original, result = models
    fed_original = [{**exact, **fed} for fed in cases]
    with _naming(segment.name, _DoesNotRun, "the original fails"):
        expected = sliced.run(original.clone(), fed_original, run.library)
    with _naming(segment.name, equivalence.NotEquivalent, "the result fails"):
        kinds = {str(value.name): value.dtype or ir.DataType.FLOAT for value in result.graph.inputs}
        narrow = [{name: weights.narrow(each, kinds[name]) for name, each in fed.items()} for fed in cases]
        found = sliced.run(result, [{**given, **fed} for fed in narrow], run.library)
    _check(run, segment.name, expected, found, _noise(run, segment.name, original, fed_original))
