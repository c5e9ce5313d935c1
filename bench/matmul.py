"""python -m twinop.bench matmul: the teaching kernel, naive and tiled, beside cuBLAS."""

from collections.abc import Mapping
from typing import Annotated, Any

import torch
import typer
from onnx import helper

from twinop.bench import options, report, runtime
from twinop.bench.report import BenchError
from twinop.bench.runs import relative_error
from twinop.bench.timing import DeviceTimer, Run, Time, host_times
from twinop.console import clear_errors, out
from twinop.record import DOMAIN
from twinop.torch_op.registry import functions

NAIVE, TILED, TILED_ORT = "naive", "tiled", "tiled, in ORT"
SIZES = ((512, 512, 512), (1024, 1024, 1024), (2048, 2048, 2048), (4096, 4096, 4096), (1000, 777, 1234))
CPU_SIZES = ((128, 128, 128), (256, 256, 256), (100, 77, 123))
_TOLERANCE = 1e-4


def subjects(m: int, n: int, k: int, device: torch.device, session: Any, library: str) -> dict[str, Run]:
    """Checked runs of (m, k) @ (k, n).

    Raises:
        BenchError: one of them is wrong.
    """
    a, b = torch.randn(m, k, device=device), torch.randn(k, n, device=device)
    y = torch.empty(m, n, device=device)
    matmul = functions["matmul"]
    asynchronous = device.type == "cuda"
    in_ort = runtime.bind(session, {"a": a, "b": b}, {"y": y}, synchronize=not asynchronous)
    runs: dict[str, Run] = {
        NAIVE: lambda: matmul(a, b, "naive"),
        TILED: lambda: matmul(a, b, "tiled"),
        TILED_ORT: in_ort,
        library: lambda: torch.matmul(a, b),
    }
    expected = a.double() @ b.double()
    for name, run in runs.items():
        y.fill_(float("nan"))
        result = run()
        error = relative_error(result if isinstance(result, torch.Tensor) else y, expected)
        if error > _TOLERANCE:
            raise BenchError(f"matmul, {name}, {m}x{n}x{k}: relative error {error:.1e}: nothing is measured")
    return runs


def measure(device: torch.device, quick: bool) -> list[dict[str, Any]]:
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    library = "cuBLAS (torch)" if stream is not None else "BLAS (torch)"
    node = helper.make_node("CustomMatmul", ["a", "b"], ["y"], "node0", domain=DOMAIN)
    some = torch.empty(1, 1)
    model = runtime.one_op([node], {"a": some, "b": some}, {"y": some})
    session = runtime.open_session(model, device, library="custom_ops", cpu_threads=2, stream=stream)
    sizes = SIZES if stream is not None else CPU_SIZES
    rows: list[dict[str, Any]] = []
    with (
        report.progress("matmul", len(sizes)) as step,
        torch.cuda.stream(stream),
        torch.no_grad(),
    ):
        timer = DeviceTimer(stream) if stream is not None else None
        for m, n, k in sizes[:2] if quick else sizes:
            step(f"{m}x{n}x{k}")
            runs = subjects(m, n, k, device, session, library)
            if timer is not None:
                times = timer.times(runs, rounds=7 if quick else 15)
            else:
                times = host_times(runs, rounds=51, seconds=0.2 if quick else 1.0)
            rows += rows_of(times, device.type, m, n, k)
    return rows


def rows_of(times: Mapping[str, Time], device: str, m: int, n: int, k: int) -> list[dict[str, Any]]:
    return [
        {
            "device": device,
            "dtype": "float32",
            "shape": f"{m}x{n}x{k}",
            "provider": name,
            "median_us": round(time.median * 1e6, 3),
            "low_us": round(time.low * 1e6, 3),
            "runs": time.runs,
            "tflop_per_s": round(2e-12 * m * n * k / time.median, 3),
        }
        for name, time in times.items()
    ]


def show(rows: list[dict[str, Any]]) -> None:
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    table = report.table(
        "matmul, float32: TFLOP/s",
        ["", *shapes],
        "The teaching kernels are there to be read; cuBLAS (without TF32) is what to use.",
    )
    for provider in dict.fromkeys(row["provider"] for row in rows):
        speeds = {row["shape"]: row["tflop_per_s"] for row in rows if row["provider"] == provider}
        table.add_row(provider, *(f"{speeds[shape]:.2f}" for shape in shapes))
    report.show(table)


def main(
    device: options.Device = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="Two sizes, fewer runs.")] = False,
    output: options.JsonFolder = None,
    commit: options.Commit = None,
) -> None:
    """Measure the teaching matmul in fp32: naive, tiled in shared memory, and cuBLAS side by side.

    Example:

        python -m twinop.bench matmul
    """
    with clear_errors():
        where = report.choose_device(device)
        if "matmul" not in functions:
            raise BenchError("the built libraries have no op matmul")
        folder = report.output_folder(output)
        facts = report.environment(where, commit)
        report.print_environment(facts)
        before = report.clocks(where)
        rows = measure(where, quick)
        show(rows)
        path = folder / f"matmul-{report.machine_name(facts)}.json"
        clocks = {"before": before, "after": report.clocks(where)}
        report.write_json(path, "matmul", facts, settings={"quick": quick}, clocks=clocks, rows=rows)
        if quick:
            out.print("quick: for a look, not for the record", highlight=False)
