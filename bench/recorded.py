"""The commands that compare and draw files of measurements."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from twinop.cli.console import clear_errors, out

from .cells import OURS, Cell
from .figures import draw_ops
from .measurements import BenchError, Output, output_folder, read
from .tables import table_of

REGRESSION = 0.03


def compare_with(old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> bool:
    """Prints which of twinop's cells are slower than before, by more than 3 % and both tolerances.

    Returns:
        Whether there are none.

    Raises:
        BenchError: they have no cell in common.
    """
    before = {cell.key: cell for cell in map(Cell, old)}
    pairs = [
        (name, cell, before[cell.key])
        for cell in map(Cell, new)
        for name in OURS
        if cell.key in before and name in cell.times and name in before[cell.key].times
    ]
    if not pairs:
        raise BenchError("the two reports have no cell in common: nothing is compared")
    ratios = [(cell.us(name) / was.us(name), name, cell, was) for name, cell, was in pairs]
    slower = [each for each in ratios if each[0] > 1 + max(REGRESSION, each[2].tolerance, each[3].tolerance)]
    if slower:
        table = table_of("Slower than before", ["was, us", "is, us", "ratio"])
        for ratio, name, cell, was in sorted(slower, key=lambda each: -each[0]):
            times = (f"{was.us(name):.2f}", f"{cell.us(name):.2f}", f"{ratio:.3f}")
            table.add_row(f"{name}, {cell.name}", *times)
        out.print(table)
    out.print(f"{len(pairs)} cells compared, {len(slower)} slower by more than 3 %")
    return not slower


def compare(
    old: Annotated[Path, typer.Argument(help="The file of the older measurements.")],
    new: Annotated[Path, typer.Argument(help="The file of the newer ones.")],
) -> None:
    """Compare two files: exit code 1 if a cell of twinop's lost more than 3 % and its tolerance."""
    with clear_errors():
        if not compare_with(read(old, "ops"), read(new, "ops")):
            raise typer.Exit(1)


def draw(
    recorded: Annotated[Path, typer.Argument(metavar="FILE", help="A file that `twinop bench` wrote.")],
    output: Output = None,
) -> None:
    """Draw measured ops: a panel for each op, forward, in the first dtype of the file. Nothing is measured.

    Example:

        twinop bench draw lab/results/ops-nvidia-h200.jsonl
    """
    with clear_errors():
        lines = read(recorded, "ops")
        draw_ops(lines, output_folder(output) / recorded.stem)
