"""python -m twinop.bench serve: the inference service beside plain servers, loaded by clients of its own."""

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

from twinop.bench import options, report
from twinop.bench.serving.figure import draw
from twinop.bench.serving.load import Load, arguments
from twinop.bench.serving.models import MODELS, Model, session_options, write
from twinop.bench.serving.requests import METHOD, check, requests
from twinop.bench.serving.servers import FASTAPI, GRPC, KSERVE, OURS, REST, UNBATCHED, Server, more, servers
from twinop.console import clear_errors, out

BARE = "session.run"
CLIENTS = (1, 16, 64)

# At one client, so many rounds for each of the others. On two cores here a run takes 1.6 or 2.5 ms (encoder),
# 2.0 or 3.2 ms (wide), for a second or more at a time, whoever serves: of three rounds, chance made 1.5 of a
# ratio that is 1.0 in fifteen.
LONE_ROUNDS = 5


# ------------------------------------------------------------------------------------------- measuring


def bare(
    path: Path, provider: str, inputs: dict[str, np.ndarray], seconds: float
) -> tuple[dict[int, dict[str, float]], np.ndarray]:
    """session.run alone, no network: by the number of callers, each a thread; and what it gives."""
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
    """
    Raises:
        BenchError: an answer was an error.
    """
    method = METHOD if protocol == GRPC else ""
    command = arguments(Load(server.ports[protocol], str(request), clients, seconds, method))
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds * 10 + 60, check=False)
    if done.returncode:
        raise report.BenchError(f"the clients of {server.name} ended:\n{done.stderr[-2000:]}")
    found = json.loads(done.stdout)
    if found["failed"]:
        raise report.BenchError(f"{server.name}, {protocol}: {found['failed']} failures: {found['failures']}")
    return found


def measure(
    model: Model, provider: str, seconds: float, rounds: int, folder: Path, step: Any
) -> list[dict[str, Any]]:
    """The rows of one model: medians over rounds that take the servers in turn, every other one backwards."""
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
            for server, ready in found  # ours and KServe's are neighbours, which are compared
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
                step(f"{model.name}: {server.name}, {protocol}, {clients} clients")
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
    def value(model: str, server: str, protocol: str, clients: int, key: str) -> Any:
        [row] = [
            row
            for row in rows
            if (row["model"], row["server"], row["protocol"], row["clients"])
            == (model, server, protocol, clients)
        ]
        return row[key]

    def bar(what: str, value: float, least: bool, bound: float) -> dict[str, Any]:
        passed = value >= bound if least else value <= bound
        text = f"{'>=' if least else '<='} {bound:g}"
        return {"what": what, "value": round(value, 3), "bar": text, "passed": bool(passed)}

    found = []
    ready = [row["ready_seconds"] for row in rows if row["model"] == "small" and row["server"] == OURS]
    found += [bar("small: seconds from the start to ready", ready[0], False, 3.0)] if ready else []
    for model in dict.fromkeys(row["model"] for row in rows):
        for protocol in (REST, GRPC):
            pairs = (value(model, server, protocol, 1, "p50s_ms") for server in (OURS, KSERVE))
            ratios = [ours / peers for ours, peers in zip(*pairs, strict=True)]
            found.append(bar(f"{model}, {protocol}, 1 client: p50 / KServe's", median(ratios), False, 1.1))
            found[-1]["quartiles"] = [round(each, 3) for each in quantiles(ratios, method="inclusive")[::2]]
            if model != "wide":
                continue
            for key, least, bound in (("per_second", True, 1.5), ("p99_ms", False, 1.0)):
                for peer in (KSERVE, UNBATCHED):
                    ratio = value(model, OURS, protocol, 64, key) / value(model, peer, protocol, 64, key)
                    found.append(bar(f"{model}, {protocol}, 64 clients: {key} / {peer}", ratio, least, bound))
    return found


def show(rows: Sequence[dict[str, Any]]) -> None:
    for model in MODELS:
        chosen = [row for row in rows if row["model"] == model.name]
        if not chosen:
            continue
        columns = [f"{clients} clients" if clients > 1 else "1 client" for clients in CLIENTS]
        table = report.table(
            f"{model.title}: p50 / p99 ms, requests a second", ["", *columns, "ready after"],
        )  # fmt: skip
        for key in dict.fromkeys((row["server"], row["protocol"]) for row in chosen):
            cells, ready = [], ""
            for clients in CLIENTS:
                here = [
                    row
                    for row in chosen
                    if (row["server"], row["protocol"], row["clients"]) == (*key, clients)
                ]
                cells += [f"{r['p50_ms']:.2f} / {r['p99_ms']:.2f}, {r['per_second']:.0f}" for r in here] or [
                    ""
                ]
                ready = next((f"{r['ready_seconds']:.1f} s" for r in here if r["ready_seconds"]), ready)
            name = key[0] if key[1] == "none" else f"{key[0]}, {key[1]}"
            table.add_row(name, *cells, ready)
        report.show(table)


def main(
    models: Annotated[str, typer.Option(help="Of small,wide,encoder.")] = "small,wide,encoder",
    device: options.Device = "auto",
    seconds: Annotated[float, typer.Option(help="Of load, for each server and number of clients.")] = 2.0,
    rounds: Annotated[
        int,
        typer.Option(help=f"The median of so many is kept; of {LONE_ROUNDS} times as many at one client."),
    ] = 3,
    output: options.PlotFolder = None,
    commit: options.Commit = None,
) -> None:
    """Measure the inference service beside plain KServe, FastAPI by hand, and session.run alone.

    One machine, through loopback; the clients run in a process of their own, each sending its next
    request when it has its answer.

    Example:

        python -m twinop.bench serve --models small --rounds 1
    """
    with clear_errors():
        where = report.choose_device(device)
        chosen = [model for model in MODELS if model.name in models.split(",")]
        if unknown := set(models.split(",")) - {model.name for model in MODELS}:
            known = ", ".join(model.name for model in MODELS)
            raise report.BenchError(f"--models {','.join(sorted(unknown))}: expected some of {known}")
        folder = report.output_folder(output)
        facts = report.environment(where, commit)
        report.print_environment(facts)
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
        path = folder / f"serve-{report.machine_name(facts)}.json"
        machine = facts.get("gpu") or f"{facts['cpu']}, {facts['cpu_cores']} cores"
        figure = draw(rows, machine, path.with_suffix(".png"))
        out.print(f"wrote {figure}", highlight=False, soft_wrap=True)
        report.write_json(path, "serve", facts, settings=settings, bars=verdicts, rows=rows)
