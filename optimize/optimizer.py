"""Optimises an ONNX file: load, prepare, rewrite, convert, write, verify, publish."""

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

import onnx_ir as ir
from onnx_ir.passes.common import CommonSubexpressionEliminationPass, LiftConstantsToInitializersPass

from twinop import deploy
from twinop.deploy.cuda import has_gpu, unavailable_reasons
from twinop.deploy.ort_process import SERVER, time_limit
from twinop.deploy.ort_runs import NotRunnable, run
from twinop.deploy.tensor_specs import RIGHT_PADDED
from twinop.errors import ExportError, TwinopError, option
from twinop.model.files import EXTERNAL_DATA_BYTES, save, work_folder
from twinop.model.folding import take_defaults
from twinop.record.op_spec import OpSpec
from twinop.system.progress import Progress, silent
from twinop.system.publish import publish
from twinop.system.quiet import silent_loggers

from . import (
    cached_attention,
    decoders,
    equivalence,
    float8,
    growing_caches,
    inputs,
    linear_fp8,
    masks,
    measure,
    passes,
    precision,
    quantised,
    unfuse_ort,
)
from . import graph as g
from .estimate import Estimate, estimate
from .load import Held, load, reopen
from .prepare import clean, prepare
from .report import Float8, OptimizeReport
from .rewrite import fused, skip, skipped
from .source import DEVICES, FLOAT8, Options, Source, read_source
from .verifier import Verifier


def optimize(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    device: str | None = None,
    padding: str | None = None,
    shared_caches: bool = False,
    invariant: bool = False,
    inputs_file: str | os.PathLike[str] | None = None,
    without: Sequence[str] = (),
    allow_uncompared: bool = False,
    drop_slow: bool = False,
    rows: int = 2048,
    max_error: float = 0.25,
    library: deploy.Libraries = None,
    allow_model_libraries: bool = False,
    kept: Iterable[OpSpec] = (),
    held: Held = MappingProxyType({}),
    dry_run: bool = False,
    explain: str | None = None,
    timeout: float = 600,
    progress: Progress = silent,
) -> OptimizeReport:
    """Optimises an ONNX file, and keeps the result only if it computes what the original computes.

    The result is compared with the original on the CPU, and a rewrite that changes the results is reverted.
    With `dtype="float8"` this holds of the file in 16 bits, whose matmuls then get 8 bits (`float8.py`).
    No time decides what is written, unless `drop_slow` asks. The weights stay in their files until they are
    written: the memory that it takes depends on the largest layer.

    Args:
        source, target: the ONNX file to optimise, and the one to write.
        dry_run: write nothing; the report has the rewrites, and an estimate of memory and disk.
        explain: the name of a node or of its output: the report says which condition failed in each rewrite
            that starts there, and nothing is written.
        timeout: the seconds that a model may run without progress, before it is ended.
        progress: called at each step, and while it goes on.
        kept, held: and the others are those of `source.Options`, which describes them.

    Raises:
        ExportError: wrong arguments, or a model that cannot be read, run or converted.
    """
    of_cuda = device is None and (invariant or dtype == FLOAT8)
    options = Options(
        dtype, chosen_device("cuda" if of_cuda else device), padding, shared_caches, invariant, inputs_file,
        without, allow_uncompared, drop_slow, library, allow_model_libraries, kept, held, rows,
        max_error,
    )  # fmt: skip
    with time_limit(timeout), silent_loggers():
        return _optimized(Path(source), Path(target), options, dry_run, explain, progress)


def _optimized(
    source: Path, target: Path, options: Options, dry_run: bool, explain: str | None, progress: Progress
) -> OptimizeReport:
    progress("reading the model")
    SERVER.start("twinop.model.weights")  # it imports ONNX Runtime, and what models name, meanwhile
    read = read_source(source, target, options)
    verifier = Verifier(read, partial(_rewritten, read, progress), progress)
    needs = estimate(read.loaded, read.report.path, read.report.dtype if options.dtype else "")
    if options.dtype == FLOAT8:  # the file in 16 bits lies beside it meanwhile
        needs = replace(needs, disk=needs.disk * 2)
    is_tried = dry_run or explain is not None
    if not is_tried:
        needs.require(read.path, read.report.path)
    _prepare(verifier)
    if is_tried:
        return _tried(verifier, needs, explain)
    with work_folder(read.report.path) as folder:
        files = _write_verified(verifier, folder)
        if options.dtype == FLOAT8:
            files = float8.quantize(verifier, files, folder)
        read.report.bytes_after = sum(map(os.path.getsize, files))
        publish(files, read.report.path)
    return read.report


def _tried(verifier: Verifier, needs: Estimate, explain: str | None) -> OptimizeReport:
    """Rewrites and converts the model, or explains the rewrites at a node, and writes nothing."""
    source, report = verifier.source, verifier.source.report
    chosen = passes.chosen(report.device, report.dtype, source.options.without)
    if explain is not None:
        context = g.RewriteContext(source.base.clone(), report.device, source.records)
        report.explained = passes.explain(context, explain, chosen)
        return report
    try:
        model = _converted(source, verifier.apply([each.name for each in chosen]))
    except equivalence.NotEquivalent as reason:
        raise ExportError(
            f"{option('without', reason.rewrite)}: leave this rewrite out, it {reason}"
        ) from reason
    if source.options.dtype == FLOAT8:
        names, kept = float8.matmuls(model, source.options.rows)
        report.float8 = Float8(dict.fromkeys(names, 0.0), kept=kept)
    report.estimate = str(needs)
    return report


def _prepare(verifier: Verifier) -> None:
    """Runs the original, and brings its form in fp32 into the form that the rewrites match."""
    sizes = verifier.run_original()
    verifier.progress("folding constants, inferring shapes")
    source, base = verifier.source, verifier.source.base
    source.defaults = take_defaults(base.graph)
    prepare(base, {**source.records, **source.user_ops.records})
    for value in filter(inputs.acts_as_mask, base.graph.inputs):
        value.meta[inputs.MASK] = True
    context = g.RewriteContext(base, source.report.device, source.records)
    masks.classify(context, sizes, source.options.padding)


def _rewritten(source: Source, progress: Progress, names: Sequence[str]) -> g.RewriteContext:
    """Applies rewrites to a copy of the model; raises NotEquivalent if one of them fails."""
    report = source.report
    context = g.RewriteContext(source.base.clone(), report.device, source.records)
    chosen = [each for each in passes.chosen(report.device, report.dtype) if each.name in names]
    context.acting = passes.apply_passes(context, chosen, progress)
    CommonSubexpressionEliminationPass()(context.model)
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(context.model)
    clean(context.model)
    g.share_constants(context.graph)
    if report.device == "cuda" and report.dtype not in precision.DTYPES:
        reason = f"{report.dtype}; twinop's kernel is for 16 bits ({option('dtype', 'float16')})"
        nodes = context.nodes(quantised.MATMUL_NBITS, decoders.ATTENTION, domain=g.MICROSOFT)
        nodes += [each for each in context.nodes("DequantizeLinear") if linear_fp8.is_weight(each.outputs[0])]
        for node in nodes:
            skip(node, "dtype", f"{node.op_type}: {reason}")
    lengths = context.lengths.items()
    if masks_shown := context.promised | {str(shown.name) for each, shown in lengths if each.uses()}:
        [context.model.metadata_props[RIGHT_PADDED]] = masks_shown
    return context


def _write_verified(verifier: Verifier, folder: Path) -> list[Path]:
    """Rewrites, converts and writes the model, and compares the file; returns its files, the model last.
    ExportError: what was written is not what the original computes."""
    report, options = verifier.source.report, verifier.source.options
    chosen = passes.chosen(report.device, report.dtype, options.without)
    names, context = verifier.verify([each.name for each in chosen])
    notes = [*report.notes]
    names, files = _write(verifier, names, context, folder)
    if options.drop_slow and not report.same:
        acting = [name for name in names if name in context.acting]
        measured = _measured(verifier, acting, files[-1], folder)
        if measured.slow:
            report.notes, report.reverted = notes, report.reverted | measured.slow
            names, context = verifier.verify([name for name in names if name not in measured.slow])
            _, files = _write(verifier, names, context, folder)
            measured = _measured(verifier, (), files[-1], folder)
        report.times, report.untimed = measured.times, measured.untimed
    return files


def _write(
    verifier: Verifier, names: Sequence[str], context: g.RewriteContext, folder: Path
) -> tuple[Sequence[str], list[Path]]:
    """Converts a rewritten model, writes it and compares the file with the original. A rewrite that only
    fails there is reverted. Returns the rewrites that are kept, and the files; ExportError: it also fails
    without."""
    source, report, notes = verifier.source, verifier.source.report, [*verifier.source.report.notes]
    acting = [name for name in names if name in context.acting]

    def written(context: g.RewriteContext) -> list[Path]:
        report.notes, report.fused, report.skipped = [*notes], fused(context.model), skipped(context.model)
        report.same = not report.fused and source.is_unconverted
        if report.same:
            return _write_original(verifier, folder)
        model, path = _converted(source, context), folder / report.path.name
        verifier.progress("writing")
        files = save(model, path, EXTERNAL_DATA_BYTES)
        decoders.make_runnable(as_run := reopen(path))
        verifier.verify_written(path, as_run)
        return files

    try:
        return names, written(context)
    except equivalence.NotEquivalent as reason:
        try:
            written(verifier.apply([]))
        except equivalence.NotEquivalent:
            raise _failure(source, [], reason) from None
        wrong = verifier.first_wrong(acting, written)
        report.reverted |= {wrong: f"the written model {reason}"}
    kept = [name for name in names if name != wrong]
    try:
        return kept, written(verifier.apply(kept))
    except equivalence.NotEquivalent as reason:
        raise _failure(source, [name for name in acting if name != wrong], reason) from None


def _failure(source: Source, acting: Sequence[str], reason: equivalence.NotEquivalent) -> ExportError:
    """Returns the error of a file that differs from the original."""
    if not source.converts:
        return ExportError(f"the written model {reason}: this is a defect of twinop, please report it")
    left_out = f". Leave rewrites out with {option('without')} (applied: {', '.join(acting)}), or keep"
    cure = left_out if acting else ", also without any rewrite. Keep"
    return ExportError(f"the model in {source.report.dtype} {reason}{cure} its dtype")


def _measured(verifier: Verifier, names: Sequence[str], path: Path, folder: Path) -> measure.Measured:
    """Measures the source and the result in `path`, where this machine has the device."""
    source, report = verifier.source, verifier.source.report
    known = verifier.whole.reference.cases if verifier.whole is not None else []
    case = known[0] if known else inputs.generate(source.original, verifier.sizes, hide="nothing")
    if report.device == "cuda" and (reasons := unavailable_reasons(0, [])):
        return measure.Measured(untimed=reasons[0])

    def write(names: Sequence[str], folder: Path) -> Path:
        return save(_converted(source, verifier.apply(names)), folder / path.name, EXTERNAL_DATA_BYTES)[-1]

    verifier.progress("measuring")
    report.timed_shape = next((array.shape for array in case.values()), ())
    clock = measure.Stopwatch(case, report.device, source.user_ops.libraries or None)
    return measure.drop_slow(report.source, path, names, write, clock, folder, verifier.progress)


def _converted(source: Source, context: g.RewriteContext) -> ir.Model:
    """Converts the rewritten model to the wanted dtypes, and gives it the form of the device."""
    report, model = source.report, context.model
    report.inlined = source.user_ops.inlined
    wide, report.narrowed = source.convert(model)
    if report.device == "cuda" and report.dtype in precision.DTYPES:  # matmuls that only exist in 16 bits
        for each in passes.LATE:
            each(context)(context.model)
        g.share_constants(context.graph)
    count = len([node for node in wide if node.graph is not None])
    report.add_note(f"{count} nodes compute in fp32" if count else "")
    report.fused, report.skipped = fused(context.model), skipped(context.model)
    if mask := model.metadata_props.get(RIGHT_PADDED):
        report.add_note(
            f"{option('padding', 'right')} promised that {mask} hides nothing but the end of each sequence"
        )
    report.nodes_after = len([*model.graph.all_nodes()])
    kinds = Counter(node.op_type for node in model.graph.all_nodes() if node.domain == g.MICROSOFT)
    report.needs = [f"{g.MICROSOFT} {kind} x {count}" for kind, count in sorted(kinds.items())]
    report.needs += ["1.23 for Attention"] if growing_caches.FUSED in report.fused else []
    for node in [node for node in model.graph if decoders.ACCURACY in node.meta]:
        node.attributes[decoders.ACCURACY] = node.meta[decoders.ACCURACY]
    if source.is_changed and report.device == "cuda":
        for node in [node for node in model.graph if node.op_type == decoders.ATTENTION]:
            cached_attention.join_norms(node)
    model = source.finished(model)
    report.libraries = source.libraries_of(model)
    return model


def _write_original(verifier: Verifier, folder: Path) -> list[Path]:
    """Writes the file as it is: nothing was recognised."""
    source, report = verifier.source, verifier.source.report
    report.nodes_after = report.nodes_before
    model = load(source.path, source.options.held)
    unfuse_ort.split_simplified_norms(model)
    if verifier.whole is not None:
        equivalence.confirm_shapes(model, verifier.whole.reference)
    report.libraries = source.libraries_of(model)
    files = save(model, folder / report.path.name, EXTERNAL_DATA_BYTES, checks=False)  # its fp32 form has run
    if verifier.whole is not None and not source.is_fp32 and source.runs_as_file:
        with suppress(NotRunnable, TwinopError):  # bfloat16 has few kernels on the CPU
            note = run(files[-1], source.user_ops.libraries or None, may_skip=True).note
            report.add_note(f"the original: {note}" if note else "")
    return files


def chosen_device(device: str | None) -> str:
    """Returns the device to optimise for, by default "cuda" where a GPU is visible, else "cpu"; ExportError:
    models cannot be optimised for the given one."""
    if device is None:
        return "cuda" if has_gpu() else "cpu"
    if device not in DEVICES:
        raise ExportError(f"{option('device', device)}: expected one of: {', '.join(DEVICES)}")
    return device
