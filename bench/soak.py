"""python -m twinop.bench soak: the service under mixed load while versions are swapped, then ended."""

import asyncio
import os
import tempfile
import time
from pathlib import Path
from typing import Annotated

import torch
import typer

from twinop.bench import options, report
from twinop.console import clear_errors


def main(
    requests: Annotated[int, typer.Option(help="Of the soak, at least.")] = 200_000,
    seconds: Annotated[float, typer.Option(help="Of the soak, at least.")] = 70.0,
    swap_seconds: Annotated[float, typer.Option(help="From one version to the next.")] = 10.0,
    ends: Annotated[int, typer.Option(help="Times that SIGTERM comes under load.")] = 20,
    output: options.JsonFolder = None,
    commit: options.Commit = None,
) -> None:
    """Soak the service: 32 clients send good and bad requests while versions are swapped, then SIGTERM.

    A third comes over gRPC, the rest over HTTP with JSON and binary tensors; a quarter is wrong in some way.
    Every answer is checked, to the bit, or to HTTP's status or gRPC's code and the message. Each fourth
    version is a corrupt file. Counts lost and wrong answers, and watches memory and open files.

    Example:

        python -m twinop.bench soak --requests 20000 --seconds 30 --swap-seconds 5 --ends 2
    """
    from twinop.bench.serving import soak as runs  # needs what only the service needs

    with clear_errors():
        folder = report.output_folder(output)
        facts = report.environment(torch.device("cpu"), commit)
        report.print_environment(facts)
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # else it tells of each server that went away
        with tempfile.TemporaryDirectory() as work:
            models, log = Path(work) / "models", Path(work) / "log"
            runs.write_version(models, 1)
            with report.progress("soak", 100) as step, runs.service(models, log) as (server, running):
                done = 0

                def advance(share: float) -> None:
                    nonlocal done
                    while done < int(share * 100):
                        done += 1
                        step("")

                idle_files = runs.open_files(running.pid)
                started = time.perf_counter()
                outcome = asyncio.run(
                    runs.soak(
                        server, running.pid, models, requests, swap_seconds, seconds=seconds, step=advance
                    )
                )
                took = time.perf_counter() - started
                left = runs.files_left(running.pid, idle_files)
            finished = []
            with report.progress("SIGTERM", ends) as step:
                for _ in range(ends):
                    with runs.service(models, log, "--log-level", "debug") as (server, running):
                        found = asyncio.run(runs.ended_under_load(server, running, log, 0.5))
                        finished.append((found, running.returncode))
                    step("")
        verdicts = runs.bars(outcome, left, finished)
        runs.show(outcome, took)
        report.show_bars(verdicts)
        report.write_json(
            folder / f"soak-{report.machine_name(facts)}.json",
            "soak",
            facts,
            settings={
                "clients": runs.CLIENTS,
                "requests": requests,
                "seconds": seconds,
                "swap_seconds": swap_seconds,
                "ends": ends,
            },
            seconds=round(took, 1),
            answered=runs.by_protocol(outcome),
            wrong=outcome.wrong[:20],
            lost=[*outcome.lost, *(lost for found, _ in finished for lost in found.lost)][:20],
            answers_by_version=dict(sorted(outcome.versions.items())),
            broken_versions=outcome.broken,
            rss_mib=dict(
                zip(("early", "late"), (round(mib, 1) for mib in runs.growth(outcome)[:2]), strict=True)
            ),
            ends=[
                {
                    "answered": found.answered.total(),
                    "refused": found.refused,
                    "lost": len(found.lost),
                    "cut off": len(found.cut_off),
                    "exit": code,
                }
                for found, code in finished
            ],
            bars=verdicts,
            memory=[
                {"seconds": round(at, 1), "rss_mib": round(mib, 1), "files": files}
                for at, mib, files in outcome.samples[:: max(len(outcome.samples) // 100, 1)]
            ],
        )
