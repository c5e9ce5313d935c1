"""The cost of a custom node in ONNX Runtime, and of a built-in one: `twinop bench node-overhead`."""

from collections.abc import Sequence
from typing import Annotated, Any

import torch
import typer

from twinop.console import clear_errors

from . import report, runtime
from .recording import Commit, Device, Output, Recording
from .timing import DeviceTimer, Run, Time, host_times

OPS = {"twinop": "CustomRelu", "built-in": "Relu"}
AGAIN = "built-in again"  # the same session a second time: the difference between the two is noise

CPU_NODES = (20, 200)
CUDA_NODES = 50
NOISE = 0.01  # the least noise of a ratio of two medians


class Chains:
    """A chain of one-element nodes for each op: the sessions, and the tensors that they are bound to."""

    def __init__(self, device: torch.device, nodes: int, **options: Any) -> None:
        self.x = torch.randn(1, device=device)
        self.y = torch.empty_like(self.x)
        self.sessions = {
            name: runtime.open_session(
                runtime.chain(op, nodes, torch.float32, 1), device, library="custom_relu", **options
            )
            for name, op in OPS.items()
        }
        for name, run in self.runs().items():
            self.y.fill_(123.0)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            for _ in range(3):  # with a CUDA graph: allocate, capture, replay
                run()
            if not torch.equal(self.y, torch.relu(self.x)):
                raise report.BenchError(f"{name}: {nodes} nodes are not torch.relu: nothing is measured")

    def runs(self, synchronize: bool = True) -> dict[str, Run]:
        runs = {
            name: runtime.bind(session, {"x": self.x}, {"y": self.y}, synchronize=synchronize)
            for name, session in self.sessions.items()
        }
        return runs | {AGAIN: runs["built-in"]}


def rows_of(device: str, nodes: int, what: str, times: dict[str, Time]) -> list[dict[str, Any]]:
    return [
        {"device": device, "nodes": nodes, "provider": name, "time": what}
        | time.row()
        | {"ns_per_node": round(time.median * 1e9 / nodes, 1)}
        for name, time in times.items()
    ]


def measure_cpu(nodes: Sequence[int], rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Measures the wall time of chains of several lengths."""
    rows: list[dict[str, Any]] = []
    with report.progress("node overhead", len(nodes)) as step:
        for count in nodes:
            step(f"{count} nodes")
            chains = Chains(torch.device("cpu"), count, cpu_threads=2)
            rows += rows_of("cpu", count, "wall", host_times(chains.runs(), rounds=rounds, seconds=seconds))
    return rows


def measure_cuda(device: torch.device, nodes: int, rounds: int) -> list[dict[str, Any]]:
    """Measures wall time with the wait for the device, and device time, with and without a CUDA graph."""
    rows: list[dict[str, Any]] = []
    stream = torch.cuda.Stream(device)
    timer = DeviceTimer(stream)
    with report.progress("node overhead", 2) as step:
        for graph in (False, True):
            kind = "CUDA graph" if graph else "no graph"
            step(kind)
            chains = Chains(device, nodes, cpu_threads=2, stream=stream, cuda_graph=graph)
            wall = host_times(chains.runs(), rounds=rounds * 10, seconds=5.0, after=stream.synchronize)
            rows += rows_of("cuda", nodes, f"{kind}, wall", wall)
            queued = timer.times(chains.runs(synchronize=False), rounds=rounds)
            rows += rows_of("cuda", nodes, f"{kind}, device", queued)
    return rows


def find(rows: Sequence[dict[str, Any]], nodes: int, what: str, provider: str) -> dict[str, Any]:
    return next(r for r in rows if (r["nodes"], r["time"], r["provider"]) == (nodes, what, provider))


def compare(rows: Sequence[dict[str, Any]], nodes: int, what: str) -> tuple[float, float]:
    """Returns the time of the custom chain, and of the built-in one again, relative to the built-in one."""
    ours, theirs, again = (find(rows, nodes, what, name)["median_us"] for name in (*OPS, AGAIN))
    return ours / theirs, again / theirs


def bar(rows: Sequence[dict[str, Any]], nodes: int, what: str) -> dict[str, Any]:
    ratio, again = compare(rows, nodes, what)
    noise = max(NOISE, abs(again - 1))
    text = f"twinop / built-in, {what} time, {nodes} nodes, {rows[0]['device']}"
    return report.bar(text, ratio, 1, tolerance=noise)


def show(rows: Sequence[dict[str, Any]], caption: str) -> None:
    columns = ["chain", "twinop, us", "built-in, us", "twinop, ns/node", "built-in", "ratio", "noise"]
    table = report.table("A chain of one-element nodes, float32", columns, caption)
    for nodes, what in dict.fromkeys((row["nodes"], row["time"]) for row in rows):
        ours, theirs = (find(rows, nodes, what, name) for name in OPS)
        ratio, again = compare(rows, nodes, what)
        table.add_row(
            f"{nodes} nodes, {what}",
            *(f"{row['median_us']:.2f}" for row in (ours, theirs)),
            *(f"{row['ns_per_node']:.0f}" for row in (ours, theirs)),
            report.flag(f"{ratio:.3f}", bar(rows, nodes, what)["passed"]),
            f"{again:.3f}",
        )
    report.show(table)


def slopes(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Returns the nanoseconds that one more node costs, from the shortest and the longest chain."""
    few, many = min(row["nodes"] for row in rows), max(row["nodes"] for row in rows)

    def us(nodes: int, name: str) -> float:
        return float(find(rows, nodes, "wall", name)["median_us"])

    return {name: round((us(many, name) - us(few, name)) * 1e3 / (many - few), 1) for name in (*OPS, AGAIN)}


def main(
    device: Device = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="A quick look: fewer runs, in seconds.")] = False,
    output: Output = None,
    commit: Commit = None,
) -> None:
    """Measure what a node costs: a chain of CustomRelu nodes against a chain of ONNX Runtime's Relu.

    The tensors have one element, so only the overhead remains. Graph optimisation is off for both chains,
    because ONNX Runtime would fold them, and the report counts the nodes of the graph that runs. Both chains
    run in turn, in one process, on a shared thread pool; the report keeps medians.

    On a CPU: chains of 20 and 200 nodes. Their difference gives the cost of one more node. On a GPU: 50
    nodes, with and without a CUDA graph, wall time and device time.

    Example:

        twinop bench node-overhead --device cpu --quick
    """
    with clear_errors():
        where = report.choose_device(device)
        recording = Recording("node-overhead", where, output, commit)
        content: dict[str, Any] = {}
        if where.type == "cuda":
            rows = measure_cuda(where, CUDA_NODES, 15 if quick else 51)
            show(rows, "wall: a run and the wait for it. device: between events, after a memset.")
            verdicts = [bar(rows, CUDA_NODES, f"CUDA graph, {what}") for what in ("wall", "device")]
        else:
            rows = measure_cpu(CPU_NODES, 301 if quick else 20001, 0.5 if quick else 8.0)
            content["slope_ns_per_node"] = slope = slopes(rows)
            each = ", ".join(f"{name} {value:.0f} ns" for name, value in slope.items())
            show(rows, f"Medians. noise: the built-in chain, measured twice. One more node costs: {each}.")
            verdicts = [bar(rows, CPU_NODES[-1], "wall")]
        report.show_bars(verdicts)
        settings = {"quick": quick, "graph_optimization": "off", "cpu_threads": 2}
        recording.write(settings=settings, **content, bars=verdicts, rows=rows)
