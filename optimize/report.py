"""The report of `twinop optimize`."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from twinop.errors import option

_NAMES = 6  # of narrowed weights; `narrowed` has the others
_GAIN = 0.95  # a larger share of the original's time is noise


@dataclass
class Float8:
    """Which matmuls `dtype="float8"` has put in 8 bits, and how close the file is to the original.

    Matmuls have the names of their outputs, and the relative error of the result for the x of the file in 16
    bits; 0 where nothing was measured (`dry_run`).
    """

    layers: dict[str, float] = field(default_factory=dict)  # those in 8 bits
    returned: dict[str, float] = field(default_factory=dict)  # back in 16 bits, to keep `max_error`
    kept: dict[str, int] = field(default_factory=dict)  # the number of those that stay in 16 bits, by reason
    error: float = 0.0  # the largest relative error of an output, compared with the original in fp32
    error_16: float = 0.0  # that of the same file in 16 bits
    max_error: float = 0.0  # the largest one that was allowed

    def lines(self) -> list[str]:
        """Returns the matmuls as lines of text."""
        largest = max(self.layers.values(), default=0.0)
        worst = f"; the largest error of one: {largest:.1e}" if largest else ""
        back = ", ".join(f"{name} {error:.1e}" for name, error in self.returned.items())
        back = f"  back in 16 bits, for an error of at most {self.max_error:g}: {back}" if back else ""
        kept = [f"  in 16 bits: {count} {reason}" for reason, count in self.kept.items()]
        return [each for each in (f"  in 8 bits: {len(self.layers)} matmuls{worst}", back, *kept) if each]


@dataclass
class OptimizeReport:
    """What `optimize` returns."""

    source: Path
    path: Path
    dtype: str = "float32"
    nodes_before: int = 0
    nodes_after: int = 0
    bytes_before: int = 0  # the size of the source with its external data
    bytes_after: int = 0
    fused: dict[str, int] = field(default_factory=dict)  # nodes of rewrites, by what they compute
    skipped: dict[str, int] = field(default_factory=dict)  # patterns not fused, by pattern and reason
    reverted: dict[str, str] = field(default_factory=dict)  # rewrites; why: other results, or slower here
    error: float = 0.0  # the largest relative error of the outputs, compared with the original in fp32
    own_error: float | None = None  # that of the original in 16 bits, if both run on this machine
    times: tuple[float, float] | None = None  # ms of a run of the source and of the result: `drop_slow`
    device: str = ""
    untimed: str = ""  # why there are no times
    timed_shape: tuple[int, ...] = ()  # of the first input in these runs
    inlined: dict[str, int] = field(default_factory=dict)  # nodes of custom ops in standard operators
    libraries: list[Path] = field(default_factory=list)  # those with ops of the result
    narrowed: list[str] = field(default_factory=list)  # matmuls, weights: fp32 in the source, 16 bits here
    needs: list[str] = field(default_factory=list)  # operators of the file that only ONNX Runtime has
    compared: Mapping[str, int] = field(default_factory=dict)  # how much was, by what, such as "segments run"
    float8: Float8 | None = None  # all else is said of the same file in 16 bits, from which it was made
    same: bool = False  # the file is the original; nothing was recognised or converted
    estimate: str = ""  # of memory and disk, where nothing was written: `dry_run`
    explained: str = ""  # which condition of each rewrite failed at a node: `explain`; then all that is shown
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        """The report for programs: what was compared, fused, skipped and reverted. It names no folders, and
        an infinite error is null, as JSON has no such number."""
        fields = asdict(self) | {"source": self.source.name, "path": self.path.name}
        fields |= {"libraries": [path.name for path in self.libraries]}
        return json.dumps(json.loads(json.dumps(fields), parse_constant=lambda name: None), indent=2)

    def add_note(self, note: str) -> None:
        """Adds a note, once; an empty one is none."""
        if note and note not in self.notes:
            self.notes.append(note)

    def __str__(self) -> str:
        """The report as lines of text."""
        if self.explained:
            return self.explained
        own = f"; the original in {self.dtype}: {self.own_error:.1e}" if self.own_error is not None else ""
        times = ""
        if self.times is not None:
            shape = f", first input {list(self.timed_shape)}"
            gained = "" if self.times[1] < self.times[0] * _GAIN else "nothing gained: "
            times = f"; {gained}{self.times[0]:.3g} -> {self.times[1]:.3g} ms on {self.device}{shape}"
        same = f"same outputs (relative error {self.error:.1e}{own}){times}"
        if self.float8 is not None and self.float8.layers:
            same = (
                f"outputs are close, not the same: relative error {self.float8.error:.1e}; the same file in "
                f"{self.dtype}: {self.float8.error_16:.1e}"
            )
        lines = [
            f"{self.source.name} -> {self.path.name}: {self.nodes_before} nodes -> {self.nodes_after}; "
            f"{'nothing was compared or written' if self.estimate else same}"
        ]
        if not self.fused:
            lines.append(f"  nothing was fused: the file is the original{'' if self.same else ', converted'}")
        lines += [f"  {count} {what}" for what, count in self.fused.items()]
        lines += [f"  not fused: {count} {what}" for what, count in self.skipped.items()]
        lines += [f"  reverted: {name}: {reason}" for name, reason in self.reverted.items()]
        lines += [
            f"  inlined: {count} {op}: no library of {op.partition('::')[0]} was found. "
            f"Name one with {option('library')} to keep them"
            for op, count in self.inlined.items()
        ]
        lines += self.float8.lines() if self.float8 is not None else []
        if self.narrowed:
            rest = len(self.narrowed) - _NAMES
            names = [*self.narrowed[:_NAMES], *([f"and {rest} others"] if rest > 0 else [])]
            lines.append(f"  float32 in the source, {self.dtype} here: {', '.join(names)}")
        size = f"size: {self.bytes_before / 1e6:.3g} -> {self.bytes_after / 1e6:.3g} MB"
        lines.append(f"  {self.estimate or size}")
        if self.libraries:
            lines.append(f"  libraries: {', '.join(map(str, self.libraries))}")
        if self.needs:
            lines.append(f"  needs ONNX Runtime: {', '.join(self.needs)}")
        slower = self.times[1] / self.times[0] if self.times is not None else 0.0
        if slower > 1.05:
            lines.append(f"  {self.dtype} takes longer here than the dtype of the original")
        elif self.device == "cpu" and (self.same or slower >= _GAIN):
            lines.append(
                "  nothing gained: ONNX Runtime runs the original as fast on the CPU. On Intel's, OpenVINO's "
                "provider may be faster, in plain ONNX Runtime: pip install onnxruntime-ep-openvino"
            )
        lines += [f"  no time was measured: {self.untimed}"] if self.untimed else []
        if self.compared:
            lines.append(
                f"  compared: {', '.join(f'{count} {what}' for what, count in self.compared.items())}"
            )
        lines += [f"  note: {note}" for note in self.notes]
        lines.append(f"  {prepared_for(self.device)}")
        return "\n".join(lines)


def prepared_for(device: str) -> str:
    """Returns for which device a file was optimised, and how to optimise it for the other one."""
    other = "cpu" if device == "cuda" else "cuda"
    return f"optimised for {device}; {option('device', other)} optimises it for {other}"
