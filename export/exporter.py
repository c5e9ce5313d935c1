"""Exports a torch model to an ONNX file that has passed every check.

An exporter of torch's makes one model in memory (`routes.py`). A list of passes runs over that model
(`_run_passes`). Then it is written once, and the file is checked and compared with torch before it is kept.
"""

import dataclasses
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx.external_data_helper import uses_external_data
from onnx_ir.passes.common import ClearMetadataAndDocStringPass, ShapeInferencePass

import twinop
from twinop import deploy, torch_op
from twinop.deploy import wire
from twinop.deploy.choose_library import library_paths
from twinop.deploy.custom_nodes import tensors
from twinop.deploy.ort_process import time_limit
from twinop.deploy.ort_runs import check_shown
from twinop.errors import ExportError, LibraryError, TwinopError, in_command, option
from twinop.libraries.find import package_key, package_of
from twinop.libraries.library import read_library
from twinop.model.attach import attach_to_calls
from twinop.model.calls import Call, find_calls
from twinop.model.files import EXTERNAL_DATA_BYTES, save, work_folder
from twinop.model.weights import Held
from twinop.optimize import chosen_device
from twinop.optimize import optimize as optimize_file
from twinop.record.dtypes import to_array
from twinop.record.op_spec import DOMAIN, OpSpec
from twinop.system.progress import Progress, silent
from twinop.system.publish import publish

from .inputs import Dynamic, check_opset
from .reference import Reference, Tensors
from .report import ExportReport
from .routes import ROUTES, Source, quiet_torch, run_route
from .state import evaluation
from .verify import Case
from .verify import verify as compare_with_torch

_OPTIMIZED = "optimized"
_FREED = 200_000_000
"""The bytes of a file that does not stay on the disk until the optimised one is written, too."""


def export(
    model: torch.nn.Module,
    args: Any,
    path: str | os.PathLike[str],
    *,
    kwargs: Mapping[str, Any] | None = None,
    exporter: str = "dynamo",
    dynamic: Dynamic | None = None,
    opset: int = 20,
    bodies: bool = True,
    verify: bool = True,
    allow_uncompared: bool = False,
    optimize: bool | None = None,
    device: str | None = None,
    library: deploy.Libraries = None,
    external_data_bytes: int = EXTERNAL_DATA_BYTES,
    timeout: float = 600,
    progress: Progress = silent,
) -> ExportReport:
    """Exports a torch model that uses twinop's ops, and keeps the file only if it passes every check.

    The model is exported in eval mode and left as it was; no parameter is copied. The file has a function
    body for each op. It must pass `onnx.checker`, and give torch's results in ONNX Runtime's CPU provider:
    also for other data with one more entry on every dynamic axis, and for numbers of 0, 1 or large ones.

    Args:
        model: a module or a function; `torch_op.replace_modules(model)` puts twinop's ops into it.
        args, kwargs: example inputs: a tensor or a tuple, and others by name.
        path: the file to write. Weights of `external_data_bytes` or more go to a file beside it.
        exporter, opset: "dynamo" (torch.export) or "torchscript" (tracing); 20 to 25.
        dynamic: the dynamic axes, by input: `{"x": 0}`, `{"x": [0, 1]}` or `{"x": {0: "batch"}}`.
        bodies, verify: attach the function bodies; compare with torch in ONNX Runtime.
        allow_uncompared: keep the file although an output is empty or NaN for the example inputs.
        optimize, device: optimise the file as `twinop optimize` does, for "cuda" or "cpu"; where that fails
            the report says why. Default: True, but not with `bodies=False`; for what this machine has.
        library: for the comparison; by default those that torch has loaded, and one with twinop's ops.
        timeout, progress: the seconds that the file may run without progress; called at each step.

    Raises:
        ExportError: wrong arguments, a model that cannot be exported, or a file with other results.
    """
    optimize = _check(exporter, opset, bodies, optimize)
    reference = Reference(model, args, kwargs, dynamic)
    report = ExportReport(Path(path), exporter, bodies=bodies)
    options = {"device": chosen_device(device), "allow_uncompared": allow_uncompared, "timeout": timeout}
    with time_limit(timeout), evaluation(reference.model), work_folder(report.path) as folder:
        exported, calls = _exported(reference, report, opset, folder, progress)
        files = save(exported, folder / report.path.name, external_data_bytes)
        libraries = _libraries(library, calls) if verify or optimize else []
        cases = _cases(reference, exported, report, allow_uncompared, progress) if verify else []
        if cases:
            compare_with_torch(report, wire.view(files[-1]), exported, libraries, calls, cases)
        if optimize:
            source, held = _held(exported, files)
            options |= {"progress": progress, "kept": calls, "library": libraries or None, "held": held}
            found = _optimized(source, reference.inputs.tensors, report, cases, options)
            files = found or _as_exported(exported, files, held, external_data_bytes)
        report.take_files(publish(files, report.path))
    return report


def _check(exporter: str, opset: int, bodies: bool, optimize: bool | None) -> bool:
    """Refuses what does not go together; returns whether the file is to be optimised."""
    if exporter not in ROUTES:
        raise ExportError(f"exporter {exporter!r} is not known; expected one of: {', '.join(ROUTES)}")
    if optimize and not bodies:
        raise ExportError("optimising needs function bodies: the file is compared without the library")
    check_opset(opset)
    return bodies if optimize is None else optimize


def _exported(
    reference: Reference, report: ExportReport, opset: int, folder: Path, progress: Progress
) -> tuple[ir.Model, dict[OpSpec, list[Call]]]:
    """Runs torch's exporter and the passes; returns the model that is saved, and the ops' calls."""
    progress("running the model in torch")
    notes, records = reference.run(), torch_op.records()
    progress(f"exporting ({report.exporter})")
    names = reference.output_names
    source = Source(reference.model, reference.inputs, names, reference.axes, opset, records, folder)
    exported, report.notes = run_route(report.exporter, source)
    report.notes += notes
    progress("attaching function bodies, checking")
    with quiet_torch():
        return exported, _run_passes(exported, records, report)


def _cases(
    reference: Reference, exported: ir.Model, report: ExportReport, allowed: bool, progress: Progress
) -> list[Case]:
    """Returns what a file is compared on; ExportError: an output shows no number."""
    progress("comparing with torch in ONNX Runtime")
    cases = reference.cases(report.notes)
    report.resized = len(cases) > 1
    cure = "Give example inputs for which it has finite numbers"
    report.notes += check_shown(exported.graph, [each.expected for each in cases], allowed, cure)
    return [*cases, *reference.edge_cases(exported)]


def _run_passes(
    model: ir.Model, records: Mapping[str, OpSpec], report: ExportReport
) -> dict[OpSpec, list[Call]]:
    """Changes the model into what is saved, and describes it in the report; returns the ops' calls."""
    ClearMetadataAndDocStringPass()(model)  # source paths and stack traces of the machine that exported
    calls = find_calls(model, records)
    if report.bodies:
        attach_to_calls(model, calls, allow_missing=True)
    ShapeInferencePass(check_type=True, strict_mode=False)(model)
    model.metadata_props["twinop.version"] = twinop.__version__
    model.metadata_props.update({record.metadata_key: record.schema_hash for record in calls})
    model.metadata_props.update(_packages(calls))
    _describe(model, report)
    return calls


def _held(model: ir.Model, files: Sequence[Path]) -> tuple[Path, dict[str, Held]]:
    """Gives the disk of a large file back, whose weights torch has in memory. Returns the file to optimise,
    which keeps its graph and its size, not its numbers, and its weights."""
    path = wire.view(files[-1])
    proto = onnx.load(path, load_external_data=False)
    external = [*filter(uses_external_data, tensors(proto))]
    is_whole = len(external) == sum(map(uses_external_data, proto.graph.initializer))
    if (size := files[0].stat().st_size) < _FREED or not is_whole:
        return files[-1], {}
    values = {name: each.const_value for name, each in model.graph.initializers.items() if each.const_value}
    held = {each.name: Held(values[each.name]) for each in external}
    for length in (0, size):
        os.truncate(files[0], length)
    return path, held


def _as_exported(
    model: ir.Model, files: list[Path], held: Mapping[str, Held], external_data_bytes: int
) -> list[Path]:
    """Returns the files of a model that is not optimised, written again if `_held` gave their disk back."""
    if not held:
        return files
    shutil.rmtree(files[-1].parent / _OPTIMIZED)
    return save(model, files[-1], external_data_bytes)


def _optimized(
    source: Path, tensors: Tensors, report: ExportReport, cases: Sequence[Case], options: Mapping[str, Any]
) -> list[Path]:
    """Optimises a file into a folder of its own, and compares it with torch; returns the files if they do."""
    options["progress"]("optimizing")
    report.device = options["device"]
    folder = source.parent / _OPTIMIZED
    folder.mkdir()
    given, path = folder / "inputs.npz", folder / report.path.name
    # numpy does not save bfloat16.
    wide = {name: each.float() if each.dtype is torch.bfloat16 else each for name, each in tensors.items()}
    arrays: dict[str, Any] = {name: to_array(tensor) for name, tensor in wide.items()}
    np.savez(given, **arrays)
    try:
        optimized = optimize_file(source, path, inputs_file=given, **options)
        checked = dataclasses.replace(report, notes=[], unsupported=[], parity=None, without_library=None)
        if optimized.fused and cases:
            view = wire.view(path)
            model = ir.load(view)
            calls = find_calls(model, torch_op.records())
            compare_with_torch(checked, view, model, options["library"] or [], calls, cases)
    except (TwinopError, OSError) as error:
        report.notes.append(f"not optimised: {error}")
        return []
    except Exception as error:  # the export itself is good
        report.notes.append(
            f"not optimised: {type(error).__name__}: {error}; this is a defect of twinop, please report it"
        )
        return []
    if optimized.fused:
        report.optimized, optimized.source = optimized, report.path
        if not in_command():  # which shows what was done
            keep = f"{option('optimize', False)} keeps the exporter's nodes"
            report.notes.append(f"optimised for ONNX Runtime; {keep}")
        if checked.parity is not None:  # this machine's CPU runs it
            report.parity, report.libraries = checked.parity, checked.libraries
            report.without_library, report.without_reason = checked.without_library, checked.without_reason
            report.unsupported = checked.unsupported
        _describe(ir.load(wire.view(path)), report)
        return [*folder.glob("*.data"), path]
    return []


def _packages(records: Iterable[OpSpec]) -> dict[str, str]:
    """Returns the metadata that names the installed packages whose libraries torch has loaded."""
    found = {}
    for record in records:
        with suppress(LibraryError):  # several packages, or a broken one: another library was loaded
            package = package_of(record.domain)
            if package is not None and package.library_path().resolve() == torch_op.library_of(record):
                found[package_key(record.domain)] = package.requirement
    return found


def _libraries(given: deploy.Libraries, records: Iterable[OpSpec]) -> list[Path]:
    """Returns the given libraries, and for other domains than twinop's those that torch has loaded."""
    libraries = library_paths(given)
    domains = {DOMAIN, *(read_library(path).domain for path in libraries)}
    for record in records:
        path = torch_op.library_of(record)
        if record.domain not in domains and path is not None:
            domains.add(record.domain)
            libraries.append(path)
    return libraries


def _describe(model: ir.Model, report: ExportReport) -> None:
    def signature(values: Sequence[ir.Value]) -> dict[str, str]:
        kinds = [value.dtype.name.lower() if value.dtype else "?" for value in values]
        return {str(value.name): f"{kind} {value.shape}" for value, kind in zip(values, kinds, strict=True)}

    types = Counter(f"{node.domain}.{node.op_type}".lstrip(".") for node in model.graph.all_nodes())
    report.opsets = {domain or "ai.onnx": n for domain, n in sorted(model.graph.opset_imports.items())}
    report.inputs, report.outputs = signature(model.graph.inputs), signature(model.graph.outputs)
    report.nodes = dict(sorted(types.items()))
