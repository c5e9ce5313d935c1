"""A transformer in ONNX Runtime, with and without twinop's nodes: `twinop bench encoder`."""

import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import onnx
import torch
import typer
from torch import Tensor

from twinop import torch_op
from twinop.console import clear_errors, err, out
from twinop.export import export

from . import report, runtime
from .cases import relative_error
from .encoder_models import STYLES, TINY, Size, batch, encoder
from .providers import reason_of
from .recording import Commit, Device, Output, Recording
from .timing import DeviceTimer, Run, Time, host_times

STOCK, OURS, AGAIN = "stock export", "twinop", "stock export again"
TOLERANCE = 5e-2  # largest relative error of the output against torch: 16 bits through 12 layers
LEAST_NOISE = 0.01
REPLACED = ("add", "softmax")  # the models call these as functions; ONNX Runtime's are slow in 16 bits
KERNELS = 12  # the kernels of each profile that take longest
# A smaller vocabulary than BERT's: embeddings are read by row, and a large table only makes large files.
FULL = Size(vocabulary=2000)


@dataclass
class Subject:
    """A session to measure: its run, the number of its nodes by type, and its output."""

    run: Run
    nodes: dict[str, int]
    output: Tensor


def exported(style: str, size: Size, dtype: torch.dtype, ours: bool, exporter: str) -> onnx.ModelProto:
    """Exports a model with a dynamic batch dimension, from two sentences to make tracing cheap."""
    model = encoder(style, size).to(dtype)
    if ours:
        torch_op.replace_modules(model)
    few = replace(size, batch=2)
    dynamic = {name: {0: "batch"} for name in ("ids", "mask")}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "encoder.onnx"
        ops = REPLACED if ours else ()
        export(model, batch(few), path, exporter=exporter, dynamic=dynamic, replace=ops, verify=False)
        return onnx.load(path)


def subject(
    proto: onnx.ModelProto,
    size: Size,
    dtype: torch.dtype,
    device: torch.device,
    stream: torch.cuda.Stream | None,
) -> Subject:
    """Opens a session with ONNX Runtime's full graph optimisation, bound to tensors of the full batch."""
    nodes: list[str] = []
    session = runtime.open_session(
        proto,
        device,
        cpu_threads=2,
        stream=stream,
        optimize=True,
        fallback=True,  # ONNX Runtime runs nodes that compute shapes on the CPU
        planned_nodes=nodes,
    )
    names = [value.name for value in session.get_inputs()]
    inputs = dict(zip(names, (tensor.to(device) for tensor in batch(size)), strict=True))
    output = torch.empty(size.batch, size.tokens, size.width, dtype=dtype, device=device)
    outputs = {session.get_outputs()[0].name: output}
    run = runtime.bind(session, inputs, outputs, synchronize=stream is None)
    return Subject(run, dict(Counter(nodes).most_common()), output)


def compare(
    style: str,
    size: Size,
    dtype: torch.dtype,
    device: torch.device,
    exporter: str,
    timer: DeviceTimer | None,
    rounds: int,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Measures both exports of one model.

    Returns:
        A row for each export, and the kernels that take most of each export's time.

    Raises:
        BenchError: an export's output differs from torch's.
    """
    stream = timer.stream if timer is not None else None
    dtype_name = str(dtype).removeprefix("torch.")
    subjects: dict[str, Subject] = {}
    with torch.no_grad():
        model = encoder(style, size).to(dtype).to(device)
        expected = model(*(tensor.to(device) for tensor in batch(size)))
        for name in (STOCK, OURS):
            proto = exported(style, size, dtype, name == OURS, exporter)
            found = subject(proto, size, dtype, device, stream)
            found.run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            error = relative_error(found.output, expected.double())
            if not error <= TOLERANCE:
                text = f"{style}, {dtype_name}, {name}: relative error {error:.1e}"
                raise report.BenchError(f"{text} against torch: nothing is measured")
            subjects[name] = found
    runs = {name: found.run for name, found in subjects.items()} | {AGAIN: subjects[STOCK].run}
    times: Mapping[str, Time]
    if timer is not None:
        times = timer.times(runs, rounds=rounds)
        kernels = [row for name, found in subjects.items() for row in profiled(found.run, name, device)]
    else:
        times = host_times(runs, rounds=rounds, seconds=2.0)
        kernels = []
    label = {"op": style, "dtype": dtype_name, "device": device.type}
    rows = [
        label
        | {"shape": f"{size.batch}x{size.tokens}", "provider": name}
        | each.row()
        | {"nodes": subjects[STOCK if name == AGAIN else name].nodes}
        for name, each in times.items()
    ]
    return rows, [label | row for row in kernels]


def profiled(run: Run, name: str, device: torch.device) -> list[dict[str, Any]]:
    """Returns the CUDA kernels that take longest, from torch's profiler, which sees ONNX Runtime's too."""
    from torch.profiler import ProfilerActivity, profile

    runs = 3
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(runs):
            run()
        torch.cuda.synchronize(device)
    events = [e for e in trace.key_averages() if e.self_device_time_total > 0]
    events.sort(key=lambda event: -event.self_device_time_total)
    whole = sum(event.self_device_time_total for event in events)

    def row(kernel: str, chosen: Sequence[Any]) -> dict[str, Any]:
        spent = sum(event.self_device_time_total for event in chosen)
        calls = sum(event.count for event in chosen) / runs
        shares = {"calls": calls, "us": round(spent / runs, 1), "share": round(spent / whole, 4)}
        return {"provider": name, "kernel": kernel} | shares

    rows = [row(event.key[:120], [event]) for event in events[:KERNELS]]
    return rows + ([row("all others", events[KERNELS:])] if events[KERNELS:] else [])


def bars(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns a verdict for each model: twinop's export is not slower than the stock export."""
    found = []
    for key in dict.fromkeys((row["op"], row["dtype"]) for row in rows):
        us = {r["provider"]: r["median_us"] for r in rows if (r["op"], r["dtype"]) == key}
        noise = max(LEAST_NOISE, abs(us[AGAIN] / us[STOCK] - 1))
        what = f"{key[0]}, {key[1]}: {OURS} / {STOCK}, time"
        found.append(report.bar(what, us[OURS] / us[STOCK], 1, tolerance=noise))
    return found


def show(rows: Sequence[Mapping[str, Any]], kernels: Sequence[Mapping[str, Any]]) -> None:
    columns = ["", "ms", "nodes", "twinop's nodes", "most frequent types"]
    table = report.table("Encoder in ONNX Runtime", columns)
    for row in rows:
        if row["provider"] == AGAIN:
            continue
        nodes = row["nodes"]
        custom = sum(count for name, count in nodes.items() if name.startswith("Custom"))
        types = ", ".join(f"{count} {name}" for name, count in list(nodes.items())[:6])
        cells = (f"{row['median_us'] / 1e3:.3f}", str(sum(nodes.values())), str(custom), types)
        table.add_row(f"{row['op']}, {row['dtype']}, {row['shape']}, {row['provider']}", *cells)
    report.show(table)
    for key in dict.fromkeys((k["op"], k["dtype"], k["provider"]) for k in kernels):
        table = report.table(", ".join(key), ["kernel", "calls", "us", "share"])
        for each in kernels:
            if (each["op"], each["dtype"], each["provider"]) == key:
                numbers = (f"{each['calls']:.0f}", f"{each['us']:.0f}", f"{each['share']:.1%}")
                table.add_row(each["kernel"][:100], *numbers)
        report.show(table)


def main(
    styles: Annotated[str, typer.Option(help="Models to measure: bert,llama.")] = ",".join(STYLES),
    dtypes: Annotated[
        str | None,
        typer.Option(help="Default: bfloat16,float16 on a GPU, float32 on a CPU.", show_default=False),
    ] = None,
    exporter: Annotated[
        str, typer.Option(help="The exporter of both: dynamo or torchscript.")
    ] = "torchscript",
    device: Device = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="A quick look: a tiny model, few runs.")] = False,
    output: Output = None,
    commit: Commit = None,
) -> None:
    """Measure a transformer encoder in ONNX Runtime: twinop's nodes against torch's own export.

    Both run with ONNX Runtime's full graph optimisation, which fuses the nodes that it knows and leaves
    twinop's as they are. On a GPU: device time of a batch of 32 x 512 tokens through 12 layers of width 768,
    and the kernels in which each export spends it.

    Example:

        twinop bench encoder --styles bert --dtypes bfloat16
    """
    with clear_errors():
        where = report.choose_device(device)
        on_gpu = where.type == "cuda"
        names = dtypes or ("bfloat16,float16" if on_gpu else "float32")
        if unknown := [name for name in styles.split(",") if name not in STYLES]:
            raise report.BenchError(f"--styles {','.join(unknown)}: expected some of {', '.join(STYLES)}")
        if unknown := [name for name in names.split(",") if not hasattr(torch, name)]:
            raise report.BenchError(f"--dtypes {','.join(unknown)}: expected bfloat16, float16 or float32")
        size = TINY if quick or not on_gpu else FULL
        recording, started = Recording("encoder", where, output, commit), time.perf_counter()
        timer = DeviceTimer(torch.cuda.Stream(where)) if on_gpu else None
        rows: list[dict[str, Any]] = []
        kernels: list[dict[str, Any]] = []
        missing: dict[str, str] = {}
        cases = [(style, name) for style in styles.split(",") for name in names.split(",")]
        with report.progress("encoder", len(cases)) as step:
            for style, name in cases:
                step(f"{style} {name}")
                dtype, rounds = getattr(torch, name), 7 if quick else 21
                try:
                    found = compare(style, size, dtype, where, exporter, timer, rounds)
                except Exception as failure:  # a node without a kernel, or a limit of the exporter
                    missing[f"{style}, {name}"] = reason_of(failure)
                    err.print(f"not measured: {style}, {name}: {failure}", markup=False, soft_wrap=True)
                    continue
                rows += found[0]
                kernels += found[1]
        show(rows, kernels)
        verdicts = bars(rows)
        report.show_bars(verdicts)
        settings = {"exporter": exporter, "size": vars(size), "seconds": time.perf_counter() - started}
        recording.write(settings=settings, not_measured=missing, bars=verdicts, rows=rows, kernels=kernels)
        if quick:
            out.print("This was a quick look: do not record it.", highlight=False)
