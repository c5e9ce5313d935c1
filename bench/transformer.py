"""python -m twinop.bench encoder: a transformer in ONNX Runtime, with twinop's nodes and without."""

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
from twinop.bench import options, report, runtime
from twinop.bench.encoder import STYLES, TINY, Size, batch, encoder
from twinop.bench.providers import reason_of
from twinop.bench.runs import relative_error
from twinop.bench.timing import DeviceTimer, Run, Time, host_times
from twinop.console import clear_errors, err, out
from twinop.export import export

STOCK, OURS, AGAIN = "stock export", "twinop", "stock export again"
TOLERANCE = 5e-2  # of the output, in the 2-norm, against torch's own model: 16 bits through 12 layers
LEAST_NOISE = 0.01
REPLACED = ("add", "softmax")  # what the models write as functions; ONNX Runtime's are slow in 16 bits
KERNELS = 12  # of each profile, the dearest
# A smaller vocabulary than BERT's: the table of embeddings is read by row, and only makes the files large.
FULL = Size(vocabulary=2000)


@dataclass
class Subject:
    run: Run
    nodes: dict[str, int]  # by type, of the graph that runs
    output: Tensor


def exported(style: str, size: Size, dtype: torch.dtype, ours: bool, exporter: str) -> onnx.ModelProto:
    """The model as a file would hold it; open in the batch, so that tracing needs two sentences only."""
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
    """A session under ONNX Runtime's full graph optimisation, bound to tensors of the full batch."""
    nodes: list[str] = []
    session = runtime.open_session(
        proto,
        device,
        library="custom_ops",
        cpu_threads=2,
        stream=stream,
        optimize=True,
        fallback=True,  # ONNX Runtime itself keeps nodes that compute shapes on the CPU
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
    """The rows of one model and dtype, and the kernels that either export spends its time in."""
    stream = timer.stream if timer is not None else None
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
                text = f"{style}, {report_name(dtype)}, {name}: relative error {error:.1e}"
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
    label = {"op": style, "dtype": report_name(dtype), "device": device.type}
    rows = [
        label
        | {
            "shape": f"{size.batch}x{size.tokens}",
            "provider": name,
            "median_us": round(each.median * 1e6, 1),
            "low_us": round(each.low * 1e6, 1),
            "runs": each.runs,
            "nodes": subjects[STOCK if name == AGAIN else name].nodes,
        }
        for name, each in times.items()
    ]
    return rows, [label | row for row in kernels]


def profiled(run: Run, name: str, device: torch.device) -> list[dict[str, Any]]:
    """The dearest CUDA kernels of a run, by torch's profiler, which sees ONNX Runtime's as well."""
    from torch.profiler import ProfilerActivity, profile

    runs = 3
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(runs):
            run()
        torch.cuda.synchronize(device)
    events = [e for e in trace.key_averages() if e.self_device_time_total > 0]
    events.sort(key=lambda event: -event.self_device_time_total)
    whole = sum(event.self_device_time_total for event in events)
    rows = [
        {
            "provider": name,
            "kernel": event.key[:120],
            "calls": event.count / runs,
            "us": round(event.self_device_time_total / runs, 1),
            "share": round(event.self_device_time_total / whole, 4),
        }
        for event in events[:KERNELS]
    ]
    rest = sum(event.self_device_time_total for event in events[KERNELS:])
    count = sum(event.count for event in events[KERNELS:])
    if rest:
        others = {"calls": count / runs, "us": round(rest / runs, 1), "share": round(rest / whole, 4)}
        rows.append({"provider": name, "kernel": "all others"} | others)
    return rows


def report_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def bars(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for key in dict.fromkeys((row["op"], row["dtype"]) for row in rows):
        us = {r["provider"]: r["median_us"] for r in rows if (r["op"], r["dtype"]) == key}
        noise = max(LEAST_NOISE, abs(us[AGAIN] / us[STOCK] - 1))
        value = us[OURS] / us[STOCK]
        found.append(
            {
                "what": f"{key[0]}, {key[1]}: {OURS} / {STOCK}, time",
                "value": round(value, 3),
                "bar": f"<= 1 within {noise:.1%}",
                "passed": bool(value <= 1 + noise),
            }
        )
    return found


def show(rows: Sequence[Mapping[str, Any]], kernels: Sequence[Mapping[str, Any]]) -> None:
    table = report.table("Encoder in ONNX Runtime", ["", "ms", "nodes", "of twinop", "dearest types"])
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
    styles: Annotated[str, typer.Option(help="Of bert,llama.")] = ",".join(STYLES),
    dtypes: Annotated[
        str | None,
        typer.Option(help="Else bfloat16,float16 on a GPU, float32 on a CPU.", show_default=False),
    ] = None,
    exporter: Annotated[str, typer.Option(help="dynamo or torchscript, for both exports.")] = "torchscript",
    device: options.Device = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="A tiny model, few runs.")] = False,
    output: options.JsonFolder = None,
    commit: options.Commit = None,
) -> None:
    """Measure a transformer encoder in ONNX Runtime: twinop's nodes against torch's own export.

    Both run under ONNX Runtime's full graph optimisation, which fuses what it knows and does not know ours.
    On a GPU: device time of a batch of 32 x 512 tokens through 12 layers of width 768, and the kernels that
    either model spends it in.

    Example:

        python -m twinop.bench encoder --styles bert --dtypes bfloat16
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
        folder = report.output_folder(output)
        facts = report.environment(where, commit)
        report.print_environment(facts)
        before, started = report.clocks(where), time.perf_counter()
        timer = DeviceTimer(torch.cuda.Stream(where)) if on_gpu else None
        rows: list[dict[str, Any]] = []
        kernels: list[dict[str, Any]] = []
        missing: dict[str, str] = {}
        cases = [(style, name) for style in styles.split(",") for name in names.split(",")]
        with report.progress("encoder", len(cases)) as step:
            for style, name in cases:
                step(f"{style} {name}")
                try:
                    found = compare(
                        style, size, getattr(torch, name), where, exporter, timer, 7 if quick else 21
                    )
                except Exception as failure:  # a node without a kernel, an exporter's limit
                    missing[f"{style}, {name}"] = reason_of(failure)
                    err.print(f"not measured: {style}, {name}: {failure}", markup=False, soft_wrap=True)
                    continue
                rows += found[0]
                kernels += found[1]
        show(rows, kernels)
        verdicts = bars(rows)
        report.show_bars(verdicts)
        report.write_json(
            folder / f"encoder-{report.machine_name(facts)}.json",
            "encoder",
            facts,
            settings={"exporter": exporter, "size": vars(size), "seconds": time.perf_counter() - started},
            clocks={"before": before, "after": report.clocks(where)},
            not_measured=missing,
            bars=verdicts,
            rows=rows,
            kernels=kernels,
        )
        if quick:
            out.print("quick: for a look, not for the record", highlight=False)
