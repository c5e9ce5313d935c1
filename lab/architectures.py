"""Stock exports of many architectures, before and after `twinop optimize`: `twinop bench architectures`."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from twinop.console import clear_errors
from twinop.errors import ExportError

from twinop.bench import report
from .architecture_list import ARCHITECTURES, WIDE
from .encoder_models import TINY, cast
from .model_runs import FACTS, FEW, checked, in_ort, optimized, shape_of, timed, torch_export
from twinop.bench.providers import Subject
from twinop.bench.recording import Commit, Device, Output, Recording, rest_of, to_add_to
from twinop.bench.timing import timer_on
from twinop.bench.workers import FAILURE, Pipeline

STOCK, OURS, AGAIN = "stock export", "twinop", "stock export again"
EXPORTS = 8  # at a time
LEAST_ERROR = 1e-4  # below it, the order of sums makes the difference
SLOWER = 0.02  # the share by which an optimised model may miss its stock export's time

# ------------------------------------------------------------------------------------------- processes


def prepare(name: str, dtype: str, small: bool, folder: str) -> dict[str, Any]:
    """Writes the stock export, the optimised one and inputs with torch's results in float32.

    Returns:
        What the optimizer says.
    """
    architecture, size, where = ARCHITECTURES[name], TINY if small else WIDE, Path(folder)
    where.mkdir()
    model, inputs = architecture.model(size), architecture.inputs(size)
    with torch.no_grad():
        expected = model(*inputs.values())
    arrays = {each: tensor.numpy() for each, tensor in inputs.items()}
    np.savez(where / "inputs.npz", expected=expected.numpy(), **arrays)  # type: ignore[arg-type]
    stock, narrow = where / "stock.onnx", getattr(torch, dtype)
    model, few = model.to(narrow), {each: x[:FEW] for each, x in inputs.items()}
    try:
        torch_export(model, cast(few, narrow), stock)
    except ExportError:
        try:  # Swin's views fix the batch
            torch_export(model, cast(inputs, narrow), stock, fixed=True)
            few = inputs
        except ExportError:  # BART in float16 branches on its values
            torch_export(model, cast(few, narrow), stock, "torchscript")
    return optimized(stock, where / "twinop.onnx", few, ("nodes_before", "nodes_after", *FACTS))


def measure(name: str, dtype: str, device: str, folder: str, rounds: int) -> dict[str, Any]:
    """Measures both exports of an architecture, in turn.

    Returns:
        {"rows": those of the report}
    """
    where = torch.device(device)
    with np.load(Path(folder) / "inputs.npz") as file, torch.no_grad(), timer_on(where) as timer:
        tensors = {each: torch.from_numpy(file[each]).to(where) for each in file.files}
        expected = tensors.pop("expected").double()
        inputs = cast(tensors, getattr(torch, dtype))
        subjects: dict[str, Subject] = {}
        # The stock export has a second session, because each session chooses convolutions by their times.
        for provider, file_name in {STOCK: "stock", OURS: "twinop", AGAIN: "stock"}.items():
            make = partial(in_ort, str(Path(folder) / f"{file_name}.onnx"), inputs, expected, "custom_ops")
            subjects[provider] = checked(make, expected, tensors.get("mask"))
        label = {"op": name, "dtype": dtype, "device": where.type, "shape": shape_of(inputs)}
        return {"rows": timed(subjects, timer, label, rounds=rounds, seconds=0.2)}


# ------------------------------------------------------------------------------------------- the report


def bars(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns verdicts on each architecture: its time against its stock export's, and its error."""
    found = []
    for (name,), exports in report.by_cell(rows, "op").items():
        stock, ours = exports[STOCK], exports[OURS]
        noise = max(SLOWER, abs(exports[AGAIN]["median_us"] / stock["median_us"] - 1))
        ratio = ours["median_us"] / stock["median_us"]
        found.append(report.bar(f"{name}: {OURS} / {STOCK}, time", ratio, 1, tolerance=noise))
        accepted = max(1.2 * stock["error"], LEAST_ERROR)
        found.append(report.bar(f"{name}: relative error / accepted", ours["error"] / accepted, 1))
    return found


def show(rows: Sequence[Mapping[str, Any]], optimizer: Mapping[str, Mapping[str, Any]]) -> None:
    """Prints a line for each architecture: nodes, errors and times, and what the optimizer said it made."""
    table = []
    for (name,), exports in report.by_cell(rows, "op").items():
        said, stock, ours = optimizer[name], exports[STOCK], exports[OURS]
        line = {
            "model": name,
            "nodes": f"{said['nodes_before']} -> {said['nodes_after']}",
            "stock error": stock["error"],
            "error": ours["error"],
            "stock us": stock["median_us"],
            "us": ours["median_us"],
            "ratio": round(ours["median_us"] / stock["median_us"], 3),
            "made": ", ".join(f"{count} {what}" for what, count in said["made"].items()) or "nothing",
        }
        table.append(line)
    if table:
        report.show_rows("Stock exports, before and after `twinop optimize`", table, list(table[0]))


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
    rows with that reason. The models are added to a report of the same machine and commit.

    Example:

        twinop bench architectures --models bert,vit
    """
    with clear_errors():
        where = report.choose_device(device)
        names = report.chosen("--models", models, list(ARCHITECTURES))
        kind = dtype or ("float16" if where.type == "cuda" else "float32")
        report.chosen("--dtype", kind, ("float16", "bfloat16", "float32"))
        rounds = 5 if small else 31 if where.type == "cuda" else 9  # a run on a CPU may take half a second
        recording = Recording("architectures", where, output, commit)
        earlier = to_add_to(recording.path, recording.facts, {"small": small, "dtype": kind})
        spent = earlier["settings"]["seconds"] if earlier else 0.0
        content = rest_of(earlier, set(names))

        def write(last: bool) -> None:
            settings = {"dtype": kind, "small": small, "seconds": round(spent + recording.seconds, 1)}
            recording.write(last=last, settings=settings, **content)

        with (
            Pipeline(__name__, where, len(names), EXPORTS) as pipeline,
            report.progress("architectures", len(names)) as step,
        ):
            jobs: dict[str, dict[str, Any]] = {
                name: {"name": name, "dtype": kind, "folder": f"{pipeline.folder}/{name}"} for name in names
            }
            exports = {name: pipeline.prepare(small=small, **job) for name, job in jobs.items()}
            for name, job in jobs.items():
                step(name)
                found = exports[name].result()
                if FAILURE not in found:
                    content["exports"][name] = found
                    job |= {"device": str(where), "rounds": rounds}
                    found = pipeline.measure(**job)
                if FAILURE in found:
                    content["not_measured"][name] = found[FAILURE]
                    continue
                content["rows"] += found["rows"]
                content["bars"] = bars(content["rows"])
                write(last=False)
        show(content["rows"], content["exports"])
        report.show_missing(content["not_measured"])
        if not small:
            report.show_bars([each for each in content["bars"] if not each["passed"]])
        write(last=True)
