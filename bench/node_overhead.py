"""The cost of a custom node in ONNX Runtime, and of a built-in one: `twinop bench node-overhead`."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
import typer

from twinop.console import clear_errors, out

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
                runtime.one_op(runtime.chain(op, nodes), {"x": self.x}, {"y": self.y}, fixed=True),
                device,
                library="custom_relu",
                **options,
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
    label = {"device": device, "nodes": nodes, "time": what}
    return [
        label | {"provider": name} | time.row() | {"ns_per_node": round(time.median * 1e9 / nodes, 1)}
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


def bar(device: str, nodes: int, what: str, us: Mapping[str, float]) -> dict[str, Any]:
    """Returns the verdict on a chain. The built-in chain's difference from itself is the tolerance."""
    noise = max(NOISE, abs(us[AGAIN] / us["built-in"] - 1))
    text = f"twinop / built-in, {what} time, {nodes} nodes, {device}"
    return report.bar(text, us["twinop"] / us["built-in"], 1, tolerance=noise)


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
            held = [(CUDA_NODES, f"CUDA graph, {what}") for what in ("wall", "device")]
        else:
            rows = measure_cpu(CPU_NODES, 301 if quick else 20001, 0.5 if quick else 8.0)
            held = [(CPU_NODES[-1], "wall")]
        chains = report.medians(rows, "nodes", "time")
        if where.type == "cpu":
            few, many = (chains[count, "wall"] for count in CPU_NODES)
            more = CPU_NODES[1] - CPU_NODES[0]
            slope = {name: round((many[name] - few[name]) * 1e3 / more, 1) for name in many}
            content["slope_ns_per_node"] = slope
            out.print("one more node costs, in ns:", slope)
        verdicts = [bar(where.type, *chain, chains[chain]) for chain in held]
        columns = ("nodes", "time", "provider", "median_us", "low_us", "ns_per_node")
        report.show_rows("Chains of one-element nodes, float32", rows, columns)
        report.show_bars(verdicts)
        settings = {"quick": quick, "graph_optimization": "off", "cpu_threads": 2}
        recording.write(settings=settings, **content, bars=verdicts, rows=rows)
