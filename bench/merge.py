"""The commands that merge, compare and draw recorded reports."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from twinop.console import clear_errors, out

from . import report
from .cells import OURS, Cell, cells_of, numeric_verdicts, verdicts
from .figures import draw_ops, draw_serve
from .recording import Name, Output, output_folder, read_json, read_ops, write_json
from .report import BenchError
from .tables import show_document

REGRESSION = 0.03
_SAME = ("device", "gpu", "driver", "cpu", "torch", "onnxruntime", "twinop", "commit")


def merged(documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Combines reports into one. Where two have the same cell, the cell of the later one counts.

    Raises:
        BenchError: the parts come from different machines, versions or commits.
    """
    first = documents[0]
    for other in documents[1:]:
        for name in _SAME:
            values = [document["environment"].get(name) for document in (first, other)]
            if values[0] != values[1]:
                raise BenchError(
                    f"these reports differ in {name}: {values[0]} and {values[1]}. "
                    "Numbers of different machines, versions or commits do not belong in one report"
                )
    cells: dict[tuple[str, ...], Cell] = {}
    problems: dict[str, Any] = {}
    numerics: dict[str, Any] = {}
    for document in documents:
        cells |= {cell.key: cell for cell in cells_of(document["rows"])}
        for store, key in ((problems, "not_measured"), (numerics, "numerics")):
            for entry in document[key]:
                names = ("op", "direction", "dtype", "shape", "provider")
                store[str([entry.get(name) for name in names])] = entry
    settings = [
        document["settings"] | {"ops": list(dict.fromkeys(row["op"] for row in document["rows"]))}
        for document in documents
    ]
    seconds = {key: 0.0 for document in documents for key in document["seconds"]}
    for document in documents:
        for key, value in document["seconds"].items():
            seconds[key] = round(seconds[key] + value, 1)
    return {
        "environment": first["environment"],
        "settings": {"parts": settings},
        "clocks": {"before": first["clocks"]["before"], "after": documents[-1]["clocks"]["after"]},
        "seconds": seconds,
        "not_measured": list(problems.values()),
        "bars": verdicts(list(cells.values())) + numeric_verdicts(list(numerics.values())),
        "rows": [dict(row) for cell in cells.values() for row in cell.rows.values()],
        "numerics": list(numerics.values()),
    }


def compare_with(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Prints which of twinop's cells are slower than before, by more than 3 % and both tolerances.

    Returns:
        Whether there are none.

    Raises:
        BenchError: the reports have no cell in common.
    """
    before = {cell.key: cell for cell in cells_of(old["rows"])}
    slower, compared = [], 0
    for cell in cells_of(new["rows"]):
        was = before.get(cell.key)
        for name in OURS if was is not None else ():
            if was is None or name not in cell.rows or name not in was.rows:
                continue
            compared += 1
            ratio = cell.us(name) / was.us(name)
            if ratio > 1 + max(REGRESSION, cell.tolerance, was.tolerance):
                slower.append((ratio, name, cell, was))
    if compared == 0:
        raise BenchError("the two reports have no cell in common: nothing is compared")
    if slower:
        table = report.table("Slower than before", ["", "was, us", "is, us", "ratio"])
        for ratio, name, cell, was in sorted(slower, key=lambda each: -each[0]):
            times = (f"{was.us(name):.2f}", f"{cell.us(name):.2f}", report.flag(f"{ratio:.3f}", False))
            table.add_row(f"{name}, {cell.name}", *times)
        report.show(table)
    out.print(f"{compared} cells compared, {len(slower)} slower by more than 3 %", highlight=False)
    return not slower


def merge(
    reports: Annotated[list[Path], typer.Argument(help="The JSON files of partial reports.")],
    output: Output = None,
    name: Name = None,
) -> None:
    """Combine partial reports of one machine and commit into one JSON file, with its overview and verdicts.

    Example:

        twinop bench merge part1.json part2.json --output bench/results
    """
    with clear_errors():
        document = merged([read_ops(path) for path in reports])
        folder = output_folder(output)
        facts = document.pop("environment")
        path = folder / f"{name or 'ops-' + report.machine_name(facts)}.json"
        write_json(path, "ops", facts, **document)
        show_document(document)
        announce(draw_ops(document["rows"], report.machine_title(facts), path.with_suffix("")))


def compare(
    old: Annotated[Path, typer.Argument(help="The JSON file of the older report.")],
    new: Annotated[Path, typer.Argument(help="The JSON file of the newer report.")],
) -> None:
    """Compare two reports: exit code 1 if a cell of twinop's lost more than 3 % and its tolerance."""
    with clear_errors():
        if not compare_with(read_ops(old), read_ops(new)):
            raise typer.Exit(1)


def draw(
    recorded: Annotated[
        Path, typer.Argument(metavar="REPORT", help="The JSON file of an ops or serve report.")
    ],
    op: Annotated[
        str | None,
        typer.Option(help="Draw the pages of these ops, such as gelu,softmax; or all.", show_default=False),
    ] = None,
    output: Output = None,
) -> None:
    """Draw a recorded report: the overview, or with --op a page for each op.

    A page has a panel for each dtype, forward and backward. Nothing is measured.

    Examples:

        twinop bench draw bench/results/ops-nvidia-h200.json --op gelu

        twinop bench draw bench/results/serve-nvidia-h200.json
    """
    with clear_errors():
        document = read_json(recorded)
        stem = output_folder(output) / recorded.stem
        title = report.machine_title(document["environment"])
        if document["benchmark"] == "serve" and op is None:
            announce([draw_serve(document["rows"], title, stem.with_suffix(".png"))])
            return
        rows = read_ops(recorded)["rows"]
        known = list(dict.fromkeys(row["op"] for row in rows))
        wanted = [] if op is None else known if op == "all" else [part.strip() for part in op.split(",")]
        if unknown := [name for name in wanted if name not in known]:
            raise BenchError(f"--op {','.join(unknown)}: not in {recorded}. It has {', '.join(known)}")
        announce(draw_ops(rows, title, stem, wanted))


def announce(paths: Iterable[Path]) -> None:
    """Prints the names of the files that were written."""
    for path in paths:
        out.print(f"wrote {path}", highlight=False, soft_wrap=True)
