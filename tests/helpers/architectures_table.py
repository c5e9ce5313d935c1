"""The table of the architectures' exports: printed after the tests, and recorded."""

import json
import os
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

RECORDED = Path(__file__).resolve().parents[1] / "results/architectures.json"
SITE = Path(sys.prefix) / "architectures"  # where timm and torchvision are
OUTPUT = "TWINOP_ARCHITECTURES"  # an environment variable: where to write the table
PROPERTY = "architecture"
# "torch cannot": torch's own export refuses the model, or its file does not give the model's results.
PASSES, TORCH_CANNOT, FAILS = "passes", "torch cannot", "fails"
_COLOURS = {PASSES: "green", TORCH_CANNOT: "yellow", FAILS: "red"}
_LIBRARIES = ("torch", "onnxruntime", "transformers", "timm", "torchvision")

Outcomes = dict[str, dict[str, dict[str, Any]]]  # architecture -> exporter -> outcome, ops ...


def load() -> Outcomes:
    return json.loads(RECORDED.read_text())["architectures"]


def collect(reports: Iterable[Any]) -> Outcomes:
    """From pytest's reports, which xdist's workers send too."""
    found: Outcomes = {}
    for report in reports:
        for name, row in getattr(report, "user_properties", ()):
            if name == PROPERTY and report.when == "call":
                row = dict(row)
                if report.failed:
                    crash = getattr(report.longrepr, "reprcrash", None)
                    row |= {"outcome": FAILS, "reason": crash.message.partition("\n")[0] if crash else ""}
                found.setdefault(row.pop("architecture"), {})[row.pop("exporter")] = row
    return dict(sorted(found.items()))


def show(found: Outcomes, console: Console) -> None:
    exporters = sorted({exporter for rows in found.values() for exporter in rows})
    table = Table("architecture", *exporters, title="exports of whole architectures", title_justify="left")
    for architecture, rows in found.items():
        table.add_row(architecture, *(_cell(rows.get(exporter)) for exporter in exporters))
    console.print(table)
    counts = [row["outcome"] for rows in found.values() for row in rows.values()]
    console.print(", ".join(f"{counts.count(each)} {each}" for each in _COLOURS), highlight=False)


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "-"
    reason = f": {row['reason']}" if "reason" in row else ""
    return f"[{_COLOURS[row['outcome']]}]{row['outcome']}[/]{escape(reason)}"


def write(found: Outcomes, path: Path) -> None:
    """A line for each architecture: they are many, and compared as lines."""
    versions = json.dumps({name: _version(name) for name in _LIBRARIES})
    rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in found.items())
    path.write_text(f'{{\n "versions": {versions},\n "architectures": {{\n{rows}\n }}\n}}\n')


def _version(name: str) -> str:
    found = distributions(name=name, path=[*sys.path, str(SITE)])
    return next((each.version for each in found), "not installed")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    found = collect(report for reports in terminalreporter.stats.values() for report in reports)
    if found:
        show(found, Console(width=160))
        if path := os.environ.get(OUTPUT):
            write(found, Path(path))
