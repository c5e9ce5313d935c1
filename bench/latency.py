"""Latency of small inputs: many calls in one CUDA graph, so that launches and not the host are measured."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from onnx import helper
from torch import Tensor

from twinop import torch_op
from twinop.bench import runtime
from twinop.bench.cases import Case
from twinop.bench.cells import AGAIN, IN_TORCH
from twinop.bench.peers import Entry
from twinop.bench.providers import Problem, Providers, Subject, reason_of
from twinop.bench.runs import onnx_nodes
from twinop.bench.timing import DeviceTimer, Run, Time

CALLS = 100  # of a graph, one after another


def latencies(
    providers: Providers,
    timer: DeviceTimer,
    case: Case,
    entry: Entry,
    subjects: Mapping[str, Subject],
    inputs: Mapping[str, Tensor],
    outputs: Sequence[Tensor],
    rounds: int,
) -> dict[str, Time]:
    """Device time of one call, by provider.

    torch's providers are captured: a graph of CALLS calls of the same function. ONNX Runtime captures itself:
    a model of CALLS nodes that all read the same inputs.
    """
    replays: dict[str, Run] = {}
    for name, subject in subjects.items():
        try:
            if subject.bound:
                replays[name] = _ort_replay(providers, case, entry, name, inputs, outputs)
            else:
                replays[name] = _captured(subject.run, timer.stream)
        except Exception as failure:  # a peer that cannot be captured
            providers.problems.append(Problem(case, name, reason_of(failure)))
    if IN_TORCH in replays:
        replays[IN_TORCH + AGAIN] = replays[IN_TORCH]
    times = timer.times(replays, rounds=rounds)
    return {
        name: Time(each.median / CALLS, each.low / CALLS, each.runs, each.host)
        for name, each in times.items()
    }


def _captured(run: Run, stream: torch.cuda.Stream) -> Run:
    """Not torch.cuda.graph(): that collects garbage for each of hundreds of graphs."""
    for _ in range(3):
        run()
    torch.cuda.synchronize(stream.device)
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")  # stream is the current one
    try:
        for _ in range(CALLS):
            run()
    finally:
        graph.capture_end()
    graph.replay()
    return graph.replay


def _ort_replay(
    providers: Providers,
    case: Case,
    entry: Entry,
    provider: str,
    inputs: Mapping[str, Tensor],
    outputs: Sequence[Tensor],
) -> Run:
    """A session under ONNX Runtime's own CUDA graph: the first runs allocate and capture, then it replays."""
    names = list(torch_op.records()[entry.op].outputs)
    nodes, opset = onnx_nodes(entry, provider)
    bound = dict(zip(names, outputs, strict=True))
    model = runtime.one_op(repeat(nodes, names, CALLS), inputs, bound, opset, fixed=True)
    session = runtime.open_session(
        model,
        providers.device,
        library="custom_ops",
        cpu_threads=providers.threads,
        stream=providers.stream,
        cuda_graph=True,
    )
    first = runtime.bind(session, inputs, bound)
    for _ in range(3):
        first()
    return runtime.bind(session, inputs, bound, synchronize=False)


def repeat(nodes: Sequence[Any], outputs: Sequence[str], times: int) -> list[Any]:
    """The same nodes many times over the same inputs; the last copy writes the model's outputs."""
    copies = []
    inner = {name for node in nodes for name in node.output if name}
    for i in range(times):
        last = i == times - 1
        for j, node in enumerate(nodes):
            copy = helper.make_node(node.op_type, [], [], f"copy{i}_{j}", domain=node.domain)
            copy.CopyFrom(node)
            copy.name = f"copy{i}_{j}"

            def rename(name: str, i: int = i, last: bool = last) -> str:
                return name if last or name not in inner else f"{name}_{i}"

            del copy.input[:], copy.output[:]
            copy.input.extend(map(rename, node.input))
            copy.output.extend(map(rename, node.output))
            copies.append(copy)
    return copies
