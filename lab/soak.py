"""The inference service under mixed load while versions change, and at SIGTERM: `twinop bench soak`."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.request
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import typer
from onnx import numpy_helper

from twinop.console import clear_errors, err
from twinop.record import DOMAIN

from twinop.bench import report
from twinop.bench.recording import Commit, Output, Recording
from .clients import Outcome, client
from .mixed import NAME
from .servers import GRPC, REST, Server, parsed, started

CLIENTS = 32
_BROKEN_EACH = 4  # every fourth version is corrupt
_LOADED = 30.0  # seconds within which a new version is loaded or refused


def write_version(folder: Path, version: int, broken: bool = False) -> None:
    """Adds y = CustomRelu(x) + version, so that an answer shows which version made it.

    It does so as a copy over the network does: first the folder, then the file in pieces.
    """
    nodes = [f"r = {DOMAIN}.CustomRelu(x)", "y = Add(r, version)"]
    weight = numpy_helper.from_array(np.array([version], np.float32), "version")
    data = parsed("(float[n, 8] x) => (float[n, 8] y)", nodes, [weight]).SerializeToString()
    target = folder / NAME / str(version)
    target.mkdir(parents=True)
    with (target / "model.onnx").open("wb") as file:
        file.write(data[:20])
        file.flush()
        time.sleep(0.05)
        file.write(data[20 : len(data) // 2 if broken else None])


def service(
    models: Path, log: Path, *more: str
) -> AbstractContextManager[tuple[Server, subprocess.Popen[bytes]]]:
    """Starts the service on a folder of models. Yields it and its process when the soak's model is ready."""
    options = ["--provider", "cpu", "--control", "poll", "--max-batch-size", "32", "--log-level", "warning"]
    return started("twinop", ["twinop", "serve", str(models), *options, *more], NAME, log)


def _processes(pid: int) -> list[int]:
    """Returns a process and those that it started."""
    return [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


def open_files(pid: int) -> int:
    return sum(len(os.listdir(f"/proc/{each}/fd")) for each in _processes(pid))


async def _watch(pid: int, outcome: Outcome) -> None:
    started = time.monotonic()
    while True:
        pages = sum(int(Path(f"/proc/{each}/statm").read_text().split()[1]) for each in _processes(pid))
        resident = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
        outcome.samples.append((time.monotonic() - started, resident, open_files(pid)))
        if len(outcome.samples) % 20 == 0:
            err.print(f"soak: {outcome.requests} requests", highlight=False)
        await asyncio.sleep(0.5)


def _state(server: Server, version: int) -> str:
    """Returns the state of a version, or "" if there is no such version."""
    url = f"http://127.0.0.1:{server.ports[REST]}/status"
    with urllib.request.urlopen(url, timeout=30) as answer:
        models = json.load(answer)["models"]
    states = {(each["name"], each["version"]): each["state"] for each in models}
    return states.get((NAME, str(version)), "")


async def _swap(server: Server, models: Path, every: float, outcome: Outcome) -> None:
    """Adds a version every `every` seconds, and half of that later removes the old or a corrupt one."""
    version, served = 1, 1
    await asyncio.sleep(every)
    while True:
        version += 1
        broken = version % _BROKEN_EACH == 0
        await asyncio.to_thread(write_version, models, version, broken)
        await asyncio.sleep(every / 2)  # the previous version serves until the new one does
        end = time.monotonic() + _LOADED
        while (state := await asyncio.to_thread(_state, server, version)) not in ("ready", "unavailable"):
            if time.monotonic() > end:
                break
            await asyncio.sleep(0.05)
        if broken:
            outcome.broken[version], gone = state, version
        else:
            gone, served = served, version
        shutil.rmtree(models / NAME / str(gone))
        await asyncio.sleep(every / 2)
        if not broken:
            outcome.swapped.append(version)  # it had this time to answer


async def soak(
    server: Server,
    pid: int,
    models: Path,
    requests: int,
    every: float,
    *,
    seconds: float = 0.0,
) -> Outcome:
    """Sends at least this many requests for at least this many seconds, while versions change.

    Args:
        every: the seconds from one version to the next.
    """
    outcome = Outcome()
    started = time.monotonic()

    def more() -> bool:
        return outcome.requests < requests or time.monotonic() < started + seconds

    watching = asyncio.create_task(_watch(pid, outcome))
    swapping = asyncio.create_task(_swap(server, models, every, outcome))
    await asyncio.gather(*(client(server, seed, outcome, more) for seed in range(CLIENTS)))
    for task in (watching, swapping):
        if task.done():
            task.result()  # raises the task's error
        task.cancel()
    outcome.lost += outcome.cut_off.values()  # the server was there all the time
    return outcome


async def ended_under_load(
    server: Server, running: subprocess.Popen[bytes], log: Path, seconds: float
) -> Outcome:
    """Sends SIGTERM while all clients are sending. They go on until the process has ended.

    A gRPC call that was cut off is lost if the server's log, at level debug, says that it was accepted.
    """
    outcome = Outcome()
    end = time.monotonic() + seconds + 60

    async def send_signal() -> None:
        await asyncio.sleep(seconds)
        running.send_signal(signal.SIGTERM)

    def more() -> bool:
        return running.poll() is None and time.monotonic() < end

    await asyncio.gather(send_signal(), *(client(server, seed, outcome, more) for seed in range(CLIENTS)))
    await asyncio.to_thread(running.wait, 40)
    known = accepted(log)
    outcome.lost += [f"{said}: accepted" for number, said in outcome.cut_off.items() if number in known]
    return outcome


def accepted(log: Path) -> set[str]:
    """Returns the ids of the gRPC calls that the server began to handle.

    Raises:
        BenchError: the log has none, so it does not tell which calls are lost.
    """
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    found = {line["request_id"] for line in lines if line["message"] == "accepted"}
    if not found:
        raise report.BenchError(f"{log}: the server, at --log-level debug, lists no call that it accepted")
    return found


# ------------------------------------------------------------------------------------------- reporting


def growth(outcome: Outcome) -> tuple[float, float, int]:
    """Returns the median RSS in MiB after the first fifth and at the end, and the growth of open files."""
    fifth = len(outcome.samples) // 5
    parts = outcome.samples[fifth : 2 * fifth], outcome.samples[4 * fifth :]
    (_, early, files), (_, late, files_late) = ([*map(median, zip(*part, strict=True))] for part in parts)
    return early, late, round(files_late - files)


def bars(outcome: Outcome, left: int, finished: list[tuple[Outcome, int]]) -> list[dict[str, Any]]:
    """Returns the verdicts.

    Args:
        left: the files that the server has open after the soak, beyond those before it.
        finished: the outcome and the exit code of each SIGTERM.
    """
    early, late, files = growth(outcome)
    ends = len(finished)
    values = {
        "requests lost": len(outcome.lost),
        "wrong answers": len(outcome.wrong),
        "connections or calls refused": outcome.refused,
        "new versions that never answered": len(set(outcome.swapped) - outcome.versions.keys()),
        "broken versions not refused": sum(s != "unavailable" for s in outcome.broken.values()),
        "answers of a broken version": sum(outcome.versions[v] for v in outcome.broken),
        "growth of resident memory": late / early - 1,
        "growth of open files": files,
        "open files left when the clients had gone": left,
        f"requests lost at {ends} ends": sum(len(found.lost) for found, _ in finished),
        f"wrong answers at {ends} ends": sum(len(found.wrong) for found, _ in finished),
        f"exits that were not 0, of {ends}": sum(code != 0 for _, code in finished),
    }
    bounds = {"growth of resident memory": 0.05}
    return [report.bar(what, value, bounds.get(what, 0)) for what, value in values.items()]


def _files_left(pid: int, before: int) -> int:
    """Returns how many more files the server has open than `before`, after waiting for it to close some."""
    end = time.monotonic() + 10
    while (left := open_files(pid) - before) > 0 and time.monotonic() < end:
        time.sleep(0.1)
    return left


def _content(outcome: Outcome, finished: list[tuple[Outcome, int]]) -> dict[str, Any]:
    """Returns the results as the JSON file has them."""
    early, late, _ = growth(outcome)
    answered: dict[str, dict[str, int]] = {REST: {}, GRPC: {}}
    for (protocol, kind), count in sorted(outcome.answered.items()):
        answered[protocol][kind] = count
    ends = [
        {
            "answered": found.answered.total(),
            "refused": found.refused,
            "lost": len(found.lost),
            "cut off": len(found.cut_off),
            "exit": code,
        }
        for found, code in finished
    ]
    samples = outcome.samples[:: max(len(outcome.samples) // 100, 1)]
    return {
        "answered": answered,
        "wrong": outcome.wrong[:20],
        "lost": [*outcome.lost, *(lost for found, _ in finished for lost in found.lost)][:20],
        "answers_by_version": dict(sorted(outcome.versions.items())),
        "broken_versions": outcome.broken,
        "rss_mib": {"early": round(early, 1), "late": round(late, 1)},
        "ends": ends,
        "memory": [{"seconds": round(at, 1), "rss_mib": round(mib, 1), "files": n} for at, mib, n in samples],
    }


def main(
    requests: Annotated[int, typer.Option(help="Least number of requests of the soak.")] = 200_000,
    seconds: Annotated[float, typer.Option(help="Least duration of the soak.")] = 70.0,
    swap_seconds: Annotated[float, typer.Option(help="Seconds from one version to the next.")] = 10.0,
    ends: Annotated[int, typer.Option(help="How often SIGTERM is sent under load.")] = 20,
    processes: Annotated[int, typer.Option(help="Processes of the service.")] = 1,
    output: Output = None,
    commit: Commit = None,
) -> None:
    """Soak the service: 32 clients send valid and invalid requests while versions change, then SIGTERM.

    A third of the requests uses gRPC, the rest HTTP with JSON and binary tensors; a quarter is invalid. Every
    answer is checked: each bit of a tensor, or the status and message of a refusal. Every fourth version is a
    corrupt file. The report counts lost and wrong answers, and watches memory and open files.

    Example:

        twinop bench soak --requests 20000 --seconds 30 --swap-seconds 5 --ends 2
    """
    with clear_errors(), tempfile.TemporaryDirectory() as work:
        recording = Recording("soak", torch.device("cpu"), output, commit)
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # else gRPC reports each server that went away
        models, log = Path(work) / "models", Path(work) / "log"
        several = ("--processes", str(processes))
        write_version(models, 1)
        with service(models, log, *several) as (server, running):
            idle_files = open_files(running.pid)
            started = time.perf_counter()
            load = soak(server, running.pid, models, requests, swap_seconds, seconds=seconds)
            outcome = asyncio.run(load)
            took = time.perf_counter() - started
            left = _files_left(running.pid, idle_files)
        finished = []
        with report.progress("SIGTERM", ends) as step:
            for _ in range(ends):
                with service(models, log, "--log-level", "debug", *several) as (server, running):
                    found = asyncio.run(ended_under_load(server, running, log, 0.5))
                    finished.append((found, running.returncode))
                step("")
        counts = [{"protocol": key[0], "kind": key[1], "answers": n} for key, n in outcome.answered.items()]
        title = f"{outcome.requests} requests in {took:.0f} s"
        report.show_rows(title, counts, ["protocol", "kind", "answers"])
        verdicts = bars(outcome, left, finished)
        report.show_bars(verdicts)
        settings = {"clients": CLIENTS, "requests": requests, "seconds": seconds}
        settings |= {"swap_seconds": swap_seconds, "ends": ends, "processes": processes}
        content = _content(outcome, finished)
        recording.write(settings=settings, seconds=round(took, 1), bars=verdicts, **content)
