"""Whole models in torch and in ONNX Runtime, exported, with its own optimizer and with `twinop optimize`.

    python lab/models.py --models bert-fp16,vit

Each model is exported in a process of its own while others are measured, and measured in another one.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import onnx
import torch
import typer
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lab.model_zoo import ROWS, TINY, Row, cast
from twinop.bench import runtime
from twinop.bench.cases import relative_error
from twinop.bench.measure import Subject, captured, checked
from twinop.bench.measurements import Device, Measurements, Output, choose_device, chosen, reason_of
from twinop.bench.timing import host_times, timer_on
from twinop.cli.console import program
from twinop.export import export
from twinop.optimize import optimize
from twinop.record.dtypes import dtype_name

STOCK, ORTS, OURS = "stock.onnx", "ort-optimizer.onnx", "twinop.onnx"
COLUMNS = {"torch eager": "", "torch.compile": "default"}
COLUMNS |= {"ORT stock": STOCK, "ORT optimizer": ORTS, "twinop": OURS}
"""The columns: torch.compile's mode, or the export."""
BATCH = ("batch",)
FEW = 2  # exports and comparisons take a batch of two, as the batch dimension stays open
FACTS = ("nodes_before", "nodes_after", "fused", "skipped", "reverted", "notes", "error", "own_error")
EXPORTS = 5  # at a time: the rest of 16 cores compiles
LIMIT = 400  # seconds of a process
Inputs = Mapping[str, Tensor]


def export_all(name: str, dtype: str, small: bool, folder: Path) -> dict[str, Any]:
    """Writes the exports of a model. Returns what the optimizers say of each, or why it failed."""
    row, found = ROWS[name], {}
    inputs = row.batch(small, None if row.graph else FEW)
    for file, make in {STOCK: _stock, ORTS: _by_ort, OURS: _by_us}.items():
        try:
            found[file] = make(row, inputs, dtype, small, folder)
        except Exception as failure:  # of an exporter or an optimizer: it is the column's result
            found[file] = {"failure": reason_of(failure)}
    return found


def torch_export(
    model: nn.Module, inputs: Inputs, path: Path, exporter: str = "dynamo", dynamic: Sequence[str] = BATCH
) -> None:
    """Writes torch's own export; `dynamic` names the leading dimensions that stay open."""
    shapes = {name: dict(enumerate(dynamic)) for name in inputs} if dynamic else None
    options: dict[str, Any] = {"exporter": exporter, "dynamic": shapes, "verify": False, "optimize": False}
    export(model, tuple(inputs.values()), path, **options)


def _stock(row: Row, inputs: Inputs, dtype: str, small: bool, folder: Path) -> dict[str, Any]:
    model, narrow = row.make(small, row.model.exported), getattr(torch, dtype)
    torch_export(model.to(narrow), cast(inputs, narrow), folder / STOCK, dynamic=() if row.graph else BATCH)
    return {}


def _by_us(row: Row, inputs: Inputs, dtype: str, small: bool, folder: Path) -> dict[str, Any]:
    source, inputs_file = folder / "wide.onnx", folder / "inputs.npz"
    torch_export(row.make(small, row.model.exported), inputs, source, dynamic=() if row.graph else BATCH)
    np.savez(inputs_file, **{name: x.numpy() for name, x in inputs.items()})  # type: ignore[arg-type]
    padding = "right" if "mask" in inputs else None
    options: dict[str, Any] = {"device": "cuda", "dtype": dtype, "padding": padding}
    said = asdict(optimize(source, folder / OURS, inputs_file=inputs_file, **options))
    return {name: said[name] for name in FACTS}


def _by_ort(row: Row, inputs: Inputs, dtype: str, small: bool, folder: Path) -> dict[str, Any]:
    """ONNX Runtime's own optimizer, whose conversion knows float16 only: bfloat16 is exported as such."""
    from onnxruntime.transformers import optimizer

    source = folder / "torchscript.onnx"
    model = row.make(small, attention="eager")  # the form that it recognises
    if dtype == "bfloat16":
        model, inputs = model.to(torch.bfloat16), cast(inputs, torch.bfloat16)
    torch_export(model, inputs, source, "torchscript", dynamic=() if row.graph else BATCH)
    size = TINY if small else row.size
    sizes = {"num_heads": size.heads, "hidden_size": size.width}
    options = {"model_type": row.model.model_type, "opt_level": 0, "use_gpu": True}
    made = optimizer.optimize_model(str(source), **options, **sizes)
    if dtype == "float16":
        made.convert_float_to_float16(keep_io_types=False)
    onnx.save(made.model, str(folder / ORTS))
    return {"fused": {kind: count for kind, count in made.get_fused_operator_statistics().items() if count}}


def measure(name: str, dtype: str, small: bool, device: torch.device, folder: Path) -> dict[str, Any]:
    """Measures the columns of a model, in turn, and returns the line about it."""
    model = ROWS[name]
    graph = model.graph and device.type == "cuda"
    exports = json.loads((folder / "exports.json").read_text())
    times: dict[str, Any] = {}
    with torch.no_grad(), timer_on(device) as timer:
        module = model.make(small).to(device)
        wide = {each: tensor.to(device) for each, tensor in model.batch(small).items()}
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # convolutions in float32 proper
            expected = module(*wide.values()).double()
        module, inputs = module.to(getattr(torch, dtype)), cast(wide, getattr(torch, dtype))
        made: dict[str, Callable[[], Subject]] = {}
        for column, source in COLUMNS.items():
            made[column] = partial(in_torch, module, source, tuple(inputs.values()), graph)
            if source.endswith(".onnx"):
                made[column] = partial(in_ort, folder / source, inputs, expected, graph)
        shown = wide["mask"][..., None] if "mask" in wide else 1  # the tokens that count

        def check(_: str, subject: Subject) -> None:
            subject.facts["error"] = relative_error(subject.result()[0] * shown, expected * shown)
            subject.facts |= {"graph": True} if graph else {}

        subjects, missing = checked(made, check)
        said = {column: exports.get(COLUMNS[column], {}).get("failure") for column in missing}
        missing |= {column: why for column, why in said.items() if why}
        runs = {column: subject.run for column, subject in subjects.items()}
        rounds = 5 if small else 21
        after = partial(torch.cuda.synchronize, device) if timer is not None else None
        wall = host_times(runs, rounds=rounds, seconds=2.0, after=after)
        queued = timer.times(runs, rounds=rounds) if timer is not None else wall
        for column, subject in subjects.items():
            waited = {"wall_us": round(wall[column]["median_us"], 1)}
            times[column] = queued[column] | waited | subject.facts
    shape = "x".join(map(str, next(iter(inputs.values())).shape))
    line = {"op": name, "dtype": dtype, "shape": shape, "times": times, "missing": missing}
    return line | {"exports": exports}


def in_torch(model: nn.Module, mode: str, inputs: tuple[Tensor, ...], graph: bool) -> Subject:
    """Runs a model in torch; `mode` is torch.compile's, or "" for eager."""
    call = torch.compile(model, dynamic=False, mode=mode) if mode else model
    run = partial(call, *inputs)
    if graph:
        return captured(run, torch.cuda.current_stream())
    for _ in range(3):
        run()
    return Subject(run)


def in_ort(path: Path, inputs: Mapping[str, Tensor], expected: Tensor, graph: bool) -> Subject:
    """Runs an export in ONNX Runtime, with its full graph optimisation."""
    proto = onnx.load(path)
    stream = torch.cuda.current_stream(expected.device) if expected.is_cuda else None
    last = proto.graph.output[0]
    kind = getattr(torch, dtype_name(last.type.tensor_type.elem_type))
    output = torch.empty(expected.shape, dtype=kind, device=expected.device)
    names = {value.name for value in proto.graph.input}
    nodes: list[str] = []
    options: dict[str, Any] = {"stream": stream, "cuda_graph": graph, "planned_nodes": nodes}
    options["fallback"] = not graph  # ONNX Runtime runs nodes that compute shapes on the CPU
    source = path if proto.ByteSize() >> 31 else proto  # protobuf's limit
    session = runtime.open_session(source, output.device, cpu_threads=2, optimize=True, **options)
    given = {name: tensor.contiguous() for name, tensor in inputs.items() if name in names}
    run = runtime.bind(session, given, {last.name: output}, synchronize=stream is None)
    for _ in range(3):  # the recording of a graph is among the first runs
        run()
    if stream is not None:
        torch.cuda.synchronize(stream.device)
    return Subject(run, (output,), {"nodes": dict(Counter(nodes).most_common())})


def run_step(step: str, name: str, arguments: Sequence[str]) -> str:
    """Runs this program for one step of one model. Returns why it failed, or ""."""
    command = [sys.executable, __file__, "--models", name, "--step", step, *arguments]
    beside = {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": ""}
    environment = os.environ | (beside if step == "export" else {})
    try:
        done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return f"stopped after {LIMIT} s"
    return f"exit code {done.returncode}: {done.stderr[-300:]}" if done.returncode else ""


def main(
    models: Annotated[str, typer.Option(help="Models to measure. Default: all.")] = "",
    device: Device = "auto",
    small: Annotated[bool, typer.Option("--small", help="Tiny models: shows that everything runs.")] = False,
    output: Output = None,
    dtype: Annotated[str, typer.Option(hidden=True)] = "",
    step: Annotated[str, typer.Option(hidden=True)] = "",
    folder: Annotated[Path, typer.Option(hidden=True)] = Path(),
) -> None:
    """Measure whole models in torch, in ONNX Runtime with its own optimizer, and with twinop's.

    It is device time behind a cold L2, wall time, and the error against float32 in torch, of models with
    random weights. All models take about 12 minutes on an H200.
    """
    if step == "export":  # in a process that sees no GPU
        said = export_all(models, dtype, small, folder)
        (folder / "exports.json").write_text(json.dumps(said))
        return
    where = choose_device(device)
    names = chosen("--models", models, list(ROWS)) if models else list(ROWS)
    if step == "measure":
        measured = Measurements("models", where, output, small)
        measured.say(measure(models, dtype, small, where, folder))
        return
    to = [f"--device={where.type}", *([f"--output={output}"] if output else [])]
    with tempfile.TemporaryDirectory() as work, ThreadPoolExecutor(EXPORTS) as pool:
        steps = {}
        for name in names:
            # A CPU's kernels of 16 bits are slow.
            kind = ROWS[name].dtype if where.type == "cuda" else "float32"
            folder = Path(tempfile.mkdtemp(dir=work))
            steps[name] = [*["--small"] * small, f"--dtype={kind}", f"--folder={folder}"]
        exports = {name: pool.submit(run_step, "export", name, each) for name, each in steps.items()}
        if where.type == "cpu":
            wait(exports.values())
        for name, each in steps.items():
            why = exports[name].result() or run_step("measure", name, [*each, *to])
            if why:
                print(f"not measured: {name}: {why}")


if __name__ == "__main__":
    program(main)()
