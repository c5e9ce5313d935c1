"""Whole models: torch, ONNX Runtime's exports and optimizer, and twinop's: `twinop bench models`."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import torch
import typer

from twinop.console import clear_errors, out

from twinop.bench import report
from .model_runs import AUTOTUNE, COLUMNS, EAGER, KINDS, MEASURED, TWINOP
from .model_zoo import ROWS, Row
from twinop.bench.recording import Commit, Device, Output, Recording, rest_of, to_add_to
from twinop.bench.workers import FAILURE, Pipeline

WRONG = 3.0  # no bar counts a column whose error is more times torch eager's: it computes something else
OURS = (TWINOP, MEASURED)
AUTOTUNED, PLAIN = 100.0, 30.0  # seconds that a row takes on an H200, with and without max-autotune
EXPORTS = 5  # at a time: the rest of 16 cores compiles

# ------------------------------------------------------------------------------------------- all rows


def measured(
    rows: Sequence[Row], columns: Sequence[str], small: bool, device: torch.device, seconds: float
) -> Iterator[tuple[Row, dict[str, Any]]]:
    """Measures rows one after another while the files of the next ones are made.

    Args:
        seconds: of all rows together; a row leaves out max-autotune where the rest would take longer.

    Returns:
        Each row with the "rows" of the report, the "reasons" for missing columns, and facts on the "exports".
    """
    started = time.monotonic()
    kinds = dict.fromkeys(COLUMNS[column] for column in columns if COLUMNS[column] in KINDS)

    def job(row: Row) -> dict[str, Any]:
        dtype = row.dtype if device.type == "cuda" else "float32"  # a CPU's kernels of 16 bits are slow
        return {"name": row.name, "dtype": dtype, "small": small}

    with Pipeline("twinop.bench.model_runs", device, len(rows), EXPORTS) as pipeline:

        def path(row: Row, kind: str) -> str:
            return f"{pipeline.folder}/{row.name}-{kind}.onnx"

        exports = {
            (row.name, kind): pipeline.prepare(kind=kind, path=path(row, kind), **job(row))
            for row in rows
            for kind in kinds
        }
        for index, row in enumerate(rows):
            made = {kind: exports[row.name, kind].result() for kind in kinds}
            left = seconds - (time.monotonic() - started) - PLAIN * (len(rows) - index - 1)
            sources: dict[str, str] = {}
            reasons: dict[str, str] = {}
            for column in columns:
                kind = COLUMNS[column]
                if FAILURE in made.get(kind, {}):
                    reasons[column] = made[kind][FAILURE]
                elif column != AUTOTUNE or (row.autotune and left >= AUTOTUNED):
                    sources[column] = path(row, kind) if kind in kinds else kind
                elif row.autotune:
                    reasons[column] = "left out: the time of the report"
            rounds = 5 if small else 21
            found = pipeline.measure(device=str(device), columns=sources, rounds=rounds, **job(row))
            if FAILURE in found:
                found = {"rows": [], "reasons": {"all columns": found[FAILURE]}}
            yield row, {"rows": found["rows"], "reasons": found["reasons"] | reasons, "exports": made}


def judged(columns: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Returns a model's columns without those whose error says that they compute something else."""
    limit = WRONG * columns[EAGER]["error"] if EAGER in columns else float("inf")
    return {column: each for column, each in columns.items() if each["error"] <= limit}


def what_counts(name: str) -> str:
    """Returns the time that a model is judged by: a model in a CUDA graph waits for the host, too."""
    return "wall_us" if ROWS[name].graph else "median_us"


def bars(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns verdicts on the faster of twinop's columns: its error, and its time against the others'."""
    found = []
    for (name,), columns in report.by_cell(rows, "op").items():
        if EAGER not in columns or TWINOP not in columns:
            continue
        row, us = ROWS[name], {column: each[what_counts(name)] for column, each in columns.items()}
        ours = min((column for column in OURS if column in us), key=us.__getitem__)
        best = min((column for column in judged(columns) if column not in OURS), key=us.__getitem__)
        ratio = columns[ours]["error"] / columns[EAGER]["error"]
        found.append(report.bar(f"{name}: {ours} / {EAGER}, relative error", ratio, WRONG))
        found.append(report.bar(f"{name}: {ours} / {best}, time", us[ours] / us[best], row.share))
        if row.most_ms is not None:
            found.append(report.bar(f"{name}: {ours}, ms on an H200", us[ours] * 1e-3, row.most_ms))
    return found


def panels(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Returns the milliseconds of the columns that compute the same, by model."""
    return {
        ROWS[name].title: {column: each[what_counts(name)] * 1e-3 for column, each in judged(columns).items()}
        for (name,), columns in report.by_cell(rows, "op").items()
    }


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints device and wall milliseconds and the error: a line for each model, a column for each way."""
    table = report.table("Models: ms on the device / wall, relative error", ["model", *COLUMNS])
    for (name,), cells in report.by_cell(rows, "op").items():
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
    runs in a process of its own, while others export the next models. The models are added to a report of
    the same machine and commit; one that it has is replaced with all of its columns.

    Example:

        twinop bench models --rows bert-fp16,vit
    """
    with clear_errors():
        where = report.choose_device(device)
        chosen = [ROWS[name] for name in report.chosen("--rows", rows, list(ROWS))]
        ways = report.chosen("--columns", columns, list(COLUMNS))
        recording = Recording("models", where, output, commit)
        earlier = to_add_to(recording.path, recording.facts, {"small": small})
        spent = earlier["settings"]["seconds"] if earlier else 0.0
        content = rest_of(earlier, {row.name for row in chosen})

        def write(last: bool) -> None:
            settings = {"small": small, "seconds": round(spent + recording.seconds, 1)}
            recording.write(last=last, settings=settings, **content)

        with report.progress("models", len(chosen)) as step:
            for row, found in measured(chosen, ways, small, where, seconds):
                step(row.name)
                content["rows"] += found["rows"]
                content["not_measured"] |= {
                    f"{row.name}, {column}": reason for column, reason in found["reasons"].items()
                }
                content["exports"][row.name] = found["exports"]
                write(last=False)
        report.show_missing(content["not_measured"])
        show(content["rows"])
        if not small and where.type == "cuda":
            content["bars"] = bars(content["rows"])
            report.show_bars(content["bars"])
        write(last=True)
        if small:
            out.print("These were tiny models: do not record it.", highlight=False)
