"""The columns of `twinop bench models`: a model in torch and in ONNX Runtime, each as a run to time."""

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor, nn

from twinop.library import find_library

from . import runtime
from .cases import relative_error
from .model_exports import KINDS, ORTS, OURS, STOCK, dtype_of
from .model_zoo import ROWS
from .report import reason_of
from .timing import DeviceTimer, Run, host_times

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


def measure(
    name: str, small: bool, device: str, files: Mapping[str, str], columns: Sequence[str], rounds: int
) -> dict[str, Any]:
    """Measures the columns of a row, in turn. Runs in a process of its own.

    Args:
        files: of the exports, by kind; an export that is missing has no column.

    Returns:
        {"rows": a row for each column that ran, "reasons": why the others did not}
    """
    row, where = ROWS[name], torch.device(device)
    timer = DeviceTimer(torch.cuda.Stream(where)) if where.type == "cuda" else None
    runs: dict[str, Run] = {}
    facts: dict[str, dict[str, Any]] = {}
    reasons: dict[str, str] = {}
    with torch.no_grad(), on_stream(timer):
        model = row.model(small).to(where)
        wide = {each: tensor.to(where) for each, tensor in row.batch(small).items()}
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # convolutions in float32 proper
            expected = model(*wide.values()).double()
        dtype = dtype_of(row, where)
        model = model.to(dtype)
        inputs = {each: x.to(dtype) if x.is_floating_point() else x for each, x in wide.items()}
        shown = wide["mask"][..., None] if "mask" in wide else torch.ones((), device=where)
        for column in columns:
            kind = COLUMNS[column]
            if kind in KINDS and kind not in files:
                continue
            try:
                if kind in KINDS:
                    with measuring_library() if column == MEASURED else nullcontext("custom_ops") as library:
                        run, output, fact = in_ort(
                            files[kind], inputs, expected, dtype, timer, row.graph, library
                        )
                else:
                    run, output, fact = in_torch(model, kind, tuple(inputs.values()), timer, row.graph)
                error = relative_error(output() * shown, expected * shown)
            except Exception as failure:  # of a compiler or a runtime: the reason stands in the table
                reasons[column] = reason_of(failure)
                continue
            runs[column], facts[column] = run, {"error": error} | fact
        if timer is None:
            times = host_times(runs, rounds=rounds, seconds=1.0)
            wall = times
        else:
            times = timer.times(runs, rounds=rounds)
            wall = host_times(runs, rounds=rounds, seconds=2.0, after=partial(torch.cuda.synchronize, where))
    shape = "x".join(str(size) for size in next(iter(wide.values())).shape)
    label = {"op": name, "dtype": str(dtype).removeprefix("torch."), "device": where.type, "shape": shape}
    rows = [
        label
        | {"provider": column}
        | times[column].row()
        | {"wall_us": round(wall[column].median * 1e6, 1)}
        | facts[column]
        for column in runs
    ]
    return {"rows": rows, "reasons": reasons}


@contextmanager
def on_stream(timer: DeviceTimer | None) -> Iterator[None]:
    """Makes the timer's stream torch's current one, behind what was queued before."""
    if timer is None:
        yield
        return
    torch.cuda.synchronize(timer.stream.device)
    with torch.cuda.stream(timer.stream):
        yield


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


Ran = tuple[Run, Any, dict[str, Any]]
"""A run, what returns its output, and facts about it."""


def in_torch(
    model: nn.Module, mode: str, inputs: tuple[Tensor, ...], timer: DeviceTimer | None, graph: bool
) -> Ran:
    """Runs a model in torch.

    Args:
        mode: torch.compile's, or "" for eager.
        graph: replay a CUDA graph.
    """
    call = torch.compile(model, dynamic=False, mode=mode) if mode else model
    run = partial(call, *inputs)
    for _ in range(3):
        output = run()
    if timer is None or not graph:
        return run, run, {}
    torch.cuda.synchronize(timer.stream.device)
    recorded = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(recorded, stream=timer.stream):
            output = run()
    except Exception as failure:  # a model that waits for the GPU
        return run, run, {"no_graph": reason_of(failure)}
    recorded.replay()
    return recorded.replay, lambda: output, {"graph": True}


def in_ort(
    path: str,
    inputs: Mapping[str, Tensor],
    expected: Tensor,
    dtype: torch.dtype,
    timer: DeviceTimer | None,
    graph: bool,
    library: str | Path = "custom_ops",
) -> Ran:
    """Runs an export in ONNX Runtime, with its full graph optimisation; in a CUDA graph if it can."""
    proto = onnx.load(path)
    stream = timer.stream if timer is not None else None
    graph = graph and stream is not None
    last = proto.graph.output[0]
    kinds = {element: kind for kind, element in runtime.ONNX_TYPES.items()}
    output = torch.empty(expected.shape, dtype=kinds[last.type.tensor_type.elem_type], device=expected.device)
    names = {value.name for value in proto.graph.input}
    given = {name: tensor.contiguous() for name, tensor in inputs.items() if name in names}
    reason = ""
    while True:
        nodes: list[str] = []
        try:
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
            run = runtime.bind(session, given, {last.name: output}, synchronize=stream is None)
            for _ in range(3):  # the recording of a graph is among the first runs
                run()
            if stream is not None:
                torch.cuda.synchronize(stream.device)
        except Exception as failure:
            if not graph:
                raise
            reason, graph = reason_of(failure), False
            continue
        break
    facts: dict[str, Any] = {"nodes": dict(Counter(nodes).most_common())}
    facts |= {"graph": True} if graph else {"no_graph": reason} if reason else {}
    return run, lambda: output, facts
