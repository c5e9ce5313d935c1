"""The inference service beside plain servers: `twinop bench serve`."""

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated, Any

import numpy as np
import typer

from twinop.console import clear_errors

from .. import report
from ..figures import draw_serve
from ..recording import Commit, Device, Output, Recording
from .load import METHOD, Load, check, command, requests
from .servers import (
    FASTAPI,
    GRPC,
    KSERVE,
    MODELS,
    OURS,
    REST,
    UNBATCHED,
    Model,
    Server,
    more,
    servers,
    session_options,
    write,
)

BARE = "session.run"
CLIENTS = (1, 16, 64)

LONE_ROUNDS = 5
"""With one client there are this many times the rounds.

On two cores, runs switch between two speeds, 1 : 1.5, for seconds at a time, whichever server is measured.
Three rounds are too few to average that out.
"""


def bare(
    path: Path, provider: str, inputs: dict[str, np.ndarray], seconds: float
) -> tuple[dict[int, dict[str, float]], np.ndarray]:
    """Measures session.run without a network.

    Returns:
        A row for each number of callers, each in a thread of its own; and the output.
    """
    import onnxruntime as ort

    options_, providers = session_options(provider)
    session = ort.InferenceSession(str(path), options_, providers=providers)
    expected = session.run(None, inputs)[0]

    def call(end: float) -> list[float]:
        times = []
        while (started := time.perf_counter()) < end:
            session.run(None, inputs)
            times.append(time.perf_counter() - started)
        return times

    found = {}
    for clients in CLIENTS:
        started = time.perf_counter()
        with ThreadPoolExecutor(clients) as pool:
            calls = [pool.submit(call, started + seconds) for _ in range(clients)]
            times = [each for done in calls for each in done.result()]
        p50, p90, p99 = np.percentile(times, [50, 90, 99]) * 1e3
        per_second = len(times) / (time.perf_counter() - started)
        row = {"p50_ms": p50, "p90_ms": p90, "p99_ms": p99, "per_second": per_second}
        found[clients] = {name: round(float(value), 4) for name, value in row.items()}
    return found, expected


def load(server: Server, protocol: str, request: Path, clients: int, seconds: float) -> dict[str, Any]:
    """Measures one server once.

    Raises:
        BenchError: the clients failed, or an answer was an error.
    """
    method = METHOD if protocol == GRPC else ""
    line = command(Load(server.ports[protocol], str(request), clients, seconds, method))
    done = subprocess.run(line, capture_output=True, text=True, timeout=seconds * 10 + 60, check=False)
    if done.returncode:
        raise report.BenchError(f"the clients of {server.name} ended:\n{done.stderr[-2000:]}")
    found = json.loads(done.stdout)
    if found["failed"]:
        raise report.BenchError(f"{server.name}, {protocol}: {found['failed']} failures: {found['failures']}")
    return found


def measure(
    model: Model, provider: str, seconds: float, rounds: int, folder: Path, step: Any
) -> list[dict[str, Any]]:
    """Measures all servers of one model.

    Returns:
        A row for each server, protocol and number of clients, with medians over the rounds. A round takes the
        servers in turn, and every other round takes them in reverse.
    """
    path = write(model, folder)
    files = requests(model, folder)
    alone, expected = bare(path, provider, model.inputs(), seconds)
    label = {"model": model.name, "device": provider}
    rows: list[dict[str, Any]] = [
        label | {"server": BARE, "protocol": "none", "clients": clients, "ready_seconds": None, **row}
        for clients, row in alone.items()
    ]
    with servers(model, path.rename(path.with_name(f"{model.name}.onnx")), provider, folder) as found:
        cases = [
            (server, protocol, files[protocol, FASTAPI if server.name == FASTAPI else OURS], clients, ready)
            for clients in CLIENTS
            for protocol in (REST, GRPC)
            for server, ready in found  # twinop and KServe, which are compared, are neighbours
            if protocol in server.ports
        ]
        for server, protocol, request, clients, _ in cases:
            if protocol == REST and clients == CLIENTS[0]:
                check(server, request, expected)
        runs: list[list[dict[str, Any]]] = [[] for _ in cases]
        turns = list(zip(runs, cases, strict=True))
        for turn in range(rounds * LONE_ROUNDS):
            for kept, (server, protocol, request, clients, _) in turns if turn % 2 else reversed(turns):
                if len(kept) == rounds and clients > 1:
                    continue
                step(f"{model.name}: {server.name}, {protocol}, clients: {clients}")
                kept.append(load(server, protocol, request, clients, seconds))
    for kept, (server, protocol, _, clients, ready) in zip(runs, cases, strict=True):
        medians = {
            key: median(run[key] for run in kept) for key in ("p50_ms", "p90_ms", "p99_ms", "per_second")
        }
        p50s = [run["p50_ms"] for run in kept]
        rows.append(
            label
            | {"server": server.name, "protocol": protocol, "clients": clients}
            | {"ready_seconds": round(ready, 2), **medians, "spread": round(max(p50s) / min(p50s) - 1, 3)}
            | ({"p50s_ms": p50s} if clients == 1 else {})
        )
    return rows


def bars(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the verdicts. At one client, each round's p50 is compared with KServe's in the same round."""

    def value(model: str, server: str, protocol: str, clients: int, key: str) -> Any:
        wanted = (model, server, protocol, clients)
        [row] = [r for r in rows if (r["model"], r["server"], r["protocol"], r["clients"]) == wanted]
        return row[key]

    found = []
    ready = [row["ready_seconds"] for row in rows if row["model"] == "small" and row["server"] == OURS]
    found += [report.bar("small: seconds from the start to ready", ready[0], 3.0)] if ready else []
    for model in dict.fromkeys(row["model"] for row in rows):
        for protocol in (REST, GRPC):
            pairs = (value(model, server, protocol, 1, "p50s_ms") for server in (OURS, KSERVE))
            ratios = [ours / peers for ours, peers in zip(*pairs, strict=True)]
            found.append(report.bar(f"{model}, {protocol}, 1 client: p50 / KServe's", median(ratios), 1.1))
            found[-1]["quartiles"] = [round(each, 3) for each in quantiles(ratios, method="inclusive")[::2]]
            if model != "wide":
                continue
            for key, least, bound in (("per_second", True, 1.5), ("p99_ms", False, 1.0)):
                for peer in (KSERVE, UNBATCHED):
                    ratio = value(model, OURS, protocol, 64, key) / value(model, peer, protocol, 64, key)
                    what = f"{model}, {protocol}, 64 clients: {key} / {peer}"
                    found.append(report.bar(what, ratio, bound, least=least))
    return found


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Prints a table for each model: a column per number of clients, a row per server and protocol."""
    columns = [f"{clients} clients" if clients > 1 else "1 client" for clients in CLIENTS]
    for model in MODELS:
        chosen = [row for row in rows if row["model"] == model.name]
        if not chosen:
            continue
        title = f"{model.title}: p50 / p99 ms, requests per second"
        table = report.table(title, ["", *columns, "ready after"])
        for key in dict.fromkeys((row["server"], row["protocol"]) for row in chosen):
            here = {r["clients"]: r for r in chosen if (r["server"], r["protocol"]) == key}
            cells = [
                f"{r['p50_ms']:.2f} / {r['p99_ms']:.2f}, {r['per_second']:.0f}" if r else ""
                for r in map(here.get, CLIENTS)
            ]
            ready = next((f"{r['ready_seconds']:.1f} s" for r in here.values() if r["ready_seconds"]), "")
            table.add_row(key[0] if key[1] == "none" else f"{key[0]}, {key[1]}", *cells, ready)
        report.show(table)


def main(
    models: Annotated[
        str, typer.Option(help="Models to measure: small,wide,encoder.")
    ] = "small,wide,encoder",
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
        chosen = [model for model in MODELS if model.name in models.split(",")]
        if unknown := set(models.split(",")) - {model.name for model in MODELS}:
            known = ", ".join(model.name for model in MODELS)
            raise report.BenchError(f"--models {','.join(sorted(unknown))}: expected some of {known}")
        recording = Recording("serve", where, output, commit)
        rows: list[dict[str, Any]] = []
        pairs = sum(7 + len(more(model, where.type)) for model in chosen)
        steps = pairs * rounds * (len(CLIENTS) - 1 + LONE_ROUNDS)
        with report.progress("serve", steps) as step, tempfile.TemporaryDirectory() as work:
            for model in chosen:
                rows += measure(model, where.type, seconds, rounds, Path(work), step)
        show(rows)
        verdicts = bars(rows)
        report.show_bars(verdicts)
        settings: dict[str, Any] = {"seconds": seconds, "rounds": rounds}
        settings |= {"rounds_at_one_client": rounds * LONE_ROUNDS, "cpus": os.cpu_count()}
        recording.write(settings=settings, bars=verdicts, rows=rows)
        title = report.machine_title(recording.facts)
        draw_serve(rows, title, recording.path.with_suffix(".png"))
