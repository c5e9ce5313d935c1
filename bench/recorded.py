"""Recorded reports of the ops: adding to one, and the commands that compare and draw them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from twinop.console import clear_errors, out

from . import models, report
from .cells import OURS, cells_of, numeric_verdicts, verdicts
from .figures import draw_models, draw_ops, draw_serve
from .recording import Output, output_folder, read_json, read_ops
from .report import BenchError

REGRESSION = 0.03


def added(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a report with the cells of both. Cells that were measured again are those of `new`."""
    names = ("kind", "op", "direction", "dtype", "shape")
    lists: dict[str, list[Any]] = {}
    for entries, key in (("rows", names), ("not_measured", names[1:]), ("numerics", ("op", "dtype"))):
        measured = new[entries] + (new["rows"] if entries == "not_measured" else [])
        again = {tuple(each.get(name) for name in key) for each in measured}
        kept = [each for each in old[entries] if tuple(each.get(name) for name in key) not in again]
        lists[entries] = kept + new[entries]
    seconds = {
        name: round(old["seconds"].get(name, 0.0) + new["seconds"].get(name, 0.0), 1)
        for name in old["seconds"] | new["seconds"]
    }
    bars = verdicts(cells_of(lists["rows"])) + numeric_verdicts(lists["numerics"])
    return {**new, "seconds": seconds, **lists, "bars": bars}


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
        out.print(table)
    out.print(f"{compared} cells compared, {len(slower)} slower by more than 3 %", highlight=False)
    return not slower


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
        Path, typer.Argument(metavar="REPORT", help="The JSON file of an ops, models or serve report.")
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

        twinop bench draw lab/results/ops-nvidia-h200.json --op gelu

        twinop bench draw lab/results/serve-nvidia-h200.json
    """
    with clear_errors():
        document = read_json(recorded)
        stem = output_folder(output) / recorded.stem
        title = report.machine_title(document["environment"])
        if document["benchmark"] == "serve" and op is None:
            draw_serve(document["rows"], title, stem.with_suffix(".png"))
            return
        if document["benchmark"] == "models" and op is None:
            draw_models(models.panels(document["rows"]), title, stem.with_suffix(".png"))
            return
        rows = read_ops(recorded)["rows"]
        known = list(dict.fromkeys(row["op"] for row in rows))
        wanted = report.chosen("--op", op, [*known, "all"]) if op is not None else []
        draw_ops(rows, title, stem, known if "all" in wanted else wanted)
