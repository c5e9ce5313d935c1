"""The inference service beside plain servers: `twinop bench serve`."""

import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from http.client import HTTPResponse
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated, Any

import numpy as np
import onnx
import typer

from twinop import child
from twinop.console import clear_errors

from twinop.bench import report
from twinop.bench.figures import draw_serve
from twinop.bench.recording import Commit, Device, Output, Recording
from . import load
from .servers import (
    FASTAPI,
    GRPC,
    KSERVE,
    MODELS,
    OURS,
    PROCESSES,
    REST,
    SERVERS,
    UNBATCHED,
    Model,
    Server,
    commands,
    protocols,
    server_names,
    session,
    started,
)

BARE = "session.run"
CLIENTS = (1, 16, 64)

LONE_ROUNDS = 5
"""With one client there are this many times the rounds.

On two cores, runs switch between two speeds, 1 : 1.5, for seconds at a time, whichever server is measured.
Three rounds are too few to average that out.
"""


def requests(model: Model, folder: Path) -> dict[tuple[str, str], Path]:
    """Writes the requests as files, and returns them by protocol and server: FastAPI or another."""
    from twinop.deploy.service.protocol import pb

    inputs = model.inputs()
    raw = [array.tobytes() for array in inputs.values()]
    tensors = [
        {"name": name, "shape": list(array.shape), "datatype": _DATATYPES[array.dtype.name]}
        for name, array in inputs.items()
    ]
    sizes = [{"parameters": {"binary_data_size": len(each)}} for each in raw]
    described = [tensor | size for tensor, size in zip(tensors, sizes, strict=True)]
    header = json.dumps({"inputs": described, "parameters": {"binary_data_output": True}}).encode()
    message = pb.ModelInferRequest(model_name=model.name, inputs=tensors, raw_input_contents=raw)
    length = f"Inference-Header-Content-Length: {len(header)}\r\n"
    found = {
        (REST, OURS): _post(f"/v2/models/{model.name}/infer", header + b"".join(raw), length),
        (REST, FASTAPI): _post("/infer", b"".join(raw), ""),
        (GRPC, OURS): message.SerializeToString(),
    }
    paths = {}
    for number, (key, content) in enumerate(found.items()):
        paths[key] = folder / f"{model.name}-request-{number}"
        paths[key].write_bytes(content)
    return paths


_DATATYPES = {"float32": "FP32", "int64": "INT64"}


def _post(path: str, body: bytes, more: str) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/octet-stream\r\n{more}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def check(server: Server, request: Path, expected: np.ndarray) -> None:
    """Sends the HTTP request once and compares the answer.

    Raises:
        BenchError: the answer differs from the output of a session.
    """
    with socket.create_connection(("127.0.0.1", server.ports[REST]), timeout=30) as connection:
        connection.sendall(request.read_bytes())
        answer = HTTPResponse(connection)
        answer.begin()
        body = answer.read()
    tail = np.frombuffer(body[-expected.nbytes :], expected.dtype) if answer.status == 200 else np.empty(0)
    if tail.size != expected.size or not np.allclose(tail, expected.ravel(), rtol=1e-3, atol=1e-4):
        raise report.BenchError(f"{server.name} gives a wrong answer ({answer.status}): {body[:300]!r}")


def bare(opened: Any, inputs: dict[str, np.ndarray], clients: int, seconds: float) -> dict[str, float]:
    """Measures session.run without a network, by callers in threads of their own."""

    def call(end: float) -> list[float]:
        times = []
        while (start := time.perf_counter()) < end:
            opened.run(None, inputs)
            times.append(time.perf_counter() - start)
        return times

    start = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        calls = [pool.submit(call, start + seconds) for _ in range(clients)]
        times = [each for done in calls for each in done.result()]
    return load.percentiles(times, time.perf_counter() - start)


def measure_once(
    server: Server, protocol: str, request: Path, clients: int, seconds: float
) -> dict[str, Any]:
    """Measures one server once, from a process of its own.

    Raises:
        BenchError: the clients failed, or an answer was an error.
    """
    method = load.METHOD if protocol == GRPC else ""
    processes = max(1, min(clients // 8, (os.cpu_count() or 1) // 4))  # one is slower than several servers
    options = load.Load(server.ports[protocol], str(request), clients, seconds, method, processes)
    line = child.module("twinop.bench.serving.load", json.dumps(asdict(options)))
    done = subprocess.run(line, capture_output=True, text=True, timeout=seconds * 10 + 60, check=False)
    if done.returncode:
        raise report.BenchError(f"the clients of {server.name} ended:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    if failures := found.pop("failures"):
        said = "; ".join(sorted(set(failures))[:3])
        raise report.BenchError(f"{server.name}, {protocol}: {len(failures)} failures: {said}")
    return found


def measure(
    model: Model,
    provider: str,
    seconds: float,
    rounds: int,
    folder: Path,
    step: Callable[[str], object],
    servers: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Measures servers of one model, which lies in the folder: all of them, unless some are named.

    Returns:
        A row for each server, protocol and number of clients, with medians over the rounds. A round takes the
        servers in turn, and every other round takes them in reverse.
    """
    path = folder / f"{model.name}.onnx"
    files = requests(model, folder)
    opened, inputs = session(path, provider), model.inputs()
    expected = opened.run(None, inputs)[0]
    label = {"model": model.name, "device": provider}
    alone = label | {"server": BARE, "protocol": "none", "ready_seconds": None}
    rows: list[dict[str, Any]] = [
        alone | {"clients": count, **bare(opened, inputs, count, seconds)} for count in CLIENTS
    ]
    with ExitStack() as stack:
        found = [
            stack.enter_context(started(name, command, model.name, folder / f"{model.name}-{name}.log"))[0]
            for name, command in commands(model, path, provider).items()
            if not servers or name in servers
        ]
        cases = [
            (server, protocol, files[protocol, FASTAPI if server.name == FASTAPI else OURS], clients)
            for clients in CLIENTS
            for protocol in (REST, GRPC)
            for server in found
            if protocol in protocols(server.name)
        ]
        for server in found:
            check(server, files[REST, FASTAPI if server.name == FASTAPI else OURS], expected)
        runs: list[list[dict[str, Any]]] = [[] for _ in cases]
        turns = list(zip(runs, cases, strict=True))
        for turn in range(rounds * LONE_ROUNDS):
            for kept, (server, protocol, request, clients) in turns if turn % 2 else reversed(turns):
                if len(kept) == rounds and clients > 1:
                    continue
                step(f"{model.name}: {server.name}, {protocol}, clients: {clients}")
                kept.append(measure_once(server, protocol, request, clients, seconds))
    for kept, (server, protocol, _, clients) in zip(runs, cases, strict=True):
        medians = {key: median(run[key] for run in kept) for key in kept[0]}
        p50s = [run["p50_ms"] for run in kept]
        rows.append(
            label
            | {"server": server.name, "protocol": protocol, "clients": clients}
            | {"ready_seconds": round(server.ready_seconds, 2), **medians}
            | {"spread": round(max(p50s) / min(p50s) - 1, 3)}
            | ({"p50s_ms": p50s} if clients == 1 else {})
        )
    return rows


def bars(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the verdicts. At one client, each round's p50 is compared with KServe's in the same round."""

    def value(model: str, server: str, protocol: str, clients: int, key: str) -> Any:
        wanted = (model, server, protocol, clients)
        [row] = [r for r in rows if (r["model"], r["server"], r["protocol"], r["clients"]) == wanted]
        return row[key]

    measured = {row["server"] for row in rows}
    found = []
    ready = [row["ready_seconds"] for row in rows if row["model"] == "small" and row["server"] == OURS]
    bound = 2.0 if rows[0]["device"] == "cuda" else 0.6
    found += [report.bar("small: seconds from the start to ready", ready[0], bound)] if ready else []
    for model in dict.fromkeys(row["model"] for row in rows):
        if {PROCESSES, OURS, FASTAPI} <= measured:
            found += _of_processes(model, rows, value)
        if KSERVE not in measured or OURS not in measured:
            continue
        for protocol in (REST, GRPC):
            pairs = (value(model, server, protocol, 1, "p50s_ms") for server in (OURS, KSERVE))
            ratios = [ours / peers for ours, peers in zip(*pairs, strict=True)]
            found.append(report.bar(f"{model}, {protocol}, 1 client: p50 / KServe's", median(ratios), 1.1))
            found[-1]["quartiles"] = [round(each, 3) for each in quantiles(ratios, method="inclusive")[::2]]
            if model != "wide":
                continue
            for key, least, bound in (("per_second", True, 1.5), ("p99_ms", False, 1.0)):
                for peer in {KSERVE, UNBATCHED} & measured:
                    ratio = value(model, OURS, protocol, 64, key) / value(model, peer, protocol, 64, key)
                    what = f"{model}, {protocol}, 64 clients: {key} / {peer}"
                    found.append(report.bar(what, ratio, bound, least=least))
    return found


def _of_processes(
    model: str, rows: Sequence[dict[str, Any]], value: Callable[..., Any]
) -> list[dict[str, Any]]:
    """Returns the verdicts about one process for each core, or for each GPU."""
    cuda, cores = rows[0]["device"] == "cuda", os.cpu_count() or 1
    clients, bound = (64, 1.8) if cuda else (64, 3.0) if cores >= 16 else (16, 1.7)
    if model != ("encoder" if cuda else "small"):
        return []
    rates = [value(model, server, REST, clients, "per_second") for server in (PROCESSES, OURS)]
    what = f"{model}, REST, {clients} clients: per_second / one process"
    found = [report.bar(what, rates[0] / rates[1], bound, least=True)]
    if not cuda:
        peers = [value(model, server, REST, 64, "per_second") for server in (PROCESSES, FASTAPI)]
        what = f"{model}, REST, 64 clients: per_second of processes / FastAPI"
        found.append(report.bar(what, peers[0] / peers[1], 1.0, least=True))
    return found


def main(
    models: Annotated[
        str, typer.Option(help="Models to measure: small,wide,encoder.")
    ] = "small,wide,encoder",
    servers: Annotated[
        str, typer.Option(help='Servers to measure, such as "twinop,FastAPI". Default: all.')
    ] = "",
    device: Device = "auto",
    seconds: Annotated[float, typer.Option(help="Seconds of load per server and number of clients.")] = 2.0,
    rounds: Annotated[
        int,
        typer.Option(help=f"Rounds, whose median is kept; {LONE_ROUNDS} times as many with one client."),
    ] = 3,
    output: Output = None,
    commit: Commit = None,
) -> None:
    """Measure the inference service beside plain KServe, a plain FastAPI server, and session.run alone.

    Everything runs on one machine, through loopback. The clients run in a process of their own, and each
    sends its next request when it has its answer.

    Example:

        twinop bench serve --models small --rounds 1
    """
    with clear_errors():
        where = report.choose_device(device)
        names = report.chosen("--models", models, [model.name for model in MODELS])
        chosen = [model for model in MODELS if model.name in names]
        recording = Recording("serve", where, output, commit)
        rows: list[dict[str, Any]] = []
        known = list(SERVERS)
        some = report.chosen("--servers", servers, known) if servers else known
        running = [name for name in server_names(where.type) if name in some]
        steps = (
            len(chosen) * len(sum(map(protocols, running), ())) * rounds * (len(CLIENTS) - 1 + LONE_ROUNDS)
        )
        with report.progress("serve", steps) as step, tempfile.TemporaryDirectory() as work:
            for model in chosen:  # all before the first measurement: one may fail
                onnx.save(model.build(), Path(work) / f"{model.name}.onnx")
            for model in chosen:
                rows += measure(model, where.type, seconds, rounds, Path(work), step, some)
                recording.write(last=False, rows=rows)
        columns = ["model", "server", "protocol", "clients", "p50_ms", "p99_ms", "per_second"]
        report.show_rows("The inference service beside plain servers", rows, [*columns, "ready_seconds"])
        verdicts = bars(rows)
        report.show_bars(verdicts)
        settings: dict[str, Any] = {"seconds": seconds, "rounds": rounds}
        settings |= {"rounds_at_one_client": rounds * LONE_ROUNDS, "cpus": os.cpu_count()}
        recording.write(settings=settings, bars=verdicts, rows=rows)
        title = report.machine_title(recording.facts)
        draw_serve(rows, title, recording.path.with_suffix(".png"))
