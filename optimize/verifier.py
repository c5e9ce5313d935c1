"""Compares rewritten forms of a model with the original, and reverts the rewrite that changes a result.

A model of few weights is compared whole. One of more is cut into segments (`segments.py`); of each kind of
segment one is compared in the same way (`comparison.py`). When the result is written, all of its segments run
once more, one at a time (`stream.py`), and its weights are compared with the source's (`weight_check.py`).
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir

from twinop.deploy.ort_runs import NotRunnable
from twinop.errors import ExportError, TwinopError
from twinop.record.dimensions import expressions
from twinop.record.dtypes import dtype_name
from twinop.system.progress import Progress
from twinop.system.quiet import quiet

from . import decoders, equivalence, inputs, masks
from . import graph as g
from .comparison import DEFECT, UNKNOWN, Comparison
from .hidden import places, shown
from .inputs import draws_random, read_npz
from .segments import Part, Segment, cut, extract, is_shared
from .sliced import Chain, Runnable, run_any
from .source import Form, Source, form_of
from .stream import ONLY_16, rounded, stream
from .symbolic_shapes import infer_shapes, infer_types
from .weight_check import check_weights

Names = Sequence[str]
SMALL_MASKS = "masks of numbers such as -10000 stay as they are: they may not hide large scores"
_KEPT = 16  # kinds whose inputs are kept for the comparison in 16 bits; layers may be of as many kinds


def _part_of_both(original: ir.Model, segment: Segment) -> tuple[Part, list[str]]:
    """Returns the part of the original that computes a segment's result from what that reads, and values that
    the result reads and the part computes: the original alone may read a normalised sum, and the result the
    sum."""
    values = ir.convenience.create_value_mapping(original.graph, include_subgraphs=False)
    read = {values[name] for name in segment.result.inputs}
    given, computed = dict.fromkeys(segment.result.inputs), dict[str, None]()
    for name in segment.original.inputs:
        node = values[name].producer()
        if name in given or node is None or is_shared(values[name], read):
            continue
        computed |= dict.fromkeys(str(each.name) for each in node.outputs if each in read)
        makers = [each for each in node.inputs if each is not None and each.producer() is not None]
        given |= dict.fromkeys(str(each.name) for each in makers)
    inputs = [name for name in given if name not in computed]
    return Part(inputs, segment.result.outputs), [*computed]


class Verifier:
    """Compares what `apply`, which takes the names of passes, makes of the source with the source."""

    def __init__(
        self, source: Source, apply: Callable[[Names], g.RewriteContext], progress: Progress
    ) -> None:
        self.source, self.apply, self.progress = source, apply, progress
        self.opset = source.base.graph.opset_imports.get("")
        self.comparisons = dict[tuple[str, ...], Comparison]()
        self.accepted = dict[str, float]()  # the errors of kinds of segments in fp32
        self.known: equivalence.Reference | None = None  # inputs, and what segments have computed for them
        self.given: tuple[list[inputs.Case], inputs.Sizes] | None = None  # the user's inputs

    # --------------------------------------------------------------------------------- the original

    def run_original(self) -> inputs.Sizes:
        """Runs the original, if it is one segment; returns sizes of inputs that it accepts. ExportError: it
        does not run, or returns nothing that can be compared."""
        source, options = self.source, self.source.options
        if options.inputs_file is not None:
            self.given = read_npz(str(options.inputs_file), source.original, options.padding)
        if len(cut(source.loaded, source.loaded)) > 1:
            with quiet():  # values that cross have shapes; one that meets another in a sum may have size 1
                infer_types(source.original)
                infer_shapes(source.original, auto_merge=False)
            steps, _ = decoders.runs(source.original)
            self.sizes = self.given[1] if self.given else steps[0] if steps else inputs.SIZES[0]
            return self.sizes
        self.progress("running the original")
        is_file = source.is_fp32 and source.runs_as_file
        form = Form(source.path, {}) if is_file else source.form(source.original.clone())
        try:
            reference, sizes = self.reference(form.what, source.original)
        except (TwinopError, NotRunnable) as error:
            text = str(error)
            if not isinstance(form.what, Path):
                text = text.replace("the model: ", f"{source.path} (in fp32): ")
            if isinstance(error, NotRunnable):
                text = f"the original cannot be run on the CPU: {text}"
            raise ExportError(text) from error
        self.comparisons[()] = self._comparison(source.original.clone(), form, reference)
        equivalence.confirm_shapes(source.base, reference)
        return sizes

    def reference(self, original: Runnable, model: ir.Model) -> tuple[equivalence.Reference, inputs.Sizes]:
        """Runs the original from its inputs on: on the user's, else on generated ones."""
        padding = self.source.options.padding
        if self.given is None:
            found, sizes = equivalence.generated(original, model, padding, self._library)
        else:
            cases, sizes = self.given
            found = equivalence.reference(original, model, self._library, cases, inputs.hidden(padding))
        return self._placed(found, model), sizes

    def _placed(self, reference: equivalence.Reference, model: ir.Model) -> equivalence.Reference:
        """Returns a reference of which only what padding masks show is compared."""
        runs = reference.cases, reference.outputs
        return replace(reference, places=places(model, model.graph.outputs, self._masks, *runs))

    @property
    def _masks(self) -> list[str | None]:
        """The inputs that are known to hide padding: it was promised, or attentions hide it (`masks.py`)."""
        is_promised = self.source.options.padding == "right"
        given = filter(inputs.is_mask, self.source.base.graph.inputs)
        return [value.name for value in given if is_promised or inputs.PADDING in value.meta]

    @property
    def whole(self) -> Comparison | None:
        """The comparison of the whole model, if it is one segment."""
        return self.comparisons.get(())

    @property
    def _library(self) -> Sequence[Path] | None:
        return self.source.user_ops.libraries or None

    def _comparison(
        self, model: ir.Model, form: Form, reference: equivalence.Reference, part: Part | None = None
    ) -> Comparison:
        source, report = self.source, self.source.report
        report.add_note(f"the original: {reference.note}" if reference.note else "")
        results = {value.name for value in source.original.graph.outputs}
        is_inside = part is not None and results.isdisjoint(part.outputs)
        allowed = source.options.allow_uncompared or is_inside
        same = [] if is_inside else reference.unchanging(model.graph)
        for note in (*reference.skipped, *reference.uncompared(model.graph, allowed), *same):
            report.add_note(note)
        return Comparison(source, model, form, reference, part)

    def _comparison_of(self, segments: Sequence[Segment], again: bool = True) -> Comparison | None:
        """Returns the comparison of the last segment, or the whole model; `again`: also if it was forgotten.

        It takes generated inputs. Where these may have other sizes than the values have, or are no rows of a
        table that a segment reads, or belong together, so that it does not run on them or has nothing to
        compare, it takes what the segments before return for inputs of the whole model. It returns None where
        the original does not run: `stream` tries other inputs.
        """
        if not segments:
            return self.whole
        source, segment = self.source, segments[-1]
        part, computed = _part_of_both(source.original, segment)
        key = (*part.inputs, "", *part.outputs)
        known = self.comparisons.get(key)
        if known is not None and not (again and known.is_forgotten):
            return known
        self.progress(f"running the original: {segment.name}")
        model = extract(source.original, Part(part.inputs, [*part.outputs, *computed]))
        form, runs = source.form(model.clone()), False
        if not self._needs_values(part.inputs):
            with suppress(ExportError, NotRunnable):
                found, _ = equivalence.generated(form.what, model, source.options.padding, self._library)
                runs = not found.uncompared(model.graph)
        if not runs:
            try:
                found = self._on_values(form.what, model, segments[:-1], part.inputs)
            except (TwinopError, NotRunnable):
                source.report.add_note(f"{segment.name}: compared on typical inputs only")
                return None
        count = len(part.outputs)
        cases = [
            case | dict(zip(computed, outputs[count:], strict=True))
            for case, outputs in zip(found.cases, found.outputs, strict=True)
        ]
        outputs = [each[:count] for each in found.outputs]
        if computed:
            model = extract(source.original, part)
            form = source.form(model.clone())
        found = replace(found, cases=cases, outputs=outputs, sizes=found.sizes[:count])
        found = self._placed(found, model)
        self.comparisons[key] = self._comparison(model, form, found, part)
        return self.comparisons[key]

    def _needs_values(self, names: Iterable[str]) -> bool:
        """Whether values that cross have sizes that inputs do not name, or are rows of a large table."""
        graph = self.source.original.graph
        values = ir.convenience.create_value_mapping(graph, include_subgraphs=False)
        sizes = {dim for value in graph.inputs for dim in g.dims(value) or () if isinstance(dim, str)}
        shapes = [g.dims(values[name]) for name in names]
        dims = {dim for shape in shapes for dim in ([None] if shape is None else shape)}
        found = expressions(sizes | (others := {dim for dim in dims if isinstance(dim, str)} - sizes))
        is_sized = all(name in found and sizes.issuperset(found[name].names.values()) for name in others)
        return None in dims or not is_sized or any(is_shared(values[name], set(), True) for name in names)

    def _on_values(
        self, original: Runnable, model: ir.Model, segments: Sequence[Segment], names: Sequence[str]
    ) -> equivalence.Reference:
        """Runs a part of the original on what the segments before it compute for inputs of the whole model;
        they run once. `names`: what the part reads of it."""
        if not segments:
            return self.reference(original, model)[0]
        if self.known is None or not self.known.cases[0].keys() >= {*names}:
            try:
                self.known = self._computed(self.known, segments, names)
            except (TwinopError, NotRunnable):  # it needs other sizes
                if self.known is None:
                    raise
                self.known = self._computed(None, segments, names)
        known, count = self.known, self.known.typical
        names_of_edge = [f"{name} of the model" for name in known.edge]
        edge = dict(zip(names_of_edge, known.cases[count:], strict=True))
        found = equivalence.reference(original, model, self._library, known.cases[:count], (), edge)
        return replace(found, skipped=[*known.skipped, *found.skipped])

    def _computed(
        self, known: equivalence.Reference | None, segments: Sequence[Segment], names: Sequence[str]
    ) -> equivalence.Reference:
        """Returns cases of the whole model with what segments compute, among it values of these names."""
        original, before = self.source.original, {*known.cases[0]} if known is not None else set[str]()
        *parts, last = [
            each.original for each in segments
            if each is segments[-1] or not before.issuperset(each.original.outputs)
        ]  # fmt: skip
        missing = {*names}.difference(before, last.outputs, *(part.outputs for part in parts))
        parts.append(replace(last, outputs=[*last.outputs, *missing]))
        wanted = [*dict.fromkeys(name for part in parts for name in part.outputs)]
        chain = Chain([self.source.finished(extract(original, part)) for part in parts], wanted)
        if known is None:  # all of the model says what its inputs are
            whole = original.clone()
            whole.graph.meta.update(original.graph.meta)
            values = ir.convenience.create_value_mapping(whole.graph, include_subgraphs=False)
            whole.graph.outputs[:] = [values[name] for name in wanted]
            known, _ = self.reference(chain, whole)
        else:
            answer = run_any(chain, self._library, known.cases, required=known.typical)
            skipped = [*known.skipped, *equivalence.skip_notes(known.edge, answer, known.typical)]
            known = replace(known, outputs=answer.outputs, skipped=skipped)
        pairs = zip(known.cases, known.outputs, strict=True)
        cases = [case | dict(zip(wanted, found, strict=True)) if found else {} for case, found in pairs]
        return replace(known, cases=cases).without(lambda case: not case)

    def _kinds(
        self, result: ir.Model, segments: Sequence[Segment], unknown: Sequence[str] = ()
    ) -> Iterator[tuple[Sequence[Segment], ir.Model]]:
        """Yields the segments up to one of each kind, none of a whole model, and the part of the last one;
        `unknown`: weights whose segments are all compared."""
        if self.whole is not None:
            yield [], result.clone()
        kinds = set[str]()
        for index, segment in enumerate(segments):
            if segment.kind in kinds and not unknown:
                continue
            part = extract(result, segment.result)
            if segment.kind not in kinds or not part.graph.initializers.keys().isdisjoint(unknown):
                kinds.add(segment.kind)
                yield segments[: index + 1], part

    # ------------------------------------------------------------------------------ the form in fp32

    def verify(self, names: Names) -> tuple[Names, g.RewriteContext]:
        """Returns the passes that keep the results, and what they make; the report names the others."""
        kept = [*names]
        if self.whole is not None:  # it is known now which masks hide padding
            self.whole.reference = self._placed(self.whole.reference, self.source.original)
        while True:
            try:
                return kept, self._compared(kept)
            except equivalence.NotEquivalent as reason:
                small = {} if reason.rewrite else masks.forget_small(self.source.base.graph)
                if small:
                    with suppress(equivalence.NotEquivalent):
                        context = self._compared(kept)
                        self.source.report.add_note(SMALL_MASKS)
                        return kept, context
                for value, known in small.items():  # they are not the only cause
                    value.meta[masks.KNOWN] = known
                if len(kept) == len(names):
                    self._verify_unchanged()
                name = reason.rewrite or self.first_wrong(kept, self._error_of)
                self.source.report.reverted[name] = f"{reason}: {DEFECT if reason.rewrite else UNKNOWN}"
                kept.remove(name)

    def _compared(self, names: Names) -> g.RewriteContext:
        context = self.apply(names)
        self.source.report.error = self._error_of(context)
        return context

    def _error_of(self, context: g.RewriteContext) -> float:
        """Returns the error of a form in fp32; raises NotEquivalent if it fails, or that is too large."""
        largest, model = 0.0, context.model
        segments = [] if self.whole else cut(self.source.loaded, model)
        for before, part in self._kinds(model, segments):
            kind, label = (before[-1].kind, before[-1].name) if before else ("", "")
            error = self.accepted.get(kind)
            if error is None:
                if (comparison := self._comparison_of(before)) is None:
                    continue
                self.progress(f"comparing with the original{label and ': '}{label}")
                try:
                    error = comparison.check(self.source.form(part))
                except equivalence.NotEquivalent as reason:
                    raise reason.within(label) from reason
                if before:
                    self.accepted[kind] = error
                    if self.source.dtype is ir.DataType.FLOAT or len(self.accepted) > _KEPT:
                        comparison.forget()
            largest = max(largest, error)
        return largest

    def first_wrong(self, names: Names, check: Callable[[g.RewriteContext], object]) -> str:
        """Returns the pass with which `check` fails and without which it does not; it fails with all."""

        def fails(count: int) -> bool:
            try:
                check(self.apply(names[:count]))
            except equivalence.NotEquivalent:
                return True
            return False

        return names[bisect_left(range(1, len(names)), True, key=fails)]

    def _verify_unchanged(self) -> None:
        """Raises ExportError if the model without any rewrite differs: no rewrite is the cause."""
        try:
            self._error_of(self.apply([]))
        except equivalence.NotEquivalent as reason:
            base = self.source.base
            random = [node.op_type for node in base.graph.all_nodes() if draws_random(node)]
            opset, target = self.opset, base.graph.opset_imports.get("")
            if random:
                why = f"it draws random numbers ({random[0]}). Export it in eval mode, or without that node"
            elif opset != target:
                why = f"onnx converts opset {opset}, which may change it: export with {target}. Or {UNKNOWN}"
            else:
                why = UNKNOWN
            raise ExportError(f"the model without any rewrite {reason}: {why}") from None

    # ----------------------------------------------------------------------------- what was written

    def verify_written(self, path: Path, written: ir.Model) -> None:
        """Compares a file with the original, and completes the report; `written`: the file's model in the
        form that the CPU runs. NotEquivalent: it differs. ExportError: the original has no usable result in
        the file's dtype."""
        source, report = self.source, self.source.report
        segments, unknown = list[Segment](), list[str]()
        if self.whole is None:
            original = source.finished(source.loaded.clone())
            segments = cut(original, written)
            unknown = check_weights(original, written, segments, self.progress)
        narrow = None  # the original in the dtypes of the result
        if source.dtype is not ir.DataType.FLOAT:
            narrow = source.loaded if source.is_unconverted else source.base.clone()
            if narrow is not source.loaded:
                source.convert(narrow)
        errors, count, results = list[float](), 0, {value.name for value in source.original.graph.outputs}
        kinds = {report.dtype, *map(dtype_name, source.interface.values())}
        coarsest = max(kinds, key=equivalence.ACCEPTED.__getitem__)
        for before, part in self._kinds(written, segments, unknown):
            if (comparison := self._comparison_of(before, narrow is not None)) is None:
                continue
            label, count = before[-1].name if before else "", count + 1
            self.progress(f"comparing what was written{label and ': '}{label}")
            form = form_of(part)
            if not label and not source.is_changed:
                form = replace(form, what=path)
            try:
                if narrow is not None:
                    errors += self._check_16_bits(comparison, part, form, narrow)
                elif not label or comparison.last is None:  # else it was compared before, in fp32
                    errors.append(comparison.check(form, coarsest))
            except equivalence.NotEquivalent as reason:
                raise reason.within(label) from reason
            for value, place in zip(comparison.model.graph.outputs, comparison.reference.places, strict=True):
                if place is not None and value.name in results:
                    report.add_note(f"{value.name}: compared where {' and '.join(place[0])} shows tokens")
            if note := comparison.note:
                report.add_note(note if narrow is not None else f"the new file: {note}")
            if before:
                comparison.forget()
        report.error = max(errors, default=report.error)
        if segments:
            self._run_segments(segments, original, written)
            what = "segments on a prompt and a step" if decoders.run_sizes(original) else "segments"
            report.compared = {
                "kinds of segments with generated and edge inputs": count,
                what: len(segments),
                "bytes of weights": sum(each.nbytes for each in g.tensors(written)),
            }

    def _run_segments(self, segments: Sequence[Segment], original: ir.Model, written: ir.Model) -> None:
        """Runs all segments of a file, one at a time."""
        report, known = self.source.report, self.source.original
        values = [*known.graph.outputs, *(value for node in known.graph for value in node.outputs)]
        found = dict(zip((value.name for value in values), places(known, values, self._masks), strict=True))
        try:
            streamed = stream(
                segments, original, written, self._library, report.dtype, self.given[0] if self.given else (),
                lambda index, count: self.progress("running all segments", index, count),
                lambda name, case, value: shown(value, case, found.get(name)),
            )  # fmt: skip
        except NotRunnable as error:
            raise ExportError(f"it cannot be run on the CPU: {error}") from error
        report.error = max(report.error, streamed.error)
        for note in streamed.notes:
            report.add_note(note)
        if report.own_error is not None:
            report.own_error = max(report.own_error, streamed.own_noise)

    def _check_16_bits(
        self, comparison: Comparison, part: ir.Model, form: Form, narrow: ir.Model
    ) -> list[float]:
        """Compares a part in 16 bits, as it runs, with the original; returns the error, if the CPU runs it.
        Nodes that only exist in 16 bits are also compared where the CPU has no others in bfloat16."""
        source, report = self.source, self.source.report
        is_whole = comparison.part is None
        try:
            plain = extract(narrow, comparison.part) if comparison.part else narrow.clone()
        except KeyError:  # preparing the model has removed a value
            plain = None
        plain_form = None if plain is None else source.form(plain.clone())
        if plain_form is not None and is_whole and source.is_unconverted and source.runs_as_file:
            plain_form = replace(plain_form, what=source.path)
        error = comparison.check_16_bits(form, plain, plain_form)
        if error is None and plain is not None and any(node.op_type in ONLY_16 for node in part.graph):
            note, forms = comparison.note, [rounded(each.clone(), source.dtype) for each in (part, plain)]
            error = comparison.check_16_bits(form_of(forms[0]), plain, source.form(forms[1]))
            note = note.replace("its fp32 form", f"its fp32 form, with results in {report.dtype}")
            comparison.note = comparison.note or note
        if comparison.own_error is not None:
            report.own_error = max(report.own_error or 0.0, comparison.own_error)
        return [] if error is None else [error]
