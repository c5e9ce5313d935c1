"""Stock exports of many architectures, before and after `twinop optimize`: `twinop bench architectures`."""

import os
import tempfile
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict
from functools import partial
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from twinop.console import clear_errors, err
from twinop.errors import ExportError
from twinop.export import export

from . import report
from .architecture_list import ARCHITECTURES, TINY, WIDE
from .cases import relative_error
from .model_exports import FEW, torch_export
from .model_runs import in_ort, on_stream
from .recording import Commit, Device, Output, Recording
from .timing import DeviceTimer, host_times
from .workers import FAILURE, Worker

STOCK, OURS, AGAIN = "stock export", "twinop", "stock export again"
EXPORT_LIMIT, TIMING_LIMIT = 150.0, 40.0  # seconds
EXPORTS, THREADS = 8, 2  # processes at a time, and threads of each
SPARE = 3  # processes that are ready to measure
LEAST_ERROR = 1e-4  # below it, the order of sums makes the difference
SLOWER = 0.02  # the share by which an optimised model may miss its stock export's time

# ------------------------------------------------------------------------------------------- processes


def prepare(name: str, dtype: str, small: bool, folder: str) -> dict[str, Any]:
    """Writes the stock export, the optimised one and inputs with torch's results in float32.

    Returns:
        What the optimizer says.
    """
    from twinop.export.optimize import optimize

    architecture, size, where = ARCHITECTURES[name], TINY if small else WIDE, Path(folder)
    model, inputs = architecture.model(size), architecture.inputs(size)
    kind = getattr(torch, dtype)
    with torch.no_grad():
        expected = model(*inputs.values())
    arrays = {each: tensor.numpy() for each, tensor in inputs.items()}
    np.savez(where / "inputs.npz", expected=expected.numpy(), **arrays)  # type: ignore[arg-type]
    model = model.to(kind)
    inputs = {each: x.to(kind) if x.is_floating_point() else x for each, x in inputs.items()}
    count = FEW
    try:
        torch_export(model, {each: x[:FEW] for each, x in inputs.items()}, where / "stock.onnx")
    except ExportError:  # Swin's views fix the batch
        count = size.batch
        export(model, tuple(inputs.values()), where / "stock.onnx", verify=False)
    np.savez(where / "few.npz", **{each: x[:count] for each, x in arrays.items()})  # type: ignore[arg-type]
    made = asdict(optimize(where / "stock.onnx", where / "twinop.onnx", inputs_file=where / "few.npz"))
    wanted = ("nodes_before", "nodes_after", "made", "left", "taken_back", "notes", "error", "own_error")
    return {each: made[each] for each in wanted}


def measure(dtype: str, device: str, folder: str, rounds: int) -> dict[str, Any]:
    """Measures both exports of an architecture, in turn.

    Returns:
        By export, the fields of a row.
    """
    where, kind = torch.device(device), getattr(torch, dtype)
    timer = DeviceTimer(torch.cuda.Stream(where)) if where.type == "cuda" else None
    with np.load(Path(folder) / "inputs.npz") as file:
        tensors = {name: torch.from_numpy(file[name]).to(where) for name in file.files}
    expected = tensors.pop("expected").double()
    inputs = {name: x.to(kind) if x.is_floating_point() else x for name, x in tensors.items()}
    shown = tensors["mask"][..., None] if "mask" in tensors else torch.ones((), device=where)
    runs, facts = {}, {}
    with torch.no_grad(), on_stream(timer):
        for name, file_name in {STOCK: "stock.onnx", OURS: "twinop.onnx"}.items():
            path = str(Path(folder) / file_name)
            runs[name], output, facts[name] = in_ort(path, inputs, expected, kind, timer, False)
            facts[name] |= {"error": relative_error(output() * shown, expected * shown)}
        again = runs | {AGAIN: runs[STOCK]}
        if timer is None:
            times = wall = host_times(again, rounds=rounds, seconds=0.2)
        else:
            times = timer.times(again, rounds=rounds)
            after = partial(torch.cuda.synchronize, where)
            wall = host_times(again, rounds=rounds, seconds=0.2, after=after)
    shape = "x".join(str(size) for size in next(iter(inputs.values())).shape)
    return {
        name: {"shape": shape}
        | times[name].row()
        | {"wall_us": round(wall[name].median * 1e6, 1)}
        | facts.get(name, {})
        for name in again
    }


# ------------------------------------------------------------------------------------------- the report


def row_of(name: str, said: Mapping[str, Any], times: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the table's row of an architecture."""
    stock, ours = times[STOCK], times[OURS]
    made = ", ".join(f"{count} {what}" for what, count in said["made"].items())
    return {
        "model": name,
        "nodes": f"{said['nodes_before']} -> {said['nodes_after']}",
        "stock error": stock["error"],
        "error": ours["error"],
        "stock us": stock["median_us"],
        "us": ours["median_us"],
        "ratio": round(ours["median_us"] / stock["median_us"], 3),
        "made": made or "nothing",
    }


def main(
    models: Annotated[str, typer.Option(help="Architectures to measure.")] = ",".join(ARCHITECTURES),
    dtype: Annotated[
        str | None, typer.Option(help="Default: float16 on a GPU, float32 on a CPU.", show_default=False)
    ] = None,
    device: Device = "auto",
    small: Annotated[bool, typer.Option("--small", help="Tiny models: shows that everything runs.")] = False,
    output: Output = None,
    commit: Commit = None,
) -> None:
    """Optimise stock exports of many architectures, and measure them before and after.

    Models of transformers, timm and torchvision with random weights; those whose library is missing are
    rows with that reason.

    Example:

        twinop bench architectures --models bert,vit
    """
    with clear_errors():
        where = report.choose_device(device)
        names = report.chosen("--models", models, list(ARCHITECTURES))
        kind = dtype or ("float16" if where.type == "cuda" else "float32")
        report.chosen("--dtype", kind, ("float16", "bfloat16", "float32"))
        rounds = 5 if small else 31 if where.type == "cuda" else 9  # a run on a CPU may take half a second
        recording, started = Recording("architectures", where, output, commit), time.perf_counter()
        rows: list[dict[str, Any]] = []
        verdicts: list[dict[str, Any]] = []
        made: dict[str, Any] = {}
        missing: dict[str, str] = {}

        def write(last: bool) -> None:
            settings = {"dtype": kind, "small": small, "seconds": round(time.perf_counter() - started, 1)}
            recording.write(
                last=last, settings=settings, not_measured=missing, exports=made, bars=verdicts, rows=rows
            )

        exports = max(1, min(EXPORTS, len(os.sched_getaffinity(0)) // THREADS))
        with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(exports) as pool:
            folder = {name: Path(temporary) / name.replace(" ", "-") for name in names}

            def prepared(name: str) -> dict[str, Any]:
                worker = Worker(f"{__name__}:prepare", folder[name], threads=THREADS, gpu=False)
                arguments = {"name": name, "dtype": kind, "small": small, "folder": str(folder[name])}
                return worker.result(arguments, EXPORT_LIMIT)

            waiting = {name: pool.submit(prepared, name) for name in names}
            numbers, ahead = count(), SPARE
            if where.type == "cpu":  # nothing may run beside what is measured
                wait(waiting.values())
                ahead = 0

            def ready() -> Worker:
                return Worker(f"{__name__}:measure", Path(temporary) / str(next(numbers)))

            spare = deque(ready() for _ in range(ahead))  # they import while others run
            with report.progress("architectures", len(names)) as step:
                for name in names:
                    step(name)
                    said = waiting[name].result()
                    if FAILURE in said:
                        missing[name] = said[FAILURE]
                        continue
                    made[name] = said
                    spare.append(ready())
                    arguments = {"dtype": kind, "device": str(where), "folder": str(folder[name])}
                    times = spare.popleft().result(arguments | {"rounds": rounds}, TIMING_LIMIT)
                    if FAILURE in times:
                        missing[name] = times[FAILURE]
                        continue
                    label = {"op": name, "dtype": kind, "device": where.type}
                    rows += [label | {"provider": provider} | each for provider, each in times.items()]
                    verdicts += bars(name, times)
                    write(last=False)
            for worker in spare:
                worker.stop()
        table = [
            row_of(name, made[name], {row["provider"]: row for row in rows if row["op"] == name})
            for name in dict.fromkeys(row["op"] for row in rows)
        ]
        if table:
            report.show_rows("Stock exports, before and after `twinop optimize`", table, list(table[0]))
        for name, reason in missing.items():
            err.print(f"not measured: {name}: {reason}", markup=False, soft_wrap=True)
        if not small:
            report.show_bars([each for each in verdicts if not each["passed"]])
        write(last=True)


def bars(name: str, times: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns verdicts on an architecture: its error, and that it is not slower than its stock export."""
    stock, ours = times[STOCK], times[OURS]
    noise = max(SLOWER, abs(times[AGAIN]["median_us"] / stock["median_us"] - 1))
    error = max(1.2 * stock["error"], LEAST_ERROR)
    return [
        report.bar(
            f"{name}: {OURS} / {STOCK}, time", ours["median_us"] / stock["median_us"], 1, tolerance=noise
        ),
        report.bar(f"{name}: relative error / accepted", ours["error"] / error, 1),
    ]
