"""Whether arithmetic limits an op, and how close it is to that limit: `twinop bench instructions`."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from twinop.console import clear_errors
from twinop.library import find_library

from . import report
from .cells import COPY, MOST_TOLERANCE, OURS, Cell, cells_of
from .recording import Output, output_folder, read_ops, write_json
from .report import BenchError
from .sass import LANES, Kernel, kernels

MULTIPROCESSORS = {"NVIDIA H200": 132, "NVIDIA H100 80GB HBM3": 132}
LIMIT_BAR = 0.9  # of the limit's speed, within the cell's tolerance
RESIDENT_BYTES = 24 << 20  # smaller outputs stay in L2 and use another kernel

FUNCTORS = {
    "gelu": "Gelu",
    "gelu_tanh": "TanhGelu",
    "silu": "Silu",
    "sigmoid": "Logistic",
    "tanh": "HyperbolicTangent",
    "softplus": "SoftPlus",
    "exp": "Exponential",
    "log": "Logarithm",
    "square": "Square",
    "add": "Add",
    "mul": "Mul",
    "pow": "Power",
    "swiglu": "Swiglu",
}
DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
CAPTION = (
    "Instructions per element on the shortest path through the vector loop. arithmetic: the least time of "
    "the unit in brackets. limit: the slower of arithmetic and the copy. A dtype that the report does not "
    "have is compared with a copy of as many bytes."
)


def main(
    ops_report: Annotated[
        Path, typer.Argument(metavar="REPORT", help="The JSON file of an ops report from a GPU.")
    ] = report.RESULTS / "ops-nvidia-h200.json",
    library: Annotated[
        Path | None,
        typer.Option(
            help="The library that was measured. Default: the libcustom_ops.so that Python finds.",
            show_default=False,
        ),
    ] = None,
    output: Output = None,
) -> None:
    """Compare measured times of elementwise ops with the least time that their instructions take.

    Counts the machine instructions of each kernel by unit, with cuobjdump and without a GPU. Divides the
    counts by what a multiprocessor executes per clock, at the clock in the report.

    Example:

        twinop bench instructions bench/results/ops-nvidia-h200.json
    """
    with clear_errors():
        document = read_ops(ops_report)
        folder = output_folder(output)
        facts = document["environment"]
        found = kernels(library or find_library("custom_ops"))
        rows = [row for kernel in chosen(found) for row in rows_of(kernel, document)]
        show(rows)
        path = folder / f"instructions-{report.machine_name(facts)}.json"
        settings = {"lanes": LANES, "clock_mhz": clock_mhz(document), "measured": ops_report.name}
        write_json(path, "instructions", facts, settings=settings, rows=rows)


def chosen(found: Sequence[Kernel]) -> list[tuple[str, Kernel]]:
    """Returns (op, kernel) for large tensors: the kernels with most vectors per thread."""
    by_key: dict[tuple[str, str], Kernel] = {}
    for kernel in sorted(found, key=lambda kernel: kernel.vectors):
        by_key[kernel.functor, kernel.dtype] = kernel
    keys = ((op, functor, dtype) for op, functor in FUNCTORS.items() for dtype in DTYPES)
    return [(op, by_key[functor, dtype]) for op, functor, dtype in keys if (functor, dtype) in by_key]


def clock_mhz(document: dict[str, Any]) -> float:
    """Returns the clock of the multiprocessors.

    Raises:
        BenchError: the report has none, because it was not measured on a GPU.
    """
    clocks = document.get("clocks") or {}
    text = (clocks.get("after") or clocks.get("before") or {}).get("clocks.sm", "")
    try:
        return float(text.split()[0])
    except (IndexError, ValueError):
        raise BenchError(
            "the report names no clock of multiprocessors: it was not measured on a GPU"
        ) from None


def microseconds(kernel: Kernel, elements: int, document: dict[str, Any]) -> dict[str, float]:
    """Returns the least time of each unit.

    Raises:
        BenchError: the number of the GPU's multiprocessors is not known here.
    """
    gpu = document["environment"].get("gpu")
    if gpu not in MULTIPROCESSORS:
        raise BenchError(
            f"{gpu}: its multiprocessors are not counted in bench/instructions.py. Add a line there"
        )
    each = elements / MULTIPROCESSORS[gpu] / clock_mhz(document)
    return {unit: clocks * each for unit, clocks in kernel.clocks.items()}


def rows_of(op_kernel: tuple[str, Kernel], document: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a row for each shape, without twinop's times if the dtype was not measured."""
    op, kernel = op_kernel
    cells = [
        cell
        for cell in cells_of(document["rows"])
        if (cell.kind, cell.device, cell.op, cell.direction) == ("bandwidth", "cuda", op, "forward")
        and COPY in cell.rows
    ]
    measured = {cell.dtype for cell in cells}
    rows = []
    for cell in cells:
        stands_in = kernel.dtype not in measured and cell.dtype == "float32"
        elements = elements_of(cell.shape) * DTYPES[cell.dtype] // DTYPES[kernel.dtype]
        if (cell.dtype == kernel.dtype or stands_in) and elements * DTYPES[kernel.dtype] > RESIDENT_BYTES:
            rows.append(_row(op, kernel, cell, elements, measured=not stands_in, document=document))
    return rows


def elements_of(shape: str) -> int:
    """Returns the number of elements of a shape such as 2^28 or 32768x4096."""
    sizes = (part.split("^") for part in shape.split("x"))
    return math.prod(int(size[0]) ** int(size[-1] if len(size) > 1 else 1) for size in sizes)


def _row(
    op: str, kernel: Kernel, cell: Cell, elements: int, *, measured: bool, document: dict[str, Any]
) -> dict[str, Any]:
    least = microseconds(kernel, elements, document)
    unit = max(least, key=least.__getitem__)
    limit = max(least[unit], cell.us(COPY))
    row = {
        "op": op,
        "dtype": kernel.dtype,
        "shape": cell.shape if measured else report.size_name(elements),
        "vectors": kernel.vectors,
        "instructions": kernel.per_element,
        "unit": unit,
        "arithmetic_us": round(least[unit], 2),
        "copy_us": cell.us(COPY),
        "limit": "arithmetic" if least[unit] > cell.us(COPY) else "memory",
    }
    if measured:
        ours = {name: cell.us(name) for name in OURS if name in cell.rows}
        tolerance = min(cell.tolerance, MOST_TOLERANCE)
        row |= {
            "us": ours,
            "share_of_limit": {name: round(limit / us, 3) for name, us in ours.items()},
            "share_of_arithmetic": {name: round(least[unit] / us, 3) for name, us in ours.items()},
            "tolerance": round(tolerance, 4),
            "passed": all(limit / us >= LIMIT_BAR * (1 - tolerance) for us in ours.values()),
        }
    return row


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Prints the largest shape of each op and dtype."""
    units = list(LANES)
    columns = ["", "shape", *units, "arithmetic, us", "copy, us", "measured, us", "share of the limit"]
    table = report.table("Instructions per element, and the time they take at least", columns, CAPTION)
    largest: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        kept = largest.get((row["op"], row["dtype"]))
        if kept is None or row["copy_us"] > kept["copy_us"]:
            largest[row["op"], row["dtype"]] = row
    for (op, dtype), row in largest.items():
        shares = row.get("share_of_limit", {})
        share = min(shares.values(), default=None)
        table.add_row(
            f"{op}, {dtype}",
            row["shape"],
            *(f"{row['instructions'][unit]:.1f}" for unit in units),
            f"{row['arithmetic_us']:.1f} ({row['unit']})",
            f"{row['copy_us']:.1f}",
            f"{max(row['us'].values()):.1f}" if shares else "",
            f"{report.flag(f'{share:.2f}', row['passed'])} of {row['limit']}"
            if share is not None
            else row["limit"],
        )
    report.show(table)
