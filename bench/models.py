"""Whole models: torch, ONNX Runtime's exports and optimizer, and twinop's: `twinop bench models`."""

import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from twinop.console import clear_errors, err, out

from . import report
from .model_exports import KINDS, dtype_of
from .model_runs import AUTOTUNE, COLUMNS, COMPILE, EAGER, MEASURED, TWINOP
from .model_zoo import ROWS, Row
from .recording import Commit, Device, Output, Recording
from .workers import FAILURE, Worker

WRONG = (
    3.0  # a column whose error is more times that of torch eager computes something else: no bar counts it
)
OURS = (TWINOP, MEASURED)
EXPORT_LIMIT, ROW_LIMIT = 240.0, 170.0  # seconds
AUTOTUNED, PLAIN = 100.0, 30.0  # seconds that a row takes on an H200, with and without max-autotune
EXPORTS = 5  # at a time, with THREADS each: the rest of 16 cores compiles
THREADS = 2
MEASURE = "twinop.bench.model_runs:measure"

# ------------------------------------------------------------------------------------------- all rows


class Exports:
    """The files of all rows, made by several processes beside the measuring."""

    def __init__(
        self, rows: Sequence[Row], kinds: Sequence[str], small: bool, device: torch.device, folder: Path
    ) -> None:
        workers = min(EXPORTS, max(1, len(os.sched_getaffinity(0)) // THREADS - 1))
        self._pool = ThreadPoolExecutor(workers)
        self._made: dict[str, Future[dict[str, Any]]] = {}
        self._workers: list[Worker] = []
        self._kinds, self._small, self._device, self._folder = kinds, small, device, folder
        for row in rows:
            for kind in kinds:
                stored = row.stored(kind)
                if stored not in self._made:
                    self._made[stored] = self._pool.submit(self._make, row, kind, stored)

    def _make(self, row: Row, kind: str, stored: str) -> dict[str, Any]:
        folder = self._folder / stored
        path = str(folder / "model.onnx")
        dtype = str(dtype_of(row, self._device)).removeprefix("torch.")
        arguments = {"name": row.name, "kind": kind, "dtype": dtype, "small": self._small, "path": path}
        worker = Worker("twinop.bench.model_exports:prepare", folder, threads=THREADS, gpu=False)
        self._workers.append(worker)
        return {"path": path} | worker.result(arguments, EXPORT_LIMIT)

    def of(self, row: Row) -> dict[str, dict[str, Any]]:
        """Waits for the exports of a row. Each is {"path": ..., facts}, or has a "failure"."""
        return {kind: self._made[row.stored(kind)].result() for kind in self._kinds}

    def stop(self) -> None:
        """Starts no more exports, and ends those that run."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.stop()


def measured(
    rows: Sequence[Row],
    columns: Sequence[str],
    small: bool,
    device: torch.device,
    folder: Path,
    seconds: float,
) -> Iterator[tuple[Row, dict[str, Any]]]:
    """Measures rows one after another while the files of the next ones are made.

    Args:
        seconds: of all rows together; a row leaves out max-autotune where the rest would take longer.
    """
    started = time.monotonic()
    workers = [Worker(MEASURE, folder / rows[0].name)]
    kinds = [COLUMNS[column] for column in columns if COLUMNS[column] in KINDS]
    exports = Exports(rows, kinds, small, device, folder)
    try:
        for index, row in enumerate(rows):
            made = exports.of(row)
            files = {kind: each["path"] for kind, each in made.items() if FAILURE not in each}
            left = seconds - (time.monotonic() - started) - PLAIN * (len(rows) - index - 1)
            wanted = [column for column in columns if column != AUTOTUNE or row.autotune]
            late = AUTOTUNE in wanted and left < AUTOTUNED
            if late:
                wanted.remove(AUTOTUNE)
            arguments = {
                "name": row.name,
                "small": small,
                "device": str(device),
                "files": files,
                "columns": wanted,
                "rounds": 5 if small else 21,
            }
            if index + 1 < len(rows):  # it imports what it needs while this row runs
                workers.append(Worker(MEASURE, folder / rows[index + 1].name))
            found = workers[index].result(arguments, ROW_LIMIT)
            reasons = dict(found.get("reasons", {}))
            if late:
                reasons[AUTOTUNE] = "left out: the time of the report"
            for column, kind in COLUMNS.items():
                if FAILURE in made.get(kind, {}):
                    reasons[column] = made[kind][FAILURE]
            if FAILURE in found:
                reasons = {"all columns": found[FAILURE]} | reasons
            said = {kind: {k: v for k, v in each.items() if k != "path"} for kind, each in made.items()}
            yield row, {"rows": found.get("rows", []), "reasons": reasons, "exports": said}
    finally:
        for worker in workers:
            worker.stop()
        exports.stop()


def judged(name: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Returns a model's columns by name, without those whose error says that they compute something else."""
    columns = {each["provider"]: each for each in rows if each["op"] == name}
    limit = WRONG * columns[EAGER]["error"] if EAGER in columns else float("inf")
    return {column: each for column, each in columns.items() if each["error"] <= limit}


def what_counts(name: str) -> str:
    """Returns the time that a model is judged by: a model in a CUDA graph waits for the host, too."""
    return "wall_us" if ROWS[name].graph else "median_us"


def bars(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns verdicts on the faster of twinop's columns: its error, and its time against the others'."""
    found = []
    for name in dict.fromkeys(row["op"] for row in rows):
        row, us, columns = ROWS[name], what_counts(name), judged(name, rows)
        all_columns = {each["provider"]: each for each in rows if each["op"] == name}
        if EAGER not in columns or TWINOP not in all_columns:
            continue
        ours = min((each for each in OURS if each in all_columns), key=lambda each: all_columns[each][us])
        best = min((each for each in columns if each not in OURS), key=lambda each: columns[each][us])
        ratio, time = all_columns[ours]["error"] / columns[EAGER]["error"], all_columns[ours][us]
        found.append(report.bar(f"{name}: {ours} / {EAGER}, relative error", ratio, WRONG))
        found.append(report.bar(f"{name}: {ours} / {best}, time", time / columns[best][us], row.share))
        if row.most_ms is not None:
            found.append(report.bar(f"{name}: {ours}, ms on an H200", time * 1e-3, row.most_ms))
    return found


def panels(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Returns the milliseconds of the columns that compute the same, by model."""
    return {
        ROWS[name].title: {
            column: each[what_counts(name)] * 1e-3 for column, each in judged(name, rows).items()
        }
        for name in dict.fromkeys(row["op"] for row in rows)
    }


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the table of the documentation: a model's times in ms, and the fastest other column's share."""
    shown = [COMPILE, "ORT optimizer", *OURS]
    lines = ["| model | " + " | ".join(shown) + " | of the fastest other |", "|---" * (len(shown) + 2) + "|"]
    for title, columns in panels(rows).items():
        best = min((each for each in columns if each not in OURS), key=columns.__getitem__)
        ours = min(columns[each] for each in OURS if each in columns)
        times = [f"{columns[each]:.2f}" if each in columns else "-" for each in shown]
        lines.append(f"| {title} | " + " | ".join(times) + f" | {ours / columns[best]:.2f} ({best}) |")
    return "\n".join(lines)


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints device and wall milliseconds and the error: a line for each model, a column for each way."""
    table = report.table("Models: ms on the device / wall, relative error", ["model", *COLUMNS])
    for name in dict.fromkeys(row["op"] for row in rows):
        cells = {row["provider"]: row for row in rows if row["op"] == name}
        texts = (
            f"{cells[column]['median_us'] * 1e-3:.2f} / {cells[column]['wall_us'] * 1e-3:.2f}, "
            f"{cells[column]['error']:.1e}"
            if column in cells
            else "-"
            for column in COLUMNS
        )
        table.add_row(name, *texts)
    out.print(table)


def main(
    rows: Annotated[str, typer.Option(help="Models to measure.")] = ",".join(ROWS),
    columns: Annotated[str, typer.Option(help="What to measure them in.")] = ",".join(COLUMNS),
    device: Device = "auto",
    small: Annotated[bool, typer.Option("--small", help="Tiny models: shows that everything runs.")] = False,
    seconds: Annotated[
        float, typer.Option(help="Leave max-autotune out where all rows would take longer.")
    ] = 720,
    output: Output = None,
    commit: Commit = None,
) -> None:
    """Measure whole models in torch and in ONNX Runtime: twinop's optimizer against all others.

    Device time behind a cold L2, wall time, and the error against float32 in torch. Models have random
    weights. torch's columns and the dynamo exports use scaled_dot_product_attention; ONNX Runtime's
    optimizer gets a TorchScript export with eager attention, the form that it recognises. twinop's second
    column measures cuBLASLt's algorithms instead of taking its first (TWINOP_LINEAR_ALGORITHMS). Each row
    runs in a process of its own, while others export the next models.

    Example:

        twinop bench models --rows bert-fp16,vit
    """
    with clear_errors():
        where = report.choose_device(device)
        chosen = [ROWS[name] for name in report.chosen("--rows", rows, list(ROWS))]
        ways = report.chosen("--columns", columns, list(COLUMNS))
        recording, started = Recording("models", where, output, commit), time.perf_counter()
        content: dict[str, Any] = {"not_measured": {}, "exports": {}, "bars": [], "rows": []}

        def write(last: bool) -> None:
            settings = {"seconds": round(time.perf_counter() - started, 1), "small": small}
            recording.write(last=last, settings=settings, **content)

        with (
            tempfile.TemporaryDirectory() as folder,
            report.progress("models", len(chosen)) as step,
        ):
            for row, found in measured(chosen, ways, small, where, Path(folder), seconds):
                step(row.name)
                content["rows"] += found["rows"]
                content["not_measured"] |= {
                    f"{row.name}, {column}": reason for column, reason in found["reasons"].items()
                }
                content["exports"][row.name] = found["exports"]
                write(last=False)
        for what, reason in content["not_measured"].items():
            err.print(f"not measured: {what}: {reason}", markup=False, soft_wrap=True)
        show(content["rows"])
        if not small and where.type == "cuda":
            content["bars"] = bars(content["rows"])
            report.show_bars(content["bars"])
        write(last=True)
        if small:
            out.print("These were tiny models: do not record it.", highlight=False)
