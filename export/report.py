"""What an export made and what was found about it."""

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Parity:
    """Outputs compared with torch's: `error` is the largest |difference| / max(1, |torch's largest|)."""

    error: float
    equal: bool  # bit for bit, any NaN equal to any
    outputs: int

    def __str__(self) -> str:
        return "bit for bit" if self.equal else f"largest error {self.error:.1e}"


@dataclass
class ExportReport:
    path: Path
    exporter: str
    opsets: dict[str, int]  # by domain, the standard one as "ai.onnx"
    inputs: dict[str, str]  # name -> dtype and shape
    outputs: dict[str, str]
    nodes: dict[str, int]  # "Gemm", "custom_domain.CustomRelu" -> count
    size: int  # bytes, external data included
    data_path: Path | None = None  # external data, where there is any
    library: Path | None = None  # the one that the parity run used
    parity: Parity | None = None  # with the library; None: not run, `parity_reason` says why
    parity_reason: str = ""
    bodies: bool = True  # attached
    replaced: dict[str, int] = field(default_factory=dict)  # nodes in place of standard operators, by type
    fused: dict[str, int] = field(default_factory=dict)  # nodes made of a sum and a norm, by type
    resized: bool = False  # parity was run at other sizes as well
    without_library: Parity | None = None  # the function bodies; None: `without_reason` says why
    without_reason: str = ""
    unsupported: list[str] = field(
        default_factory=list
    )  # op x dtype cells that ORT cannot run without the library
    notes: list[str] = field(default_factory=list)

    @property
    def opset(self) -> int:
        return self.opsets["ai.onnx"]

    @property
    def custom_ops(self) -> list[str]:
        return sorted(name.partition(".")[2] for name in self.nodes if "." in name)
