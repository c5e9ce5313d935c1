"""The service under mixed load while versions are swapped, then ended (bench/soak.py)."""

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from twinop.bench import report
from twinop.bench.serving.clients import Outcome, client
from twinop.bench.serving.mixed import NAME, model
from twinop.bench.serving.servers import GRPC, REST, Server, free_ports, wait_ready
from twinop.console import out

CLIENTS = 32
_BROKEN_EACH = 4  # versions one is is
_UNAVAILABLE = "unavailable"  # as the server's status page has it


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
def service(models: Path, log: Path, *more: str) -> Iterator[tuple[Server, subprocess.Popen[bytes]]]:
    """The server and its process, ready."""
    server = Server("twinop", dict(zip((REST, GRPC), free_ports(2), strict=True)))
    command = [sys.executable, "-m", "twinop", "serve", str(models), "--http-port", str(server.ports[REST])]
    command += ["--grpc-port", str(server.ports[GRPC]), "--provider", "cpu", "--max-batch-size", "32"]
    command += ["--log-level", "warning", *more]
    with log.open("ab") as file:
        running = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        wait_ready(server, f"/v2/models/{NAME}/ready", running, log)
        yield server, running
    finally:
        running.kill()
        running.wait()


def _resident(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


async def _watch(pid: int, outcome: Outcome) -> None:
    started = time.monotonic()
    while True:
        outcome.samples.append((time.monotonic() - started, _resident(pid), open_files(pid)))
        await asyncio.sleep(0.5)


def _state(server: Server, version: int) -> str:
    """Of a version, as the server's status page has it; "" where it has none."""
    url = f"http://127.0.0.1:{server.ports[REST]}/status"
    with urllib.request.urlopen(url, timeout=30) as answer:
        page = answer.read().decode()
    card = re.search(rf'<article [^>]*id="{NAME}-{version}">.*?</h3>.*?([a-z]+)</span></div>', page, re.S)
    return card[1] if card is not None else ""


async def _swap(server: Server, models: Path, every: float, outcome: Outcome) -> None:
    """A new version each `every` seconds; half of that later the one before goes, or the new one if it is
    broken."""
    version, served = 1, 1
    await asyncio.sleep(every)
    while True:
        version += 1
        broken = version % _BROKEN_EACH == 0
        await asyncio.to_thread(write_version, models, version, broken)
        await asyncio.sleep(every / 2)  # until it is served, the one before is
        if broken:
            outcome.broken[version] = await asyncio.to_thread(_state, server, version)
            gone = version
        else:
            outcome.swapped.append(version)
            gone, served = served, version
        shutil.rmtree(models / NAME / str(gone))
        await asyncio.sleep(every / 2)


async def soak(
    server: Server,
    pid: int,
    models: Path,
    requests: int,
    every: float,
    *,
    seconds: float = 0.0,
    step: Callable[[float], None] = lambda share: None,
) -> Outcome:
    """At least so many requests, for at least so many seconds. `step` hears how much of that is done."""
    outcome = Outcome()
    started = time.monotonic()

    def more() -> bool:
        past = time.monotonic() - started
        done = min(outcome.requests / requests, past / seconds if seconds else 1.0)
        step(done)
        return done < 1

    watching = asyncio.create_task(_watch(pid, outcome))
    swapping = asyncio.create_task(_swap(server, models, every, outcome))
    await asyncio.gather(*(client(server, seed, outcome, more) for seed in range(CLIENTS)))
    for task in (watching, swapping):
        if task.done():
            task.result()  # raises what went wrong
        task.cancel()
    outcome.lost += outcome.cut_off.values()  # by a server that was there all the time
    return outcome


async def ended_under_load(
    server: Server, running: subprocess.Popen[bytes], log: Path, seconds: float
) -> Outcome:
    """SIGTERM while all clients are sending; they go on until the process has ended.

    Lost are gRPC calls that were cut off though the server's log, at level debug, has them as accepted.
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
    accepted = _accepted(log)
    outcome.lost += [f"{said}: accepted" for number, said in outcome.cut_off.items() if number in accepted]
    return outcome


def _accepted(log: Path) -> set[str]:
    """The ids of gRPC calls that the server began to handle.

    Raises:
        BenchError: there are none, so that nothing could be found out.
    """
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    found = {line["request_id"] for line in lines if line["message"] == "accepted"}
    if not found:
        raise report.BenchError(f"{log}: the server, at --log-level debug, says of no call that it came")
    return found


def growth(outcome: Outcome) -> tuple[float, float, int]:
    """Medians of RSS after the first fifth and at the end, in MiB; by how many the open files have grown."""
    samples = outcome.samples
    early = samples[len(samples) // 5 : len(samples) * 2 // 5]
    late = samples[len(samples) * 4 // 5 :]
    resident = [median(sample[1] for sample in part) for part in (early, late)]
    files = [median(sample[2] for sample in part) for part in (early, late)]
    return resident[0], resident[1], round(files[1] - files[0])


def bars(outcome: Outcome, left: int, finished: list[tuple[Outcome, int]]) -> list[dict[str, Any]]:
    """`left` are open files after the soak, beyond those before; `finished` are the ends and their codes."""
    early, late, files = growth(outcome)
    ends = len(finished)
    return [
        _bar("requests lost", len(outcome.lost), 0),
        _bar("wrong answers", len(outcome.wrong), 0),
        _bar("connections or calls refused", outcome.refused, 0),
        _bar("new versions that never answered", len(set(outcome.swapped) - outcome.versions.keys()), 0),
        _bar("broken versions not refused", sum(s != _UNAVAILABLE for s in outcome.broken.values()), 0),
        _bar("answers of a broken version", sum(outcome.versions[v] for v in outcome.broken), 0),
        _bar("growth of resident memory", round(late / early - 1, 4), 0.05),
        _bar("growth of open files", files, 0),
        _bar("open files left when the clients had gone", left, 0),
        _bar(f"requests lost at {ends} ends", sum(len(found.lost) for found, _ in finished), 0),
        _bar(f"wrong answers at {ends} ends", sum(len(found.wrong) for found, _ in finished), 0),
        _bar(f"exits that were not 0, of {ends}", sum(code != 0 for _, code in finished), 0),
    ]


def _bar(what: str, value: float, bound: float) -> dict[str, Any]:
    return {"what": what, "value": value, "bar": f"<= {bound:g}", "passed": value <= bound}


def files_left(pid: int, before: int) -> int:
    """How many more files the server has open than `before`, once it has seen that the clients are gone."""
    end = time.monotonic() + 10
    while (left := open_files(pid) - before) > 0 and time.monotonic() < end:
        time.sleep(0.1)
    return left


def by_protocol(outcome: Outcome) -> dict[str, dict[str, int]]:
    return {
        protocol: {kind: count for (of, kind), count in sorted(outcome.answered.items()) if of == protocol}
        for protocol in (REST, GRPC)
    }


def show(outcome: Outcome, seconds: float) -> None:
    table = report.table("Soak", ["", REST, GRPC])
    for kind in sorted({kind for _, kind in outcome.answered}):
        table.add_row(kind, *(str(outcome.answered[of, kind] or "") for of in (REST, GRPC)))
    report.show(table)
    early, late, _ = growth(outcome)
    out.print(
        f"{outcome.requests} requests in {seconds:.0f} s; {len(outcome.swapped)} versions swapped in, "
        f"{len(outcome.broken)} broken; resident memory {early:.0f} MiB after the first fifth, "
        f"{late:.0f} MiB at the end",
        highlight=False,
        soft_wrap=True,
    )
