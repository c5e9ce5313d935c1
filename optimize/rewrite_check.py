"""Applies rewrites to a model and compares the results with the original."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import inf
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from onnx_ir.passes.common import (
    CommonSubexpressionEliminationPass,
    LiftConstantsToInitializersPass,
    NameFixPass,
)

import twinop
from twinop.deploy.cuda import obstacles
from twinop.deploy.ort_runs import NotRunnable, has_wrong_types, run
from twinop.deploy.tensor_specs import RIGHT_PADDED
from twinop.errors import ExportError, TwinopError, option
from twinop.library import Library
from twinop.model.attach import attach_to_calls
from twinop.model.calls import find_calls, paths_in_use
from twinop.model.files import EXTERNAL_DATA_BYTES, save
from twinop.model.folding import restore_defaults, take_defaults
from twinop.model.weights import narrow
from twinop.op_spec import OpSpec
from twinop.progress import Progress
from twinop.quiet import quiet
from twinop.tolerance import LOST, NOISE

from . import (
    branches,
    cached_attention,
    decoders,
    equivalence,
    growing_caches,
    inputs,
    invariance,
    masks,
    measure,
    normed_products,
    passes,
    precision,
    quantised,
)
from . import graph as g
from .inputs import MASK, acts_as_mask, draws_random, hides_left, read_npz
from .load import load
from .own_ops import OwnOps
from .prepare import clean, prepare
from .report import OptimizeReport
from .symbolic_shapes import infer_types
from .unfuse_ort import split_simplified_norms

Rewrites = Mapping[str, type[passes.Rewrite]]
_FP32 = "fp32"  # the folder of the rewritten model
_NEAR = 4.0  # times the accepted error: sums in another order may have as much
_SMALL = 1e-6  # a change of numbers that no result should hang on
_OF_SIZES = 1e-2  # an error of broadcasting is larger


class RewriteCheck:
    """A model in fp32, the inputs for the comparison, and the original's outputs for them."""

    def __init__(
        self,
        model: ir.Model,
        original: Path | None,
        unchanged: Path | None,
        interface: Mapping[str, ir.DataType],
        keeps_fp32: bool,
        is_changed: bool,
        folder: Path,
        records: Mapping[str, OpSpec],
        report: OptimizeReport,
        padding: str | None,
        own: OwnOps,
        progress: Progress,
    ) -> None:
        """Saves the original in fp32, unless it is in such a file.

        Args:
            model: the original in fp32; `make_cases` prepares it in place.
            original: the original's file, if that is in fp32.
            unchanged: the original's file, if the result has the same dtypes.
            interface: the dtypes of inputs and outputs that do not get the report's dtype, by name.
            keeps_fp32: what the file computes in fp32 stays in fp32: no dtype was asked for.
            is_changed: the model is not what the original's file computes on the CPU (`decoders.py`).
            folder: where files are written.
            own: the user's own ops, and the libraries of all runs.
        """
        self.unchanged, self.interface, self.is_changed = unchanged, interface, is_changed
        self.folder, self.records, self.report, self.padding = folder, records, report, padding
        self.keeps_fp32 = keeps_fp32
        self.own, self.library, self.progress = own, own.libraries or None, progress
        self.dtype = precision.DTYPES.get(report.dtype, ir.DataType.FLOAT)
        self.converts = {self.dtype, *interface.values()} != {ir.DataType.FLOAT}
        self.defaults: Mapping[str, ir.TensorProtocol] = {}  # of inputs, while rewrites run
        self.original = original or self._save(model.clone(), "original.onnx", checks=False)[-1]
        self.broadcasts = False  # axes of one name: `RewriteContext.broadcasts`
        self.acting = set[str]()  # the rewrites that changed something
        self.registered: Sequence[Library] = []  # the libraries of the last run
        self.written: tuple[ir.Model, list[Path]] | None = None  # the last model in fp32, and its files
        self.base, self.opset = model, model.graph.opset_imports.get("")

    def make_cases(self, inputs_file: str | os.PathLike[str] | None, allow_uncompared: bool) -> None:
        """Runs the original on the given inputs, or on generated ones, and prepares the model.

        Raises:
            ExportError: the original does not run, or returns nothing that can be compared.
        """
        self.progress("running the original")
        try:
            if inputs_file is not None:
                usual, sizes = read_npz(os.fspath(inputs_file), self.base, self.padding)
                hidden = inputs.hidden(self.padding)
                self.reference = equivalence.reference(self.original, self.base, self.library, usual, hidden)
            else:
                found = equivalence.generated(self.original, self.base, self.padding, self.library)
                self.reference, sizes = found
        except (TwinopError, NotRunnable) as error:
            text = str(error)
            if self.original != self.report.source:  # a file that the user does not know
                text = text.replace(str(self.original), f"{self.report.source} (in fp32)")
            if isinstance(error, NotRunnable):
                text = f"the original cannot be run on the CPU: {text}"
            raise ExportError(text) from error
        self.report.notes += [f"the original: {note}"] if (note := self.reference.note) else []
        self.report.notes += self.reference.uncompared(self.base.graph, allow_uncompared)
        self.unprepared, self.noise = self.base.clone(), cache(self._noise)
        self.of_size_1 = inputs.of_size_1(self.base, self.reference.cases[0])
        self.with_size_1 = dict(zip(self.of_size_1, self._run_of_size_1(self.original), strict=True))
        equivalence.confirm_shapes(self.base, self.reference)
        self.defaults = take_defaults(self.base.graph)
        self.progress("folding constants, inferring shapes")
        prepare(self.base, {**self.records, **self.own.records})
        for value in filter(acts_as_mask, self.base.graph.inputs):
            value.meta[MASK] = True
        context = g.RewriteContext(self.base, self.report.device, self.records)
        masks.classify(context, sizes, self.padding)

    def _noise(self, by: float = equivalence.LAST_BITS) -> equivalence.Errors:
        self.progress("comparing the original with itself")
        nudged = self._save(
            equivalence.nudge_weights(self.unprepared.clone(), by), "nudged.onnx", checks=False
        )[-1]
        return equivalence.noise(nudged, self.library, self.reference, by)

    def apply(self, rewrites: Rewrites) -> g.RewriteContext:
        """Applies rewrites to a copy of the model; raises NotEquivalent if one of them fails."""
        context = g.RewriteContext(
            self.base.clone(), self.report.device, self.records, broadcasts=self.broadcasts
        )
        try:
            self.acting |= passes.apply_passes(context, rewrites.values(), self.progress)
        except passes.RewriteError as failure:
            raise equivalence.NotEquivalent(str(failure), failure.name) from failure
        CommonSubexpressionEliminationPass()(context.model)
        LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(context.model)
        clean(context.model)
        g.share_constants(context.graph)
        if masks_shown := {str(shown.name) for lengths, shown in context.lengths.items() if lengths.uses()}:
            [context.model.metadata_props[RIGHT_PADDED]] = masks_shown
        return context

    def verify(self, rewrites: Rewrites) -> tuple[Rewrites, g.RewriteContext]:
        """Returns the rewrites that keep the results, and the model with them; reports the others."""
        kept = dict(rewrites)
        while True:
            try:
                context = self.apply(kept)
                self.report.error = self._verify_fp32(context.model)
                return kept, self._broadcasting(kept, context)
            except equivalence.NotEquivalent as reason:
                why = self._cause(reason)
                if len(kept) == len(rewrites):
                    self._verify_unchanged()
                name = reason.rewrite or self._first_wrong(kept)
                self.report.reverted[name] = f"{reason}: {why}"
                del kept[name]

    def _broadcasting(self, rewrites: Rewrites, context: g.RewriteContext) -> g.RewriteContext:
        """Returns the model, or one that broadcasts axes of one name if the original does and it does not."""
        failing = self._failing_sizes()
        if failing:
            self.broadcasts, plain = True, context
            try:
                context = self.apply(rewrites)
                self.report.error = self._verify_fp32(context.model)
                still = self._failing_sizes()
            except equivalence.NotEquivalent:
                still = failing
            if len(still) < len(failing):
                failing = still
            else:
                self.broadcasts, context = False, plain
                self.report.error = self._verify_fp32(context.model)
        if failing:
            self.report.notes.append(
                f"it may fail for {', '.join(failing)}, which the original broadcasts: axes of one name must "
                "have one size"
            )
        return context

    def _failing_sizes(self) -> list[str]:
        """Returns for which of `of_size_1` the last model that ran fails, and the original does not."""
        if not any(self.with_size_1.values()) or self.written is None:
            return []
        pairs = zip(self.with_size_1.items(), self._run_of_size_1(self.written[1][-1]), strict=True)
        return [
            name
            for (name, own), found in pairs
            if own and (not found or max(map(equivalence.relative_error, own, found)) > _OF_SIZES)
        ]

    def _run_of_size_1(self, path: Path) -> equivalence.Outputs:
        """Returns the outputs for `of_size_1`, none where a run fails.

        ONNX Runtime's own optimizations, which take names for sizes, are off.
        """
        try:
            cases = [*self.of_size_1.values()]
            return run(path, self.library, cases, required=0, optimize=False).outputs if cases else []
        except (NotRunnable, TwinopError):
            return [[] for _ in self.of_size_1]

    def _verify_unchanged(self) -> None:
        """Raises ExportError if the model without any rewrite differs: no rewrite is the cause."""
        try:
            self._verify_fp32(self.apply({}).model)
        except equivalence.NotEquivalent as reason:
            random = [node.op_type for node in self.base.graph.all_nodes() if draws_random(node)]
            opset, target = self.opset, self.base.graph.opset_imports.get("")
            if random:
                why = f"it draws random numbers ({random[0]}). Export it in eval mode, or without that node"
            elif opset != target:
                why = f"onnx's conversion of opset {opset} changes it. Export it with opset {target}"
            else:
                why = self._cause(reason)
            raise ExportError(f"the model without any rewrite {reason}: {why}") from None

    def _cause(self, reason: equivalence.NotEquivalent) -> str:
        """Returns why the last model that ran is not equivalent: a defect of twinop where nothing else is."""
        defect, runtime = "this is a defect of twinop, please report it", f"ONNX Runtime {ort.__version__}"
        if reason.rewrite or self.written is None:
            return defect
        if reason.place is not None:
            index, output = reason.place
            others, outputs = f"Give other inputs with {option('inputs_file')}", self.reference.outputs[index]
            if reason.error <= _NEAR * reason.accepted:
                return f"so little may be rounding. {others}"
            for by, text in (
                (0.0, f"another run of the original in {runtime}, or one without its optimizations, differs"),
                (_SMALL, f"the original itself does where its numbers change by {_SMALL:.0e}"),
            ):
                own = self.noise(by)[index][output]
                if not own <= LOST or own * NOISE >= reason.error:
                    return f"{text}. {others if by else 'Try a newer one'}"
            if equivalence.numbers_for_nan(outputs[output], self.found[index][output], reason.accepted):
                return f"only where the original is NaN, as for rows that a mask hides. {others}"
        try:
            found = run(self.written[1][-1], self.library, self.reference.cases, optimize=False).outputs
            self.reference.check(self.reference.errors(found), self.noise, "float32")
        except (equivalence.NotEquivalent, NotRunnable, TwinopError):
            return defect
        return f"{runtime} breaks it with its own optimizations. Try a newer one"

    def _first_wrong(self, rewrites: Rewrites) -> str:
        """Returns the first rewrite that changes the results."""
        names = list(rewrites)
        for count in range(1, len(names)):
            try:
                self._verify_fp32(self.apply({name: rewrites[name] for name in names[:count]}).model)
            except equivalence.NotEquivalent:
                return names[count - 1]
        return names[-1]

    def _verify_fp32(self, model: ir.Model) -> float:
        """Returns the error of a model in fp32; raises NotEquivalent if it fails, or that is too large."""
        self.progress("comparing with the original")
        try:
            (self.folder / _FP32).mkdir(exist_ok=True)
            path = f"{_FP32}/{self.report.path.name}"  # its name in the end: it may be the result
            self.written = model, self._write(model.clone(), path)
            may_skip = bool(self.reference.note)  # else a rewrite is the cause
            answer = run(self.written[1][-1], self.library, self.reference.cases, may_skip=may_skip)
            self.found, self.registered, self.note = answer.outputs, answer.libraries, answer.note
        except NotRunnable as reason:
            raise equivalence.NotEquivalent(f"cannot be run on the CPU: {reason}") from reason
        except TwinopError as failure:
            raise equivalence.NotEquivalent(f"fails: {failure}") from failure
        return self.reference.check(self.reference.errors(self.found), self.noise, "float32")

    def _write(self, model: ir.Model, name: str, checks: bool = True) -> list[Path]:
        """Attaches the function bodies and writes a model."""
        NameFixPass()(model)  # a cloned graph does not know which names are taken
        calls = find_calls(model, self.records)
        attach_to_calls(model, calls, allow_missing=True)
        with quiet():
            infer_types(model)
        model.metadata_props["twinop.version"] = twinop.__version__
        model.metadata_props.update({record.metadata_key: record.schema_hash for record in calls})
        return self._save(model, name, checks)

    def _save(self, model: ir.Model, name: str, checks: bool = True) -> list[Path]:
        branches.move_back(model)
        kinds = {str(value.name): value.dtype for value in model.graph.inputs}
        defaults = {
            each: ir.tensor(narrow(tensor.numpy(), kind), dtype=kind, name=each)
            if (kind := kinds[each]) is not None and kind is not tensor.dtype
            else tensor
            for each, tensor in self.defaults.items()
        }
        restore_defaults(model.graph, defaults)
        return save(self.own.attach(model), self.folder / name, EXTERNAL_DATA_BYTES, checks)

    def drop_slow(self, rewrites: Rewrites, path: Path) -> measure.Measured:
        """Measures the source and the result in `path`, where this machine has the device."""
        report, case = self.report, self.reference.cases[0]
        if report.device == "cuda" and (reasons := obstacles(0, [])):
            return measure.Measured(untimed=reasons[0])

        def write(names: Sequence[str], folder: Path) -> Path:
            context = self.apply({name: rewrites[name] for name in names})
            return self._write_converted(context, f"{folder.name}/model")

        self.progress("measuring")
        report.timed_shape = next((array.shape for array in case.values()), ())
        clock = measure.Stopwatch(case, report.device, self.library)
        names = [name for name in rewrites if name in self.acting]
        return measure.drop_slow(report.source, path, names, write, clock, self.folder, self.progress)

    def _write_converted(self, context: g.RewriteContext, name: str) -> Path:
        model = context.model.clone()
        self._convert(model)
        self._pack(g.RewriteContext(model, self.report.device, self.records))
        self._undo_changes(model)
        return self._write(model, f"{name}.onnx")[-1]

    def _convert(self, model: ir.Model) -> tuple[int, list[str]]:
        """Converts a model to the wanted dtypes; see `precision.convert`."""
        if not self.converts:
            return 0, []
        return precision.convert(model, self.dtype, self.interface, self.own, self.keeps_fp32)

    def finish(self, best: tuple[Rewrites, g.RewriteContext], name: str) -> Sequence[Path]:
        """Converts the model, compares it again, writes it and completes the report.

        Raises:
            ExportError: the error of the model in 16 bits is too large.
        """
        context, report = best[1], self.report
        report.fused, report.skipped = passes.counts(context)
        if not report.fused and self.unchanged is not None:
            report.nodes_after, report.same = report.nodes_before, True
            model = load(self.unchanged)
            split_simplified_norms(model)
            equivalence.confirm_shapes(model, self.reference)
            report.libraries = paths_in_use(model, self.registered)
            return save(model, self.folder / name, EXTERNAL_DATA_BYTES)
        report.notes += [f"the new file: {self.note}"] if self.note else []
        model = context.model
        report.inlined, report.libraries = self.own.inlined, paths_in_use(model, self.registered)
        wide, report.narrowed = self._convert(model)
        if wide:
            report.notes.append(f"{wide} nodes compute in fp32")
        late = replace(context, made=context.made.copy(), left=context.left.copy())
        self._pack(late)
        report.fused, report.skipped = passes.counts(late)
        if any(lengths.uses() for lengths in context.lengths):
            mask = model.metadata_props[RIGHT_PADDED]
            report.notes.append(
                f"{option('padding', 'right')} promised that {mask} hides nothing but the end of each "
                "sequence"
            )
        self.progress("writing and checking")
        if self.written and self.written[0] is model and not self.converts:
            files, self.written = self.written[1], None
        else:
            files = self._write(model, name)
        report.nodes_after = len([*model.graph.all_nodes()])
        kinds = Counter(node.op_type for node in model.graph.all_nodes() if node.domain == g.MICROSOFT)
        report.needs = [f"{g.MICROSOFT} {kind} x {count}" for kind, count in sorted(kinds.items())]
        report.needs += ["1.23 for Attention"] if growing_caches.FUSED in report.fused else []
        if report.dtype in precision.DTYPES:
            self._compare_16_bits(files[-1])
        if self._undo_changes(model):
            files, report.nodes_after = self._write(model, name), len([*model.graph.all_nodes()])
        return files

    def _pack(self, context: g.RewriteContext) -> None:
        """Replaces products of quantised weights, which only exist in 16 bits."""
        if context.device != "cuda":
            return
        if self.report.dtype not in precision.DTYPES:
            for kind in (quantised.PRODUCT, decoders.ATTENTION):
                reason = f"{self.report.dtype}; twinop's kernel is for 16 bits ({option('dtype', 'float16')})"
                context.left[f"{kind}: {reason}"] += len(context.nodes(kind, domain=g.MICROSOFT))
        else:
            quantised.rewrite(context)
            normed_products.rewrite(context)
            invariance.rewrite(context)
            clean(context.model)
            g.share_constants(context.graph)

    def _undo_changes(self, model: ir.Model) -> int:
        """Gives nodes the form back that the device has and the comparison cannot use; returns how many."""
        is_wanted = self.is_changed and self.report.device == "cuda"
        nodes = [node for node in model.graph if is_wanted and node.op_type == decoders.ATTENTION]
        return decoders.restore_precision(model) + sum(map(cached_attention.join_norms, nodes))

    def _compare_16_bits(self, path: Path) -> None:
        """Compares the model in 16 bits, and the original converted to 16 bits, with the original in fp32."""
        report = self.report
        # The result of a row of which a mask hides everything is the mean of all values only if the mask's
        # lowest number absorbs every score, as in fp32. The comparison in fp32 has these cases.
        reference = self.reference.without(hides_left)
        if not reference.cases:
            report.notes.append(
                "compared in its fp32 form: all inputs have a mask that hides the first token"
            )
            return
        reference = equivalence.with_ids(self.original, self.unprepared, self.library, reference)
        try:
            errors = self._errors_in(path, reference)
        except NotRunnable as refused:
            report.notes.append(f"compared in its fp32 form: {refused}")
            return
        except TwinopError as failure:
            reason = str(failure).splitlines()[0].rpartition("Type Error: ")[2].rstrip(".")
            raise ExportError(
                f"{option('dtype', report.dtype)}: the dtypes of some values are not known, so they could "
                f"not be converted ({reason}). Leave out {option('dtype')}, or declare these values "
                "(value_info)"
            ) from failure
        noise = [
            [inf if index >= reference.usual else 0.0 for _ in row]
            for index, row in enumerate(reference.outputs)
        ]
        try:
            plain = self.unchanged
            if plain is None or self.is_changed:
                model = self.base.clone()
                self._convert(model)
                plain = self._write(model, "plain.onnx")[-1]
            # Without graph optimisations the CPU rounds each result to 16 bits, as torch does.
            runs = [self._errors_in(plain, reference, optimize) for optimize in (True, False)]
            noise = equivalence.largest_of(runs)
            report.own_error = reference.largest(noise)
        except (NotRunnable, TwinopError):
            report.own_error = None
        for index in self._overflowing(reference, errors):
            noise[index] = [inf] * len(noise[index])
        self._require_fitting(noise, reference)
        report.error = reference.largest(errors)
        try:
            reference.check(errors, lambda: noise, report.dtype)
        except equivalence.NotEquivalent as reason:
            acting = ", ".join(sorted(self.acting)) or "all"
            raise ExportError(
                f"the model in {report.dtype} {reason}. Leave rewrites out with {option('without')} (these "
                f"act: {acting}), or keep its dtype"
            ) from None

    def _require_fitting(self, noise: equivalence.Errors, reference: equivalence.Reference) -> None:
        """Raises ExportError if the original has no usable result in 16 bits, also for some ids only."""
        own, where, usual = self.report.own_error or 0.0, "", reference.usual
        if own <= LOST and self.report.own_error is not None and not self.keeps_fp32:
            for name, row in zip(reference.special, noise[usual:], strict=True):
                if name.startswith(equivalence.IDS) and max(row, default=0.0) > own:
                    own, where = max(row), f" for {name}"
        if own > LOST:
            raise ExportError(
                f"the original in {self.report.dtype} has a relative error of {own:.1e}{where}: its numbers "
                "do not fit. Keep float32, or give the other of float16 and bfloat16"
            )

    def _overflowing(self, reference: equivalence.Reference, errors: equivalence.Errors) -> list[int]:
        """Returns the special cases that make numbers inside the original too large for fp16.

        Usual ones do not.

        ONNX Runtime computes much of it in fp32 on the CPU, where these do not show in the outputs. Only
        cases of ids, and those with errors, are looked at.
        """
        indices = [
            index
            for index, name in enumerate(reference.special, reference.usual)
            if max(errors[index], default=0.0) > equivalence.ACCEPTED[self.report.dtype]
            or (name.startswith(equivalence.IDS) and not self.keeps_fp32)
        ]
        if self.dtype is not ir.DataType.FLOAT16 or not indices:
            return []
        model = self.base.clone()
        self._convert(model)
        infer_types(model)
        inner = [value for node in model.graph for value in node.outputs if value.dtype is self.dtype]
        model.graph.outputs.clear()
        for value in inner:
            if isinstance(value.type, ir.TensorType):
                wide = ir.node("Cast", [value], {"to": ir.DataType.FLOAT})
                size = ir.node("Abs", wide.outputs)
                largest = ir.node("ReduceMax", size.outputs, {"keepdims": 0})
                largest.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
                largest.outputs[0].shape = ir.Shape([])
                model.graph.extend([wide, size, largest])
                model.graph.outputs.append(largest.outputs[0])
        path = self._write(model, "inside.onnx", checks=False)[-1]
        cases = self._narrowed([reference.cases[index] for index in (0, *indices)])
        try:
            usual, *found = np.array(run(path, self.library, cases, optimize=False).outputs)
        except (NotRunnable, TwinopError):
            return []
        most = float(self.dtype.max)
        overflows = [bool(((usual <= most) & ~(large <= most)).any()) for large in found]
        return [index for index, each in zip(indices, overflows, strict=True) if each]

    def _narrowed(self, cases: Sequence[Mapping[str, np.ndarray]]) -> list[equivalence.Case]:
        """Returns inputs in the dtypes of the result."""
        return [
            {
                n: narrow(a, self.interface.get(n, self.dtype)) if a.dtype == np.float32 else a
                for n, a in case.items()
            }
            for case in cases
        ]

    def _errors_in(
        self, path: Path, reference: equivalence.Reference, optimize: bool = True
    ) -> equivalence.Errors:
        """Returns the errors of a model in 16 bits."""
        try:
            found = run(path, self.library, self._narrowed(reference.cases), optimize=optimize).outputs
        except TwinopError as error:
            if has_wrong_types(error):
                raise
            raise NotRunnable(str(error).splitlines()[0]) from error
        return reference.errors(found, self.dtype)
