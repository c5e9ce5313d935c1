"""Reports that were measured in parts, put together; and two reports compared."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from twinop.bench import options, report
from twinop.bench.cells import OURS, Cell, cells_of
from twinop.bench.numerics import verdicts as numeric_verdicts
from twinop.bench.report import BenchError
from twinop.bench.verdicts import verdicts
from twinop.console import clear_errors, out

REGRESSION = 0.03
# The commit is the last.
_SAME = ("device", "gpu", "driver", "cpu", "torch", "onnxruntime", "twinop", "commit")


def load(path: Path) -> dict[str, Any]:
    """A report's document.

    Raises:
        BenchError: not there, or not a report of the ops.
    """
    try:
        document = json.loads(path.read_text())
    except OSError as error:
        raise BenchError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise BenchError(f"{path}: not a JSON file: {error}") from error
    if not isinstance(document, dict) or document.get("benchmark") != "ops":
        raise BenchError(f"{path}: not a report of `python -m twinop.bench` (its benchmark is not 'ops')")
    return document


def merged(documents: Sequence[dict[str, Any]], several_commits: bool = False) -> dict[str, Any]:
    """One document of all rows; where two measured the same cell, the later one's cell stands.

    Args:
        several_commits: the parts may be of several commits, which the document then lists with their ops.

    Raises:
        BenchError: they come from different machines, versions or commits.
    """
    first = documents[0]
    for other in documents[1:]:
        for name in _SAME[:-1] if several_commits else _SAME:
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
    found = list(cells.values())
    commits = [document["environment"]["commit"] for document in documents]
    keys = [key for document in documents for key in document["seconds"]]
    return {
        "environment": first["environment"] | {"commit": " ".join(dict.fromkeys(commits))},
        "settings": {
            "parts": [
                document["settings"]
                | {"commit": commit, "ops": list(dict.fromkeys(row["op"] for row in document["rows"]))}
                for document, commit in zip(documents, commits, strict=True)
            ]
        },
        "clocks": {"before": first["clocks"]["before"], "after": documents[-1]["clocks"]["after"]},
        "seconds": {
            key: round(sum(document["seconds"].get(key, 0.0) for document in documents), 1)
            for key in dict.fromkeys(keys)
        },
        "not_measured": list(problems.values()),
        "bars": verdicts(found) + numeric_verdicts(list(numerics.values())),
        "rows": [dict(row) for cell in found for row in cell.rows.values()],
        "numerics": list(numerics.values()),
    }


def compare_with(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether none of our cells is slower than it was by 3 % or its tolerance; shows those that are."""
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
            times = (f"{was.us(name):.2f}", f"{cell.us(name):.2f}", f"[red]{ratio:.3f}[/]")
            table.add_row(f"{name}, {cell.name}", *times)
        report.show(table)
    out.print(f"{compared} cells compared, {len(slower)} slower by more than 3 %", highlight=False)
    return not slower


def merge(
    reports: Annotated[list[Path], typer.Argument(help="JSON files of partial reports.")],
    output: options.PlotFolder = None,
    name: Annotated[
        str | None,
        typer.Option(help="Of the files, without suffix; else ops-MACHINE.", show_default=False),
    ] = None,
    several_commits: Annotated[
        bool,
        typer.Option(
            "--several-commits",
            help="Where what lies between them touches other ops; the file says which is whose.",
        ),
    ] = False,
) -> None:
    """Put partial reports of one machine and commit together: one JSON file, its plots and verdicts.

    Example:

        python -m twinop.bench merge part1.json part2.json --output bench/results
    """
    from twinop.bench.ops import show

    with clear_errors():
        document = merged([load(path) for path in reports], several_commits)
        folder = report.output_folder(output)
        facts = document.pop("environment")
        path = folder / f"{name or 'ops-' + report.machine_name(facts)}.json"
        report.write_json(path, "ops", facts, **document)
        show(document, facts, path)


def compare(
    old: Annotated[Path, typer.Argument(help="The JSON file of the older report.")],
    new: Annotated[Path, typer.Argument(help="That of the newer one.")],
) -> None:
    """Compare two reports: exit code 1 if a cell of ours became slower by more than 3 % and its tolerance."""
    with clear_errors():
        if not compare_with(load(old), load(new)):
            raise typer.Exit(1)
