"""A transformer in ONNX Runtime, with and without twinop's nodes: `twinop bench encoder`."""

import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
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


def opened(
    proto: onnx.ModelProto, size: Size, output: Tensor, stream: torch.cuda.Stream | None
) -> tuple[Run, dict[str, int]]:
    """Opens a session with ONNX Runtime's full graph optimisation, on a full batch.

    Args:
        output: where the session writes; on the device of the session.

    Returns:
        A run of the session, and the number of its nodes by type.
    """
    nodes: list[str] = []
    session = runtime.open_session(
        proto,
        output.device,
        cpu_threads=2,
        stream=stream,
        optimize=True,
        fallback=True,  # ONNX Runtime runs nodes that compute shapes on the CPU
        planned_nodes=nodes,
    )
    names = [value.name for value in session.get_inputs()]
    inputs = dict(zip(names, (tensor.to(output.device) for tensor in batch(size)), strict=True))
    outputs = {session.get_outputs()[0].name: output}
    run = runtime.bind(session, inputs, outputs, synchronize=stream is None)
    return run, dict(Counter(nodes).most_common())


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
    dtype_name = str(dtype).removeprefix("torch.")
    runs: dict[str, Run] = {}
    nodes: dict[str, dict[str, int]] = {}
    with torch.no_grad():
        model = encoder(style, size).to(dtype).to(device)
        expected = model(*(tensor.to(device) for tensor in batch(size)))
        for name in (STOCK, OURS):
            proto = exported(style, size, dtype, name == OURS, exporter)
            output = torch.empty_like(expected, memory_format=torch.contiguous_format)
            runs[name], nodes[name] = opened(proto, size, output, timer.stream if timer is not None else None)
            runs[name]()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            error = relative_error(output, expected.double())
            if not error <= TOLERANCE:
                text = f"{style}, {dtype_name}, {name}: relative error {error:.1e}"
                raise report.BenchError(f"{text} against torch: nothing is measured")
    again = runs | {AGAIN: runs[STOCK]}
    times: Mapping[str, Time]
    kernels: list[dict[str, Any]] = []
    if timer is not None:
        times = timer.times(again, rounds=rounds)
        kernels = [{"provider": name} | row for name, run in runs.items() for row in profiled(run, device)]
    else:
        times = host_times(again, rounds=rounds, seconds=2.0)
    label = {"op": style, "dtype": dtype_name, "device": device.type}
    shape = {"shape": f"{size.batch}x{size.tokens}"}
    rows = [
        label | shape | {"provider": name} | each.row() | {"nodes": nodes.get(name, nodes[STOCK])}
        for name, each in times.items()
    ]
    return rows, [label | row for row in kernels]


def profiled(run: Run, device: torch.device) -> list[dict[str, Any]]:
    """Returns the CUDA kernels that take longest, from torch's profiler, which sees ONNX Runtime's too."""
    from torch.profiler import ProfilerActivity, profile

    runs = 3
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(runs):
            run()
        torch.cuda.synchronize(device)
    events = sorted(trace.key_averages(), key=lambda event: -event.self_device_time_total)
    whole = sum(event.self_device_time_total for event in events)
    return [
        {
            "kernel": event.key[:120],
            "calls": event.count / runs,
            "us": round(event.self_device_time_total / runs, 1),
            "share": round(event.self_device_time_total / whole, 4),
        }
        for event in events[:KERNELS]
    ]


def bars(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns a verdict for each model: twinop's export is not slower than the stock export."""
    found = []
    for key in dict.fromkeys((row["op"], row["dtype"]) for row in rows):
        us = {r["provider"]: r["median_us"] for r in rows if (r["op"], r["dtype"]) == key}
        noise = max(LEAST_NOISE, abs(us[AGAIN] / us[STOCK] - 1))
        what = f"{key[0]}, {key[1]}: {OURS} / {STOCK}, time"
        found.append(report.bar(what, us[OURS] / us[STOCK], 1, tolerance=noise))
    return found


def main(
    styles: Annotated[str, typer.Option(help="Models to measure: bert,llama.")] = ",".join(STYLES),
    dtypes: Annotated[
        str | None,
        typer.Option(help="Default: bfloat16,float16 on a GPU, float32 on a CPU.", show_default=False),
    ] = None,
    exporter: Annotated[str, typer.Option(help="The exporter of both: dynamo or torchscript.")] = "dynamo",
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
        models = report.chosen("--styles", styles, list(STYLES))
        kinds = report.chosen("--dtypes", names, ("bfloat16", "float16", "float32"))
        size = TINY if quick or not on_gpu else FULL
        recording, started = Recording("encoder", where, output, commit), time.perf_counter()
        timer = DeviceTimer(torch.cuda.Stream(where)) if on_gpu else None
        rows: list[dict[str, Any]] = []
        kernels: list[dict[str, Any]] = []
        missing: dict[str, str] = {}
        cases = [(style, name) for style in models for name in kinds]
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
        columns = ("op", "dtype", "shape", "provider", "median_us", "nodes")
        report.show_rows("Encoder in ONNX Runtime", rows, columns)
        if kernels:
            report.show_rows("Kernels", kernels, list(kernels[0]))
        verdicts = bars(rows)
        report.show_bars(verdicts)
        settings = {"exporter": exporter, "size": vars(size), "seconds": time.perf_counter() - started}
        recording.write(settings=settings, not_measured=missing, bars=verdicts, rows=rows, kernels=kernels)
        if quick:
            out.print("This was a quick look: do not record it.", highlight=False)
