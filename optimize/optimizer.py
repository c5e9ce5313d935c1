"""Runs the rewrites on an ONNX file, and keeps those that do not change the results."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import onnx_ir as ir

from twinop import deploy
from twinop.deploy.cuda import has_gpu
from twinop.deploy.ort_process import time_limit
from twinop.dtypes import dtype_name
from twinop.errors import ExportError, option
from twinop.library import find_library, read_library
from twinop.model.files import check_target, work_folder
from twinop.op_spec import OpSpec
from twinop.progress import Progress, silent
from twinop.publish import publish

from . import (
    branches,
    cached_attention,
    decoders,
    equivalence,
    invariance,
    passes,
    precision,
    standard_ops,
    unfuse_ort,
)
from .load import check_memory, data_files, load, make_constant, separate_names
from .own_ops import find_own_ops
from .prepare import inline_functions, main_dtype
from .report import OptimizeReport
from .rewrite_check import RewriteCheck
from .widen import convert_to_fp32

DEVICES = ("cuda", "cpu")


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
    replace: Sequence[str] = (),
    allow_uncompared: bool = False,
    drop_slow: bool = False,
    library: deploy.Libraries = None,
    allow_model_libraries: bool = False,
    kept: Iterable[OpSpec] = (),
    timeout: float = 600,
    progress: Progress = silent,
) -> OptimizeReport:
    """Optimises an ONNX file, and keeps the result only if it computes what the original computes.

    The rewrites run on the model in fp32. The result is compared with the original in fp32 on the CPU, and a
    rewrite that changes the results is reverted. Then the model is converted to the wanted dtype and
    compared again, if the CPU provider can run it. No time decides what is written, unless `drop_slow` asks.

    Args:
        source: the ONNX file to optimise.
        target: the file to write.
        dtype: "float16" or "bfloat16", also of inputs and outputs. By default these keep their dtypes, and
            each node the precision in which the file computes it.
        device: what the model is optimised for, "cuda" or "cpu"; by default what this machine has. The result
            runs on both.
        padding: "right" promises that masks hide nothing but the end of each sequence.
        shared_caches: promises that past and present share memory, which has rows for the whole context.
        invariant: a prompt's logits on CUDA do not depend on its batch; the report names nodes that may.
        inputs_file: an .npz file of inputs for the comparison; by default they are generated.
        without: names of rewrites to leave out.
        replace: ops that replace standard operators, such as "add" and "softmax" (`standard_ops.py`).
        allow_uncompared: keep the file although an output is empty or NaN for all inputs; the report says so.
        drop_slow: measure on this machine, and revert rewrites that make the model slower. The same file may
            then have other bytes elsewhere.
        library: libraries of custom ops that the original needs. Those of other domains are found as
            `deploy.session` finds them. The nodes of all of them stay as they are.
        allow_model_libraries: whether to take libraries, which can do anything, from the model's folder.
        kept: ops whose nodes stay although no library may have them.
        timeout: the seconds that a model may run without progress, before it is ended.
        progress: called at each step, and while it goes on.

    Raises:
        ExportError: wrong arguments, or a model that cannot be read, run or converted.
    """
    source, target = Path(source), Path(target)
    _check(dtype, padding, without)
    device = chosen_device("cuda" if invariant and device is None else device)
    progress("reading the model")
    model = load(source)
    data = data_files(model)
    check_target(target, {source, *data})
    check_memory(model)
    own = find_own_ops(model, source, library, kept, allow_model_libraries)
    records = dict(read_library(find_library("custom_ops")).records)
    standard_ops.check_ops(replace, records)
    report = OptimizeReport(source, target, device=device)
    report.nodes_before = len([*model.graph.all_nodes()])
    report.bytes_before = sum(map(os.path.getsize, (source, *data)))
    if constants := make_constant(model):
        report.notes.append(f"IR version 3: its {constants} initializers are constants, as in ONNX Runtime")
    inline_functions(model, records, own)
    separate_names(model)
    branches.move_out(model)
    model.graph.meta[cached_attention.SHARED_CACHES] = shared_caches
    model.graph.meta[invariance.INVARIANT] = invariant
    model.graph.meta[standard_ops.REPLACED] = (*replace,)
    main = main_dtype(model)
    own_dtype = dtype_name(main)
    unfuse_ort.split_simplified_norms(model)
    is_changed = decoders.split_query_norms(model) + decoders.set_full_precision(model) > 0
    interface = _interface(model)
    report.dtype = dtype or own_dtype
    if invariant and (device != "cuda" or report.dtype not in precision.DTYPES):
        raise ExportError(
            f"{option('invariant', True)}: is for cuda in float16 or bfloat16, not {device} in {report.dtype}"
        )
    if invariant and drop_slow:
        raise ExportError(
            f"{option('drop_slow', True)}: {option('invariant', True)} keeps slow rewrites, too"
        )
    if own_dtype == "float64" != report.dtype:
        raise ExportError(
            f"{option('dtype', dtype)}: the model is in float64, which stays. Leave out "
            f"{option('dtype')}, or export the model in float32"
        )
    if (narrow_types := convert_to_fp32(model, main, dtype is not None)) or is_changed:
        with time_limit(timeout):
            equivalence.require_types(source, own.libraries or None)
    decoders.set_sizes(model)
    own.convert_to_fp32(model, report.dtype, report.dtype != own_dtype)
    with time_limit(timeout), work_folder(target) as folder:
        original = source if not (narrow_types or is_changed) else None
        found = {own_dtype, *map(dtype_name, (*narrow_types, *interface.values()))}
        unchanged = source if not invariant and (dtype is None or found == {dtype}) else None
        exposed = interface if dtype is None else {}
        check = RewriteCheck(
            model,
            original,
            unchanged,
            exposed,
            dtype is None,
            is_changed,
            folder,
            records,
            report,
            padding,
            own,
            progress,
        )
        check.make_cases(inputs_file, allow_uncompared)
        best = check.verify({each.name: each for each in passes.chosen(device, report.dtype, without)})
        notes = [*report.notes]
        files = check.finish(best, target.name)
        if drop_slow and report.fused:
            measured = check.drop_slow(best[0], files[-1])
            if measured.slow:
                report.notes, report.reverted = notes, report.reverted | measured.slow
                best = check.verify({name: best[0][name] for name in best[0] if name not in measured.slow})
                files = check.finish(best, target.name)
            report.times, report.untimed = measured.times, measured.untimed
        report.bytes_after = sum(map(os.path.getsize, files))
        publish(files, target)
    return report


def _interface(model: ir.Model) -> dict[str, ir.DataType]:
    """Returns the dtypes of the inputs and outputs that `precision.convert` can change, by name."""
    values = (*model.graph.inputs, *model.graph.outputs)
    converted = (ir.DataType.FLOAT, *precision.DTYPES.values())
    return {str(each.name): each.dtype for each in values if each.dtype in converted}


def chosen_device(device: str | None) -> str:
    """Returns the device to optimise for: by default "cuda" where a GPU is to be seen, else "cpu".

    Raises:
        ExportError: models cannot be optimised for the given one.
    """
    if device is None:
        return "cuda" if has_gpu() else "cpu"
    if device not in DEVICES:
        raise ExportError(f"{option('device', device)}: expected one of: {', '.join(DEVICES)}")
    return device


def _check(dtype: str | None, padding: str | None, without: Sequence[str]) -> None:
    if dtype is not None and dtype.startswith(("float8", "fp8")):
        raise ExportError(f"{option('dtype', dtype)}: fp8 is not supported yet; expected float16 or bfloat16")
    if dtype not in (None, "float32", *precision.DTYPES):
        raise ExportError(
            f"{option('dtype', dtype)}: expected one of: float32, {', '.join(precision.DTYPES)}"
        )
    if padding not in (None, "right"):
        raise ExportError(
            f"{option('padding', padding)}: expected right, or no {option('padding')} for masks of any form"
        )
    names = [each.name for each in passes.PASSES]
    if unknown := [name for name in without if name not in names]:
        raise ExportError(f"{option('without', ', '.join(unknown))}: expected some of: {', '.join(names)}")
