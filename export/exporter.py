"""Exports a torch model to an ONNX file that has passed every check.

An exporter of torch's makes one model in memory (`routes.py`). A list of passes runs over that model
(`_run_passes`). Then it is written once, and the file is checked and compared with torch before it is kept.
"""

import dataclasses
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.passes.common import ClearMetadataAndDocStringPass, ShapeInferencePass

import twinop
from twinop import deploy, torch_op
from twinop.deploy.choose_library import library_paths
from twinop.deploy.ort_process import time_limit
from twinop.deploy.ort_runs import check_shown
from twinop.dtypes import FLOATING, to_array, to_tensor, torch_name
from twinop.errors import ExportError, LibraryError, TwinopError, in_command, option
from twinop.find import package_key, package_of
from twinop.library import read_library
from twinop.model import wire
from twinop.model.attach import MOST_INLINED, attach_to_calls, inlined_nodes
from twinop.model.calls import Call, find_calls
from twinop.model.files import EXTERNAL_DATA_BYTES, save, work_folder
from twinop.op_spec import DOMAIN, OpSpec
from twinop.optimize import chosen_device
from twinop.optimize import optimize as optimize_file
from twinop.optimize.inputs import special as special_cases
from twinop.progress import Progress, silent
from twinop.publish import publish
from twinop.tolerance import accepted, difference, nudged, same_bits, scale_of

from .inputs import Dynamic, Inputs, as_module, bind_inputs, check_dynamic, check_opset, leaves, resized
from .report import ExportReport
from .routes import ROUTES, Source, quiet_torch, run_route
from .state import changed_weights, evaluation, kept_state
from .verify import Case
from .verify import verify as compare_with_torch


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

    The model is exported in eval mode and left as it was, each submodule in its own mode. The file has a
    function body for each of twinop's ops. Its metadata holds twinop's version (`twinop.version`) and the
    hash of each op's schema (`twinop.schema.CustomRelu`), and the packages of other libraries
    (`twinop.package.<domain>`). It must pass `onnx.checker` with full_check, and
    its results in ONNX Runtime's CPU provider must be torch's, also for other data with one more entry on
    every dynamic axis, and for numbers that are all 0, all 1 or large. The report says whether it runs
    without the library. ONNX Runtime runs in a process of its own, so that a crash there is reported as well.

    Args:
        model: a module or a function; `torch_op.replace_modules(model)` puts twinop's ops into it.
        args: example inputs, a tensor or a tuple.
        path: the file to write; an existing one is replaced. Weights of `external_data_bytes` or more go to
            a file beside it, whose name ends in their checksum.
        kwargs: example inputs by name.
        exporter: "dynamo" (torch.export) or "torchscript" (tracing).
        dynamic: axes whose size stays open, by input: `{"x": 0}`, `{"x": [0, 1]}`, or with names of one's own
            `{"x": {0: "batch"}}`. The rank is fixed.
        opset: the version of the standard operators, 20 to 25.
        bodies: attach the function bodies.
        verify: compare with torch in ONNX Runtime.
        allow_uncompared: keep the file although an output is empty or NaN for the example inputs.
        optimize: optimise the file for ONNX Runtime as `twinop optimize` does, and compare it with the file
            that the exporter wrote. Where that fails the file stays as it is, and the report says why.
            Default: True, but not with `bodies=False`.
        device: what the file is optimised for, "cuda" or "cpu"; by default what this machine has. It runs on
            both.
        library: the libraries for the comparison, one or several. For each other domain of the model it is
            the one that torch has loaded, and for twinop's own the smallest one that is found with the ops.
        timeout: the seconds that the file may run in ONNX Runtime without progress, before it is ended.
        progress: called at each step, and while it goes on.

    Raises:
        ExportError: wrong arguments, a model that cannot be exported, or a file that does not give torch's
            results.
    """
    target = Path(path)
    if exporter not in ROUTES:
        raise ExportError(f"exporter {exporter!r} is not known; expected one of: {', '.join(ROUTES)}")
    optimize = bodies if optimize is None else optimize
    if optimize and not bodies:
        raise ExportError("optimising needs function bodies: the file is compared without the library")
    device = chosen_device(device)
    check_opset(opset)
    model = as_module(model)
    inputs = bind_inputs(model, args, kwargs)
    axes = check_dynamic(dynamic, inputs.tensors)
    report = ExportReport(target, exporter, bodies=bodies)
    with time_limit(timeout), evaluation(model), work_folder(target) as folder:
        progress("running the model in torch")
        lost: list[str] = []
        expected = _outputs(model, inputs, inputs.tensors, lost)
        progress(f"exporting ({exporter})")
        names = _output_names(expected, inputs)
        records = torch_op.records()
        source = Source(model, inputs, names, axes, opset, records, folder)
        exported, report.notes = run_route(exporter, source)
        report.notes += lost
        progress("attaching function bodies, checking")
        with quiet_torch():
            calls = _run_passes(exported, records, report)
        files = save(exported, folder / target.name, external_data_bytes)
        report.size = sum(file.stat().st_size for file in files)
        libraries = _libraries(library, calls) if verify or optimize else []
        cases: list[Case] = []
        if verify:
            progress("comparing with torch in ONNX Runtime")
            cases.append(_case(model, inputs, inputs.tensors, expected))
            if axes:
                try:
                    cases.append(_larger_case(model, inputs, axes))
                    report.resized = True
                except ExportError as error:
                    report.notes.append(f"not compared at other sizes: {error}")
            shown = [each.expected for each in cases]
            cure = "Give example inputs for which it has finite numbers"
            report.notes += check_shown(exported.graph, shown, allow_uncompared, cure)
            cases += _special_cases(model, inputs, exported, [*map(scale_of, cases[0].expected)])
            compare_with_torch(report, wire.view(files[-1]), exported, libraries, calls, cases)
        if optimize:
            progress("optimizing")
            report.device = device
            options = {"device": device, "allow_uncompared": allow_uncompared, "timeout": timeout}
            options["progress"] = progress
            files = _optimized(files, inputs.tensors, libraries, calls, report, cases, options)
        files = publish(files, target)
    report.data_path = files[0] if len(files) > 1 else None
    return report


def _run_passes(
    model: ir.Model, records: Mapping[str, OpSpec], report: ExportReport
) -> dict[OpSpec, list[Call]]:
    """Changes the model into what is saved, and describes it in the report; returns the ops' calls."""
    ClearMetadataAndDocStringPass()(model)  # source paths and stack traces of the machine that exported
    calls = find_calls(model, records)
    if report.bodies:
        attach_to_calls(model, calls, allow_missing=True)
        if (count := inlined_nodes(model)) > MOST_INLINED:
            report.notes.append(
                f"without the library its function bodies are {count:,} nodes: ONNX Runtime 1.31 and later "
                f"refuse more than {MOST_INLINED:,}, unless the session option "
                "session.function_expansion_node_limit allows more"
            )
        for record, found in calls.items():
            dtypes = {dtype for call in found for dtype in call.dtypes.values()}.intersection(FLOATING)
            if "float64" in dtypes and len(dtypes) > 1:
                report.notes.append(
                    f"{record.onnx_name} is called with {', '.join(sorted(dtypes))}: they share a body, "
                    "so without the library all of these calls compute in float64"
                )
    ShapeInferencePass(check_type=True, strict_mode=False)(model)
    model.metadata_props["twinop.version"] = twinop.__version__
    model.metadata_props.update({record.metadata_key: record.schema_hash for record in calls})
    model.metadata_props.update(_packages(calls))
    _describe(model, report)
    return calls


def _optimized(
    files: list[Path],
    tensors: Mapping[str, torch.Tensor],
    libraries: list[Path],
    kept: Iterable[OpSpec],
    report: ExportReport,
    cases: Sequence[Case],
    options: Mapping[str, Any],
) -> list[Path]:
    """Optimises a file into a folder of its own, and compares it with torch; returns the files to keep."""
    folder = files[-1].parent / "optimized"
    folder.mkdir()
    given, path = folder / "inputs.npz", folder / files[-1].name
    # numpy does not save bfloat16.
    wide = {name: each.float() if each.dtype is torch.bfloat16 else each for name, each in tensors.items()}
    arrays: dict[str, Any] = {name: to_array(tensor) for name, tensor in wide.items()}
    np.savez(given, **arrays)
    try:
        optimized = optimize_file(
            files[-1], path, inputs_file=given, library=libraries or None, kept=kept, **options
        )
        checked = dataclasses.replace(report, notes=[], unsupported=[], parity=None, without_library=None)
        if optimized.fused and cases:
            view = wire.view(path)
            model = ir.load(view)
            calls = find_calls(model, torch_op.records())
            compare_with_torch(checked, view, model, libraries, calls, cases)
    except (TwinopError, OSError) as error:
        report.notes.append(f"not optimised: {error}")
        return files
    except Exception as error:  # the export itself is good
        report.notes.append(
            f"not optimised: {type(error).__name__}: {error}; this is a defect of twinop, please report it"
        )
        return files
    if optimized.fused:
        report.optimized = optimized
        if not in_command():  # which shows what was done
            keep = f"{option('optimize', False)} keeps the exporter's nodes"
            report.notes.append(f"optimised for ONNX Runtime; {keep}")
        if checked.parity is not None:  # this machine's CPU runs it
            report.parity, report.libraries = checked.parity, checked.libraries
            report.without_library, report.without_reason = checked.without_library, checked.without_reason
            report.unsupported = checked.unsupported
        _describe(ir.load(wire.view(path)), report)
        files = [*folder.glob("*.data"), path]
        report.size = sum(file.stat().st_size for file in files)
    return files


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
        return {
            str(value.name): f"{value.dtype.name.lower() if value.dtype else '?'} {value.shape}"
            for value in values
        }

    types = Counter(
        f"{node.domain}.{node.op_type}" if node.domain else node.op_type for node in model.graph.all_nodes()
    )
    report.opsets = {domain or "ai.onnx": n for domain, n in sorted(model.graph.opset_imports.items())}
    report.inputs, report.outputs = signature(model.graph.inputs), signature(model.graph.outputs)
    report.nodes = dict(sorted(types.items()))


# ---------------------------------------------------------------------------------- torch's results


def _outputs(
    model: torch.nn.Module, inputs: Inputs, tensors: Mapping[str, torch.Tensor], lost: list[str] | None = None
) -> dict[str, torch.Tensor]:
    """Returns the outputs by name. `lost` gets a note for each write that the file does not have.

    What the model writes into itself has its old values again afterwards: the file has these, too.
    """
    copies = {name: tensor.clone() for name, tensor in tensors.items()}  # a model may write to its inputs
    try:
        with torch.no_grad(), kept_state(model) as written:
            result = inputs.call(model, dict(copies))
            given = dict(leaves(result, outputs=True))
            outputs = {name: value.clone() for name, value in given.items()}  # one may be a view of a buffer
    except TwinopError:
        raise
    except Exception as error:
        raise ExportError(f"the model fails on its example inputs, in torch: {error}") from error
    if not outputs:
        raise ExportError(f"the model returns {type(result).__name__}; expected at least one tensor")
    if lost is not None:
        kept = {id(tensor) for tensor in given.values()}
        lost += (
            f"the model writes into its input {name}, and does not return it: the file has no output for it"
            for name, copy in copies.items()
            if copy._version > 0 and id(copy) not in kept
        )
        lost += (
            f"the model writes into its buffer {name}. In the file it is a constant: make it an input that "
            "the model returns"
            for name in written.buffers
        )
        if written.attributes and _keeps_state(model, inputs, tensors, outputs):
            names = ", ".join(sorted(written.attributes))
            lost.append(
                f"the model's outputs depend on what earlier calls left in {names}. The file always computes "
                "the first call: make it an input that the model returns"
            )
    return outputs


def _keeps_state(
    model: torch.nn.Module,
    inputs: Inputs,
    tensors: Mapping[str, torch.Tensor],
    outputs: Mapping[str, torch.Tensor],
) -> bool:
    """Whether a second call gives other outputs than the first one's."""
    try:
        with kept_state(model):
            for _ in range(2):
                with torch.no_grad():
                    result = inputs.call(model, {name: tensor.clone() for name, tensor in tensors.items()})
            second = dict(leaves(result, outputs=True))
            return any(not same_bits(second[name], first) for name, first in outputs.items())
    except Exception:  # such as other sizes
        return True


def _larger_case(model: torch.nn.Module, inputs: Inputs, axes: Mapping[str, Mapping[int, str]]) -> Case:
    """Returns inputs with one more entry on each dynamic axis, and torch's outputs.

    Raises:
        ExportError: torch runs the model neither with fresh data nor with the example's.
    """
    larger = resized(inputs.tensors, axes, fresh=True)
    try:
        return _case(model, inputs, larger)
    except ExportError:  # values that depend on each other, such as sorted offsets
        return _case(model, inputs, resized(inputs.tensors, axes, fresh=False))


def _case(
    model: torch.nn.Module,
    inputs: Inputs,
    tensors: Mapping[str, torch.Tensor],
    outputs: Mapping[str, torch.Tensor] | None = None,
    special: str = "",
    scales: Sequence[float] = (),
) -> Case:
    expected = list((outputs or _outputs(model, inputs, tensors)).values())
    noise = cache(partial(_noise, model, inputs, tensors, expected, bool(special), scales))
    return Case(tensors, expected, noise, special, scales)


def _special_cases(
    model: torch.nn.Module, inputs: Inputs, exported: ir.Model, scales: Sequence[float]
) -> Iterator[Case]:
    """Yields numbers that are all 0, all 1 or large, and torch's outputs, where torch runs the model."""
    arrays = {name: to_array(tensor) for name, tensor in inputs.tensors.items()}
    for special, case in special_cases(exported, arrays, ()).items():
        tensors = {name: to_tensor(array).to(inputs.tensors[name].device) for name, array in case.items()}
        with suppress(ExportError):
            yield _case(model, inputs, tensors, None, special, scales)


def _noise(
    model: torch.nn.Module,
    inputs: Inputs,
    tensors: Mapping[str, torch.Tensor],
    expected: Sequence[torch.Tensor],
    special: bool,
    scales: Sequence[float],
) -> list[float]:
    """Returns by how much each of torch's outputs changes with the last bits of the inputs and the weights.

    Zeros of special inputs become tiny numbers, which shows what is a choice among equals; that NaN becomes a
    number there is no noise. Infinity is in fp16: ONNX Runtime keeps results in fp32, which do not overflow.
    """

    scales = scales or [0.0] * len(expected)
    again = _outputs(model, inputs, tensors).values()
    for index, (a, b, least) in enumerate(zip(expected, again, scales, strict=True)):
        if not difference(a, b, least) <= accepted(torch_name(a.dtype)):
            raise ExportError(
                f"the model draws random numbers: output {index} differs from call to call. Export it with "
                "dropout off, or make the random numbers an input"
            )
    numbers = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    zeros = not any(tensor.any() for tensor in numbers.values())
    try:
        changed = {
            name: to_tensor(nudged(to_array(tensor), zeros=special)).to(tensor.device)
            for name, tensor in numbers.items()
        }
        with changed_weights(model):
            other = _outputs(model, inputs, dict(tensors) | changed).values()
    except ExportError:
        return [inf] * len(expected)
    errors = []
    for a, b, least in zip(expected, other, scales, strict=True):
        error, wide = difference(a, b, least), a.dtype is not torch.float16
        if wide and zeros and a.is_floating_point() and error == inf:
            error = 0.0
        errors.append(error if wide or a.isfinite().all() else inf)
    return errors


def _output_names(outputs: Mapping[str, torch.Tensor], inputs: Inputs) -> list[str]:
    """Returns y, or y_0, y_1 ..., or a dict's keys."""
    names = [name if name and not name[0].isdigit() else f"y_{name}".rstrip("_") for name in outputs]
    return [f"{name}_out" if name in inputs.tensors else name for name in names]
