"""The files of the reports: the options that name them, writing during a report, and reading."""

import json
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from twinop.console import out

from . import report
from .cells import Row, summary
from .report import BenchError

FOLDER = Path("bench-results")  # the default is not lab/results/, whose files are committed
Device = Annotated[str, typer.Option(help="auto (the GPU if there is one), cpu or cuda.")]
Output = Annotated[
    Path | None, typer.Option(help="Folder for the files. Default: bench-results/.", show_default=False)
]
Commit = Annotated[
    str | None,
    typer.Option(
        help="The commit to record if git cannot tell it. TWINOP_COMMIT does the same.", show_default=False
    ),
]

_MEASURED = {"rows": ("median_us", "low_us", "runs", "host_us"), "numerics": ("max_ulp",)}
"""The fields of an ops report's rows that differ between the providers of a cell."""
_SAME = ("device", "gpu", "driver", "cpu", "torch", "onnxruntime", "twinop", "commit")


class Recording:
    """A report in the making: its file, the machine and the clocks at the start.

    Raises:
        BenchError: the folder cannot be created or written to.
    """

    def __init__(self, benchmark: str, device: torch.device, output: Path | None, commit: str | None) -> None:
        folder = output_folder(output)
        self.benchmark, self.device = benchmark, device
        self.facts = report.environment(device, commit)
        self.path = folder / f"{benchmark}-{report.machine_name(self.facts)}.json"
        report.print_environment(self.facts)
        self._before, self._started = report.clocks(device), time.perf_counter()

    @property
    def seconds(self) -> float:
        """The seconds since the start."""
        return round(time.perf_counter() - self._started, 1)

    def write(self, *, last: bool = True, **content: Any) -> None:
        """Writes {"benchmark", "environment", "clocks", ...content}, with one line per entry of a list.

        Until the last time the file is NAME.partial.json, so an older report survives.
        """
        clocks = {"before": self._before, "after": report.clocks(self.device) if last else None}
        document = {"benchmark": self.benchmark, "environment": self.facts, "clocks": clocks} | content
        if self.benchmark == "ops":  # one entry for each cell instead of each row, and a summary of the bars
            document |= {"columns": {}, "bars": summary(document["bars"])}
            for name, measured in _MEASURED.items():
                document["columns"][name], document[name] = pack(document[name], measured)
        partial = self.path.with_suffix(".partial.json")
        unfinished = self.path.with_name(f"{self.path.name}.unfinished")
        unfinished.write_text(_dumps(document))
        unfinished.replace(self.path if last else partial)
        if last:
            partial.unlink(missing_ok=True)
            out.print(f"wrote {self.path}", highlight=False, soft_wrap=True)


def output_folder(folder: Path | None) -> Path:
    """Creates the folder for the results. Commands call it before they measure anything.

    Raises:
        BenchError: it cannot be created or written to.
    """
    folder = folder or FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BenchError(
            f"--output {folder}: cannot be made: {error.strerror}. Name another folder"
        ) from error
    if not os.access(folder, os.W_OK):
        raise BenchError(f"--output {folder}: not writable. Name another folder")
    return folder


def read_json(path: Path) -> dict[str, Any]:
    """Reads a report. Its rows are one for each provider of each cell, however the file stores them.

    Raises:
        BenchError: the file cannot be read, or is not a report.
    """
    try:
        document = json.loads(path.read_text())
    except OSError as error:
        raise BenchError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise BenchError(f"{path}: not a JSON file: {error}") from error
    if not isinstance(document, dict) or "benchmark" not in document:
        raise BenchError(f"{path}: not a report of `twinop bench`")
    for name, columns in document.pop("columns", {}).items():
        document[name] = unpack(document[name], columns)
    return document


def to_add_to(
    path: Path,
    facts: Mapping[str, Any],
    settings: Mapping[str, Any],
    read: Callable[[Path], dict[str, Any]] = read_json,
) -> dict[str, Any] | None:
    """Returns the report at `path` if new rows may be added to it, and says what becomes of it.

    They may if it comes from the same machine, versions, settings and commit, and the commit has no changes.

    Raises:
        BenchError: the file is not a report.
    """
    if not path.exists():
        return None
    old = read(path)
    pairs = {name: (old["environment"].get(name), facts.get(name)) for name in _SAME}
    pairs |= {name: (old["settings"].get(name), value) for name, value in settings.items()}
    differing = [f"{name} was {a}, is {b}" for name, (a, b) in pairs.items() if a != b]
    if str(facts["commit"]).endswith(("unknown", "-changed")):
        differing.append("the sources may have changed")
    what = f"replaces {path} ({'; '.join(differing)})" if differing else f"adds to {path}"
    out.print(what, markup=False, highlight=False, soft_wrap=True)
    return None if differing else old


def rest_of(old: Mapping[str, Any] | None, names: Collection[str]) -> dict[str, Any]:
    """Returns the contents of a report on models without the models that are measured again."""
    old = old or {"not_measured": {}, "exports": {}, "rows": []}
    facts = {
        part: {key: value for key, value in old[part].items() if key.split(", ")[0] not in names}
        for part in ("not_measured", "exports")
    }
    return facts | {"bars": [], "rows": [row for row in old["rows"] if row["op"] not in names]}


def read_ops(path: Path) -> dict[str, Any]:
    """Reads a report of the ops.

    Raises:
        BenchError: the file cannot be read, or is another report.
    """
    document = read_json(path)
    if document["benchmark"] != "ops":
        raise BenchError(
            f"{path}: a report of '{document['benchmark']}', expected one of 'ops' (`twinop bench` writes it)"
        )
    for row in document["rows"]:
        row.pop("gb_per_s", None)  # older files have it; it follows from the bytes and the time
    return document


def pack(rows: Sequence[Row], measured: Sequence[str]) -> tuple[list[str], list[dict[str, Any]]]:
    """Groups rows by cell: one entry per cell, with the measured values of each provider as a list.

    Returns:
        The names of these values, and the entries.
    """
    columns = [name for name in measured if any(name in row for row in rows)]
    cells: dict[str, dict[str, Any]] = {}
    for row in rows:
        shared = {name: value for name, value in row.items() if name not in ("provider", *measured)}
        cell = cells.setdefault(json.dumps(shared), shared | {"providers": {}})
        cell["providers"][row["provider"]] = [row.get(name) for name in columns]
    return columns, list(cells.values())


def unpack(cells: Iterable[Row], columns: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the rows that `pack` grouped."""
    rows = []
    for cell in cells:
        shared = {name: value for name, value in cell.items() if name != "providers"}
        for provider, values in cell["providers"].items():
            measured = zip(columns, values, strict=True)
            rows.append(shared | {"provider": provider} | {k: v for k, v in measured if v is not None})
    return rows


def _dumps(document: Mapping[str, Any]) -> str:
    fields = []
    for name, value in document.items():
        if isinstance(value, list) and value and all(isinstance(entry, dict) for entry in value):
            lines = ",\n  ".join(map(json.dumps, value))
            fields.append(f" {json.dumps(name)}: [\n  {lines}\n ]")
        else:
            fields.append(f" {json.dumps(name)}: " + json.dumps(value, indent=1).replace("\n", "\n "))
    return "{\n" + ",\n".join(fields) + "\n}\n"
