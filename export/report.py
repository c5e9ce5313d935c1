"""Describes what an export made and how it compares with torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Parity:
    """Outputs compared with torch's."""

    error: float  # the largest difference, as a share of torch's largest value of that output
    equal: bool  # whether all bits are equal; any NaN equals any other
    outputs: int  # their number

    def __str__(self) -> str:
        return "bit for bit" if self.equal else f"largest error {self.error:.1e}"


@dataclass
class ExportReport:
    """What `export` returns; the command line shows it as a table."""

    path: Path
    exporter: str
    bodies: bool = True  # function bodies were asked for
    opsets: dict[str, int] = field(default_factory=dict)  # by domain; the standard one is "ai.onnx"
    inputs: dict[str, str] = field(default_factory=dict)  # name -> dtype and shape
    outputs: dict[str, str] = field(default_factory=dict)
    nodes: dict[str, int] = field(default_factory=dict)  # "Gemm", "custom_domain.CustomRelu" -> count
    size: int = 0  # bytes, external data included
    data_path: Path | None = None  # external data, if there is any
    libraries: list[Path] = field(default_factory=list)  # those whose ops were compared with torch
    parity: Parity | None = None  # with the library; None: not compared, `parity_reason` says why
    parity_reason: str = ""
    resized: bool = False  # compared at other sizes as well
    without_library: Parity | None = None  # of the function bodies; None: `without_reason` says why
    without_reason: str = ""
    unsupported: list[str] = field(default_factory=list)  # ops and dtypes that need the library
    device: str = ""  # what it was optimised for, if it was to be
    optimized: Any = None  # the `twinop.optimize.OptimizeReport`, if it found anything
    notes: list[str] = field(default_factory=list)

    def take_files(self, files: Sequence[Path]) -> None:
        """Describes the files that were written, the model last."""
        self.size = sum(file.stat().st_size for file in files)
        self.data_path = files[0] if len(files) > 1 else None

    @property
    def opset(self) -> int:
        """The version of the standard operators."""
        return self.opsets["ai.onnx"]

    @property
    def custom_ops(self) -> list[str]:
        """The types of the model's nodes that are not standard operators."""
        return sorted(name.partition(".")[2] for name in self.nodes if "." in name)
