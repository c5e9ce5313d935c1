"""python -m twinop.bench soak: the service under mixed load while versions are swapped, then ended."""

import asyncio
import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer

from twinop.bench import options, report
from twinop.bench.serving.mixed import NAME, model, read_answer, some
from twinop.bench.serving.servers import REST, Server, free_ports, wait_ready
from twinop.console import clear_errors

CLIENTS = 32
_VERSION = re.compile(rb'"model_version":"(\d+)"')


@dataclass
class Outcome:
    """What became of the requests. `lost` were sent on a connection that then closed without an answer."""

    answered: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    lost: int = 0
    refused: int = 0  # connections, of a server that is gone
    versions: Counter[int] = field(default_factory=Counter)  # that answered
    samples: list[tuple[float, float, int]] = field(default_factory=list)  # seconds, RSS in MiB, open files

    @property
    def requests(self) -> int:
        return self.answered.total() + self.lost


def write_version(folder: Path, version: int, broken: bool = False) -> None:
    """A new version directory, as a copy over the network makes it: the folder first, the file in pieces."""
    target = folder / NAME / str(version)
    target.mkdir(parents=True)
    data = model(version).SerializeToString()
    if broken:
        data = data[: len(data) // 2]
    with (target / "model.onnx").open("wb") as file:
        file.write(data[:20])
        file.flush()
        time.sleep(0.05)
        file.write(data[20:])


@contextlib.contextmanager
def service(models: Path, log: Path, *more: str) -> Any:
    """The server and its process, ready."""
    server = Server("twinop", {REST: free_ports(1)[0]})
    command = [sys.executable, "-m", "twinop", "serve", str(models), "--http-port", str(server.ports[REST])]
    command += ["--no-grpc", "--provider", "cpu", "--max-batch-size", "32", "--log-level", "warning", *more]
    with log.open("ab") as file:
        running = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        wait_ready(server, f"/v2/models/{NAME}/ready", running, log)
        yield server, running
    finally:
        running.kill()
        running.wait()


async def client(server: Server, seed: int, outcome: Outcome, more: Any) -> None:
    """Sends one request after the other while `more()`; opens a new connection now and then."""
    choose = random.Random(seed)
    while more():
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.ports[REST])
        except OSError:
            outcome.refused += 1
            await asyncio.sleep(0.01)
            continue
        for _ in range(choose.randint(1, 500)):
            if not more():
                break
            case = some(choose)
            try:
                writer.write(case.request)
                answer = await read_answer(reader)
            except (EOFError, OSError):
                outcome.lost += 1
                break
            outcome.answered[case.kind] += 1
            if version := _VERSION.search(answer.body):
                outcome.versions[int(version[1])] += 1
            if wrong := case.wrong(answer):
                outcome.wrong.append(wrong)
            if answer.headers.get("connection") == "close":
                break
        writer.close()


def _resident(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def _watch(pid: int, outcome: Outcome) -> None:
    started = time.monotonic()
    while True:
        files = len(os.listdir(f"/proc/{pid}/fd"))
        outcome.samples.append((time.monotonic() - started, _resident(pid), files))
        await asyncio.sleep(0.5)


async def _swap(models: Path, every: float) -> None:
    """Each third version is broken, and taken away before the next one comes."""
    version, served = 1, 1
    while True:
        await asyncio.sleep(every)
        version += 1
        if broken := version % 3 == 0:
            await asyncio.to_thread(write_version, models, version, broken)
            await asyncio.sleep(every)
            shutil.rmtree(models / NAME / str(version))
            continue
        await asyncio.to_thread(write_version, models, version)
        await asyncio.sleep(every / 2)  # until it is served, the one before is
        shutil.rmtree(models / NAME / str(served))
        served = version


async def soak(server: Server, pid: int, models: Path, requests: int, every: float, step: Any) -> Outcome:
    outcome = Outcome()

    def more() -> bool:
        step(outcome.requests)
        return outcome.requests < requests

    watchers = [asyncio.create_task(_watch(pid, outcome)), asyncio.create_task(_swap(models, every))]
    await asyncio.gather(*(client(server, seed, outcome, more) for seed in range(CLIENTS)))
    for each in watchers:
        each.cancel()
    return outcome


async def ended_under_load(server: Server, running: subprocess.Popen[bytes], seconds: float) -> Outcome:
    """SIGTERM while all clients are sending; they stop when nobody listens any more."""
    outcome = Outcome()

    def more() -> bool:
        return running.poll() is None and outcome.refused < CLIENTS

    async def end() -> None:
        await asyncio.sleep(seconds)
        running.send_signal(signal.SIGTERM)

    await asyncio.gather(end(), *(client(server, seed, outcome, more) for seed in range(CLIENTS)))
    await asyncio.to_thread(running.wait, 40)
    return outcome


def growth(outcome: Outcome) -> tuple[float, int]:
    """RSS at the end over that after the first fifth, less 1; the open files likewise, as a difference."""
    samples = outcome.samples
    early = samples[len(samples) // 5 : len(samples) * 2 // 5]
    late = samples[len(samples) * 4 // 5 :]
    resident = median(sample[1] for sample in late) / median(sample[1] for sample in early) - 1
    return resident, round(median(sample[2] for sample in late) - median(sample[2] for sample in early))


def main(
    requests: Annotated[int, typer.Option(help="Of the soak.")] = 200_000,
    swap_seconds: Annotated[float, typer.Option(help="From one version to the next.")] = 10.0,
    ends: Annotated[int, typer.Option(help="Times that SIGTERM comes under load.")] = 20,
    output: options.JsonFolder = None,
    commit: options.Commit = None,
) -> None:
    """Soak the service: mixed good and bad requests from 32 clients while versions are swapped, then SIGTERM.

    Every answer is checked to the bit. Counts lost and wrong answers, and watches memory and open files.

    Example:

        python -m twinop.bench soak --requests 20000 --ends 2
    """
    with clear_errors():
        folder = report.output_folder(output)
        facts = report.environment(torch.device("cpu"), commit)
        report.print_environment(facts)
        with tempfile.TemporaryDirectory() as work:
            models, log = Path(work) / "models", Path(work) / "log"
            write_version(models, 1)
            with report.progress("soak", 100) as step, service(models, log) as (server, running):
                done = 0

                def advance(count: int) -> None:
                    nonlocal done
                    while done < count * 100 // requests:
                        done += 1
                        step("")

                started = time.perf_counter()
                outcome = asyncio.run(soak(server, running.pid, models, requests, swap_seconds, advance))
                seconds = time.perf_counter() - started
            finished = []
            with report.progress("SIGTERM", ends) as step:
                for _ in range(ends):
                    with service(models, log) as (server, running):
                        found = asyncio.run(ended_under_load(server, running, 0.5))
                        finished.append((found, running.returncode))
                    step("")
        resident, files = growth(outcome)
        lost = sum(found.lost for found, _ in finished)
        verdicts: list[dict[str, Any]] = [
            _bar("requests lost", outcome.lost, 0),
            _bar("wrong answers", len(outcome.wrong), 0),
            _bar("growth of resident memory", round(resident, 4), 0.05),
            _bar("growth of open files", files, 0),
            _bar(f"requests lost at {ends} ends", lost, 0),
            _bar(f"wrong answers at {ends} ends", sum(len(found.wrong) for found, _ in finished), 0),
            _bar(f"exits that were not 0, of {ends}", sum(code != 0 for _, code in finished), 0),
        ]
        table = report.table("Soak", ["", "requests"])
        for kind, count in sorted(outcome.answered.items()):
            table.add_row(kind, str(count))
        report.show(table)
        report.show_bars(verdicts)
        report.write_json(
            folder / f"soak-{report.machine_name(facts)}.json",
            "soak",
            facts,
            settings={"clients": CLIENTS, "requests": requests, "swap_seconds": swap_seconds, "ends": ends},
            seconds=round(seconds, 1),
            answered=dict(outcome.answered),
            wrong=outcome.wrong[:20],
            versions_that_answered=len(outcome.versions),
            ends=[
                {"answered": found.answered.total(), "lost": found.lost, "exit": code}
                for found, code in finished
            ],
            bars=verdicts,
            memory=[
                {"seconds": round(at, 1), "rss_mib": round(mib, 1), "files": files}
                for at, mib, files in outcome.samples[:: max(len(outcome.samples) // 100, 1)]
            ],
        )


def _bar(what: str, value: float, bound: float) -> dict[str, Any]:
    return {"what": what, "value": value, "bar": f"<= {bound:g}", "passed": value <= bound}
