"""The columns of `twinop bench models`: a model in torch, and its ONNX files in ONNX Runtime."""

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor, nn

from twinop.export import export
from twinop.library import find_library
from twinop.optimize import optimize

from twinop.bench import runtime
from twinop.bench.cases import relative_error
from .encoder_models import TINY, cast
from .model_zoo import RIGHT, ROWS, Row
from twinop.bench.providers import Subject
from twinop.bench.report import reason_of
from twinop.bench.timing import DeviceTimer, host_times, timer_on

STOCK, ORTS, OURS = "stock", "optimizer", "twinop"
KINDS = (STOCK, ORTS, OURS)
FEW = 2  # exports and comparisons take a batch of two, as the batch dimension stays open
FACTS = ("made", "left", "taken_back", "notes", "error", "own_error")

EAGER, COMPILE, AUTOTUNE = "torch eager", "torch.compile", "max-autotune"
TWINOP, MEASURED = "twinop", "twinop measured"
COLUMNS = {
    EAGER: "",
    COMPILE: "default",
    AUTOTUNE: "max-autotune-no-cudagraphs",
    "ORT stock": STOCK,
    "ORT optimizer": ORTS,
    TWINOP: OURS,
    MEASURED: OURS,
}
"""The columns: torch.compile's mode, or the kind of export."""
ALGORITHMS = "TWINOP_LINEAR_ALGORITHMS"

# ------------------------------------------------------------------------------------------- files


def prepare(name: str, kind: str, dtype: str, small: bool, path: str) -> dict[str, Any]:
    """Writes the file of a column.

    Args:
        name: of the row.
        kind: one of `KINDS`.

    Returns:
        What the optimizers say of it.
    """
    row, target, narrow = ROWS[name], Path(path), getattr(torch, dtype)
    inputs = row.batch(small, None if row.graph else FEW)
    source = target.with_name(f"{target.stem}-source.onnx")
    if kind == ORTS:
        return _by_ort(row, small, narrow, source, inputs, target)
    model = row.make(small, row.model.exported)
    if kind == STOCK:
        torch_export(model.to(narrow), cast(inputs, narrow), target, fixed=row.graph)
        return {}
    torch_export(model, inputs, source, fixed=row.graph)
    padding = RIGHT if row.padding == RIGHT else None
    return optimized(source, target, inputs, FACTS, dtype=dtype, padding=padding)


def torch_export(
    model: nn.Module, inputs: Mapping[str, Tensor], path: Path, exporter: str = "dynamo", fixed: bool = False
) -> None:
    """Writes torch's own export, with an open batch dimension if it is not `fixed`."""
    dynamic = None if fixed else {name: {0: "batch"} for name in inputs}
    export(model, tuple(inputs.values()), path, exporter=exporter, dynamic=dynamic, verify=False)


def optimized(
    source: Path, target: Path, inputs: Mapping[str, Tensor], facts: tuple[str, ...], **options: Any
) -> dict[str, Any]:
    """Optimises an export, compares both on these inputs, and returns what the optimizer says."""
    inputs_file = target.with_suffix(".npz")
    np.savez(inputs_file, **{name: x.numpy() for name, x in inputs.items()})  # type: ignore[arg-type]
    found = asdict(optimize(source, target, inputs_file=inputs_file, **options))
    found["taken_back"] = found["reverted"]  # its name in the recorded reports
    return {name: found[name] for name in facts}


def _by_ort(
    row: Row, small: bool, dtype: torch.dtype, source: Path, inputs: Mapping[str, Tensor], target: Path
) -> dict[str, Any]:
    """ONNX Runtime's own optimizer, whose conversion knows float16 only: bfloat16 is exported as such."""
    from onnxruntime.transformers import optimizer

    model = row.make(small, attention="eager")  # the form that it recognises
    if dtype is torch.bfloat16:
        model, inputs = model.to(dtype), cast(inputs, dtype)
    torch_export(model, inputs, source, "torchscript", fixed=row.graph)
    size = TINY if small else row.size
    made = optimizer.optimize_model(
        str(source),
        model_type=row.model.model_type,
        num_heads=size.heads,
        hidden_size=size.width,
        opt_level=0,
        use_gpu=True,
    )
    if dtype is torch.float16:
        made.convert_float_to_float16(keep_io_types=False)
    onnx.save(made.model, str(target))
    fused = made.get_fused_operator_statistics()
    return {"made": {kind: count for kind, count in fused.items() if count}}


# ------------------------------------------------------------------------------------------- runs


def measure(
    name: str, dtype: str, small: bool, device: str, columns: Mapping[str, str], rounds: int
) -> dict[str, Any]:
    """Measures the columns of a row, in turn. Runs in a process of its own.

    Args:
        columns: torch.compile's mode or the path of the export, by name.

    Returns:
        {"rows": a row for each column that ran, "reasons": why the others did not}
    """
    row, where = ROWS[name], torch.device(device)
    subjects: dict[str, Subject] = {}
    reasons: dict[str, str] = {}
    with torch.no_grad(), timer_on(where) as timer:
        model = row.make(small).to(where)
        wide = {each: tensor.to(where) for each, tensor in row.batch(small).items()}
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # convolutions in float32 proper
            expected = model(*wide.values()).double()
        kind = getattr(torch, dtype)
        model, inputs = model.to(kind), cast(wide, kind)
        for column, source in columns.items():
            make: Callable[..., Subject] = partial(in_torch, model, source, tuple(inputs.values()))
            try:
                with measuring_library() if column == MEASURED else nullcontext("custom_ops") as library:
                    if COLUMNS[column] in KINDS:
                        make = partial(in_ort, source, inputs, expected, library)
                    graph = row.graph and timer is not None
                    subjects[column] = checked(make, expected, wide.get("mask"), graph)
            except Exception as failure:  # of a compiler or a runtime: the reason stands in the table
                reasons[column] = reason_of(failure)
        label = {"op": name, "dtype": dtype, "device": where.type, "shape": shape_of(inputs)}
        seconds = 1.0 if timer is None else 2.0
        rows = timed(subjects, timer, label, rounds=rounds, seconds=seconds)
    return {"rows": rows, "reasons": reasons}


def shape_of(inputs: Mapping[str, Tensor]) -> str:
    """Returns the shape of the first input as reports write it."""
    return "x".join(str(size) for size in next(iter(inputs.values())).shape)


def checked(
    make: Callable[..., Subject], expected: Tensor, mask: Tensor | None, graph: bool = False
) -> Subject:
    """Returns a subject with its error among its facts.

    Args:
        make: takes whether the run is to be a CUDA graph.
        mask: the tokens that count, if not all.
        graph: make a CUDA graph of it if that works.
    """
    facts: dict[str, Any] = {"graph": True} if graph else {}
    try:
        subject = make(graph=graph)
    except Exception as failure:  # a model that waits for the GPU
        if not graph:
            raise
        subject, facts = make(graph=False), {"no_graph": reason_of(failure)}
    shown = mask[..., None] if mask is not None else 1
    error = relative_error(subject.result()[0] * shown, expected * shown)
    return replace(subject, facts={"error": error} | subject.facts | facts)


def timed(
    subjects: Mapping[str, Subject],
    timer: DeviceTimer | None,
    label: Mapping[str, Any],
    *,
    rounds: int,
    seconds: float,
) -> list[dict[str, Any]]:
    """Measures subjects in turn, on the device and with the wait for it, and returns their rows."""
    runs = {name: subject.run for name, subject in subjects.items()}
    times = timer.times(runs, rounds=rounds) if timer is not None else None
    after = partial(torch.cuda.synchronize, timer.stream.device) if timer is not None else None
    wall = host_times(runs, rounds=rounds, seconds=seconds, after=after)
    times = times or wall
    return [
        {**label, "provider": name}
        | times[name].row()
        | {"wall_us": round(wall[name].median * 1e6, 1)}
        | subject.facts
        for name, subject in subjects.items()
    ]


@contextmanager
def measuring_library() -> Iterator[Path]:
    """Yields a copy of the ops whose products measure cuBLASLt's algorithms when a shape first comes.

    A library decides this once for its process; the copy has a state of its own.
    """
    with tempfile.TemporaryDirectory() as folder:
        library = Path(shutil.copy(find_library("custom_ops"), folder))
        os.environ[ALGORITHMS] = str(Path(folder) / "algorithms.txt")
        try:
            yield library
        finally:
            del os.environ[ALGORITHMS]


def in_torch(model: nn.Module, mode: str, inputs: tuple[Tensor, ...], graph: bool) -> Subject:
    """Runs a model in torch.

    Args:
        mode: torch.compile's, or "" for eager.
    """
    call = torch.compile(model, dynamic=False, mode=mode) if mode else model
    run = partial(call, *inputs)
    for _ in range(3):
        run()
    if not graph:
        return Subject(run)
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded, stream=torch.cuda.current_stream()):
        output = run()
    return Subject(recorded.replay, (output,))


def in_ort(
    path: str, inputs: Mapping[str, Tensor], expected: Tensor, library: str | Path, graph: bool
) -> Subject:
    """Runs an export in ONNX Runtime, with its full graph optimisation."""
    proto = onnx.load(path)
    stream = torch.cuda.current_stream(expected.device) if expected.is_cuda else None
    last = proto.graph.output[0]
    kinds = {element: kind for kind, element in runtime.ONNX_TYPES.items()}
    output = torch.empty(expected.shape, dtype=kinds[last.type.tensor_type.elem_type], device=expected.device)
    names = {value.name for value in proto.graph.input}
    nodes: list[str] = []
    session = runtime.open_session(
        proto,
        output.device,
        library=library,
        cpu_threads=2,
        stream=stream,
        cuda_graph=graph,
        optimize=True,
        fallback=not graph,  # ONNX Runtime runs nodes that compute shapes on the CPU
        planned_nodes=nodes,
    )
    given = {name: tensor.contiguous() for name, tensor in inputs.items() if name in names}
    run = runtime.bind(session, given, {last.name: output}, synchronize=stream is None)
    for _ in range(3):  # the recording of a graph is among the first runs
        run()
    if stream is not None:
        torch.cuda.synchronize(stream.device)
    return Subject(run, (output,), {"nodes": dict(Counter(nodes).most_common())})
