"""python bench/node_overhead.py: what a custom node costs in ONNX Runtime, beside a built-in one."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

if __name__ == "__main__":  # a script: the root comes first, and this folder is not a place to import from
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch
import typer

from twinop.bench import options, report, runtime
from twinop.bench.timing import DeviceTimer, Run, Time, host_times
from twinop.console import clear_errors

OPS = {"twinop": "CustomRelu", "built-in": "Relu"}
AGAIN = "built-in again"  # the same session once more: what the two differ by is noise

CPU_NODES = (20, 200)
CUDA_NODES = 50
NOISE = 0.01  # of the ratio of two medians, at least; more where the built-in, timed twice, differs by more


class Chains:
    """A chain of one-element nodes for each op: sessions, and tensors that live as long as they do."""

    def __init__(self, device: torch.device, nodes: int, **options: Any) -> None:
        self.x = torch.randn(1, device=device)
        self.y = torch.empty_like(self.x)
        self.sessions = {
            name: runtime.open_session(runtime.chain(op, nodes, torch.float32, 1), device, **options)
            for name, op in OPS.items()
        }
        for name, run in self.runs().items():
            self.y.fill_(123.0)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            for _ in range(3):  # with CUDA graphs: allocate, capture, replay
                run()
            if not torch.equal(self.y, torch.relu(self.x)):
                raise report.BenchError(f"{name}: {nodes} nodes are not torch.relu: nothing is measured")

    def runs(self, synchronize: bool = True) -> dict[str, Run]:
        runs = {
            name: runtime.bound_run(session, self.x, self.y, synchronize=synchronize)
            for name, session in self.sessions.items()
        }
        return runs | {AGAIN: runs["built-in"]}


def rows_of(device: str, nodes: int, what: str, times: dict[str, Time]) -> list[dict[str, Any]]:
    return [
        {
            "device": device,
            "nodes": nodes,
            "provider": name,
            "time": what,
            "median_us": round(time.median * 1e6, 3),
            "low_us": round(time.low * 1e6, 3),
            "ns_per_node": round(time.median * 1e9 / nodes, 1),
            "runs": time.runs,
        }
        for name, time in times.items()
    ]


def measure_cpu(nodes: Sequence[int], rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Wall time of chains of several lengths: their difference is what a node costs, their rest the run."""
    rows: list[dict[str, Any]] = []
    with report.progress("node overhead", len(nodes)) as step:
        for count in nodes:
            step(f"{count} nodes")
            chains = Chains(torch.device("cpu"), count, cpu_threads=2)
            rows += rows_of("cpu", count, "wall", host_times(chains.runs(), rounds=rounds, seconds=seconds))
    return rows


def measure_cuda(device: torch.device, nodes: int, rounds: int) -> list[dict[str, Any]]:
    """With and without CUDA graph: wall time of a run and the wait for it; device time behind a memset."""
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
    """The custom chain's time over the built-in's, and that of the built-in timed again."""
    ours, theirs, again = (find(rows, nodes, what, name)["median_us"] for name in (*OPS, AGAIN))
    return ours / theirs, again / theirs


def bar(rows: Sequence[dict[str, Any]], nodes: int, what: str) -> dict[str, Any]:
    ratio, again = compare(rows, nodes, what)
    noise = max(NOISE, abs(again - 1))
    return {
        "what": f"twinop / built-in, {what} time, {nodes} nodes, {rows[0]['device']}",
        "value": round(ratio, 3),
        "bar": f"<= 1 within the noise of {noise:.1%}",
        "passed": ratio <= 1 + noise,
    }


def show(rows: Sequence[dict[str, Any]], caption: str) -> None:
    columns = ["chain", "twinop, us", "built-in, us", "twinop, ns/node", "built-in", "ratio", "noise"]
    table = report.table("A chain of one-element nodes, fp32", columns, caption)
    for nodes, what in dict.fromkeys((row["nodes"], row["time"]) for row in rows):
        ours, theirs = (find(rows, nodes, what, name) for name in OPS)
        ratio, again = compare(rows, nodes, what)
        table.add_row(
            f"{nodes} nodes, {what}",
            *(f"{row['median_us']:.2f}" for row in (ours, theirs)),
            *(f"{row['ns_per_node']:.0f}" for row in (ours, theirs)),
            f"[{'green' if bar(rows, nodes, what)['passed'] else 'red'}]{ratio:.3f}[/]",
            f"{again:.3f}",
        )
    report.show(table)


def slopes(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Nanoseconds that one more node costs: between the shortest and the longest chain."""
    few, many = min(row["nodes"] for row in rows), max(row["nodes"] for row in rows)
    return {
        name: round(
            (find(rows, many, "wall", name)["median_us"] - find(rows, few, "wall", name)["median_us"])
            * 1e3
            / (many - few),
            1,
        )
        for name in (*OPS, AGAIN)
    }


def main(
    device: options.Device = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer runs: seconds, for a look.")] = False,
    output: options.JsonFolder = None,
    commit: options.Commit = None,
) -> None:
    """Measure what a node costs: a chain of CustomRelu nodes against a chain of ONNX Runtime's Relu.

    The tensors have one element, so that nothing but the overhead is left. Graph optimisation is off for both
    chains, so that neither is folded, and the nodes of the graph that runs are counted. Both are run in turn,
    in one process, on a shared thread pool; medians.

    On a CPU: chains of 20 and 200 nodes; their difference is what one more node costs. On a GPU: 50 nodes,
    with and without a CUDA graph, wall time and device time.

    Examples:

        python -m twinop.bench node-overhead

        python bench/node_overhead.py --device cpu --quick
    """
    with clear_errors():
        where = report.choose_device(device)
        folder = report.output_folder(output)
        facts = report.environment(where, commit)
        report.print_environment(facts)
        before = report.clocks(where)
        content: dict[str, Any] = {}
        if where.type == "cuda":
            rows = measure_cuda(where, CUDA_NODES, 15 if quick else 51)
            show(rows, "wall: a run and the wait for it. device: between events, behind a memset.")
            verdicts = [bar(rows, CUDA_NODES, f"CUDA graph, {what}") for what in ("wall", "device")]
        else:
            rows = measure_cpu(CPU_NODES, 301 if quick else 20001, 0.5 if quick else 8.0)
            content["slope_ns_per_node"] = slope = slopes(rows)
            each = ", ".join(f"{name} {value:.0f} ns" for name, value in slope.items())
            show(rows, f"Medians; noise: the built-in's, timed twice. One more node costs: {each}.")
            verdicts = [bar(rows, CPU_NODES[-1], "wall")]
        report.show_bars(verdicts)
        report.write_json(
            folder / f"node-overhead-{report.machine_name(facts)}.json",
            "node-overhead",
            facts,
            settings={"quick": quick, "graph_optimization": "off", "cpu_threads": 2},
            clocks={"before": before, "after": report.clocks(where)},
            **content,
            bars=verdicts,
            rows=rows,
        )


if __name__ == "__main__":
    typer.run(main)
