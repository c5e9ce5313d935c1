"""What an optimisation did, as the command shows it."""

from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class OptimizeReport:
    """What `optimize` returns.

    Attributes:
        made: new nodes by what they compute.
        left: nodes that were left alone, by what they are and why.
        taken_back: rewrites that changed the results or, with `measure`, gained no time: why, by name.
        error: the largest relative error of the outputs, against the original in fp32.
        own_error: that of the original in the same 16 bits, where both run here.
        times: milliseconds of a run before and after, with `measure`.
        timed_on: cuda or cpu.
        needs: other runtimes' operators that the file has: it runs in ONNX Runtime only.
    """

    source: Path
    path: Path
    dtype: str = "float32"
    nodes_before: int = 0
    nodes_after: int = 0
    made: dict[str, int] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)
    taken_back: dict[str, str] = field(default_factory=dict)
    error: float = 0.0
    own_error: float | None = None
    times: tuple[float, float] | None = None
    device: str = ""
    timed_on: str = ""
    needs: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """The report as lines of text."""
        own = f", the original's own {self.own_error:.1e}" if self.own_error is not None else ""
        times = (
            f"; {self.times[0]:.3g} -> {self.times[1]:.3g} ms on {self.timed_on}"
            if self.times is not None
            else ""
        )
        lines = [
            f"{self.source.name} -> {self.path.name}: {self.nodes_before} nodes -> {self.nodes_after}; same "
            f"outputs (relative error {self.error:.1e}{own}){times}"
        ]
        if not self.made:
            lines.append("  nothing was recognised: the file is the original")
        lines += [f"  {count} {what}" for what, count in self.made.items()]
        lines += [f"  left alone: {count} {what}" for what, count in self.left.items()]
        lines += [f"  taken back: {name}: {reason}" for name, reason in self.taken_back.items()]
        if self.needs:
            lines.append(f"  needs ONNX Runtime: {', '.join(self.needs)}")
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)
