"""The bars that the ops are held to, and what each cell makes of them."""

from collections.abc import Iterator, Sequence
from typing import Any

from twinop.bench.cells import AGAIN, COPY, DOUBLE, OURS, Cell

Verdict = dict[str, Any]
"""what, value, bar, passed, and group: the line of the table that it belongs to."""

COPY_BARS = {"unary": 0.98, "binary": 0.97}  # of the copy's speed
ROW_BARS = {"swiglu": 0.97, "swiglu_packed": 0.97, "add_rms_norm": 0.97, "add_layer_norm": 0.97}
ROW_BAR, MISALIGNED_BAR, WIDE_BAR, WIDE = 0.93, 0.85, 0.85, "4096x65536"
ARITHMETIC = ("gelu", "pow")
"""Where arithmetic may be the limit, not memory: a miss is to be held against `--ncu`."""

BUILT_IN_SHAPE = "32768x4096"
BUILT_IN_ELEMENTS = "2^27"  # as many elements: element-wise ops are measured on one dimension
BUILT_IN_BARS = {"gelu": 3.3, "swiglu": 3.7, "softmax": 1.95, "layer_norm": 2.9, "rms_norm": 2.2}

MOST_TOLERANCE = 0.1  # a cell whose runs differ by more shows nothing; it is not let off for that

BACKWARD_PEERS = ("torch.compile", "torch.compile max-autotune", "Liger")

CPU_ELEMENTWISE = 1.05  # times the time of the runtime's own
CPU_ROWS = 0.8  # of the speed of the better one


def verdicts(cells: Sequence[Cell]) -> list[Verdict]:
    """One for each bar and cell, with the tolerance of the cell counted in."""
    found: list[Verdict] = []
    for cell in cells:
        if cell.dtype == DOUBLE:
            continue  # held against its instructions: bench/instructions.py
        if cell.device == "cpu":
            found += _cpu(cell)
        elif cell.kind == "latency":
            found += _peers(cell, "latency under a CUDA graph, against the best peer")
        else:
            found += _copy(cell)
            found += _peers(cell, f"{cell.direction}, against the best peer")
            found += _built_in(cell)
    return found


def copy_bar(cell: Cell) -> float:
    if cell.family != "rows":
        return COPY_BARS[cell.family]
    if not cell.aligned:
        return MISALIGNED_BAR
    if cell.shape == WIDE:
        return WIDE_BAR
    return ROW_BARS.get(cell.op, ROW_BAR)


def _verdict(group: str, cell: Cell, who: str, value: float, bar: float, least: bool) -> Verdict:
    """`least`: the value must be the bar or more; else, or less."""
    tolerance = min(cell.tolerance, MOST_TOLERANCE)
    slack = 1 - tolerance if least else 1 + tolerance
    return {
        "group": group,
        "what": f"{group}: {who}, {cell.name}",
        "value": round(value, 3),
        "bar": f"{'>=' if least else '<='} {bar} within {tolerance:.1%}",
        "passed": bool(value >= bar * slack if least else value <= bar * slack),
    }


def _copy(cell: Cell) -> Iterator[Verdict]:
    if cell.direction == "backward" or COPY not in cell.rows:
        return
    bar = copy_bar(cell)
    group = f"share of the copy, {'rows' if cell.family == 'rows' else cell.family}"
    for ours in _measured(cell):
        verdict = _verdict(group, cell, ours, cell.share(ours), bar, True)
        if cell.op in ARITHMETIC and not verdict["passed"]:
            verdict["note"] = "may be limited by arithmetic: see --ncu"
        yield verdict


def _peers(cell: Cell, group: str) -> Iterator[Verdict]:
    peers = cell.peers
    if cell.direction == "backward":
        peers = [name for name in peers if name in BACKWARD_PEERS]
    if not peers:
        return
    best = min(peers, key=cell.us)
    for ours in _measured(cell):
        who = f"{ours} / {best}, time"
        yield _verdict(group, cell, who, cell.us(ours) / cell.us(best), 1.0, False)


def _built_in(cell: Cell) -> Iterator[Verdict]:
    """Against the node that a stock export holds: the first of ONNX Runtime's in the table of peers."""
    wanted = BUILT_IN_SHAPE if cell.family == "rows" else BUILT_IN_ELEMENTS
    built_in = next((name for name in cell.rows if name.startswith("ORT") and AGAIN not in name), None)
    if cell.dtype != "bfloat16" or cell.shape != wanted or cell.op not in BUILT_IN_BARS or not built_in:
        return
    if OURS[1] in cell.rows:
        value = cell.us(built_in) / cell.us(OURS[1])
        bar = BUILT_IN_BARS[cell.op]
        yield _verdict("in ORT, times as fast as its built-in", cell, built_in, value, bar, True)


def _cpu(cell: Cell) -> Iterator[Verdict]:
    """Element-wise: each runtime's own beside ours. Row-wise: the better of the two beside ours."""
    if cell.direction == "backward":
        return
    own = {
        OURS[0]: [name for name in cell.peers if name == "torch eager"],
        OURS[1]: [name for name in cell.peers if name.startswith("ORT")],
    }
    for ours in _measured(cell):
        rows = cell.family == "rows"
        rivals = [*own[OURS[0]], *own[OURS[1]]] if rows else own[ours]
        if not rivals:
            continue
        best = min(rivals, key=cell.us)
        if rows:
            speed = cell.us(best) / cell.us(ours)
            yield _verdict("CPU, rows, speed", cell, f"{ours} / {best}", speed, CPU_ROWS, True)
        else:
            times = cell.us(ours) / cell.us(best)
            yield _verdict("CPU, element-wise, time", cell, f"{ours} / {best}", times, CPU_ELEMENTWISE, False)


def _measured(cell: Cell) -> list[str]:
    return [name for name in OURS if name in cell.rows]
