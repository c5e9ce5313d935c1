"""The verdicts and rows of the serving report."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from twinop.bench.report import BenchError
from lab.serve import CLIENTS, bars, check, measure, measure_once, requests
from lab.servers import (
    FASTAPI,
    GRPC,
    KSERVE,
    MODELS,
    OURS,
    PROCESSES,
    REST,
    commands,
    server_names,
    started,
)
from twinop.deploy.service.newer_python import tomllib


def rows(ours: list[float], peers: list[float]) -> list[dict[str, Any]]:
    """Returns rows of the encoder with one client, from the p50 of each round."""
    return [
        {"model": "encoder", "device": "cpu", "server": server, "protocol": protocol, "clients": 1}
        | {"ready_seconds": 1.0, "p50_ms": sorted(p50s)[len(p50s) // 2], "p50s_ms": p50s}
        for server, p50s in ((OURS, ours), (KSERVE, peers))
        for protocol in (REST, GRPC)
    ]


@pytest.mark.parametrize(
    ("ours", "peers", "value", "quartiles", "passed"),
    [
        ([1.6, 2.4, 2.4, 1.6, 2.4], [1.6, 2.4, 1.6, 1.6, 2.4], 1.0, [1.0, 1.0], True),
        ([1.8, 2.7, 2.7, 1.8, 2.7], [1.5, 2.0, 1.5, 1.5, 2.0], 1.35, [1.2, 1.35], False),
        # The medians are 2.4 and 1.6, but all rounds except one were slow for both or for neither.
        ([1.6, 1.6, 2.4, 2.4, 2.4], [1.6, 1.6, 1.6, 2.5, 2.5], 1.0, [0.96, 1.0], True),
    ],
)
def test_at_one_client_rounds_are_compared_in_pairs(
    ours: list[float], peers: list[float], value: float, quartiles: list[float], passed: bool
) -> None:
    found = bars(rows(ours, peers))
    assert [bar["what"].split(",")[1].strip() for bar in found] == [REST, GRPC]
    for bar in found:
        assert (bar["value"], bar["quartiles"], bar["passed"]) == (value, quartiles, passed)
        assert bar["bar"] == "<= 1.1"


SMALL = MODELS[0]


@pytest.mark.slow
def test_servers_are_measured_side_by_side(tmp_path: Path) -> None:
    """Every server answers as a session does, over each protocol, to every number of clients."""
    onnx.save(SMALL.build(), tmp_path / f"{SMALL.name}.onnx")
    found = measure(SMALL, "cpu", 0.3, 1, tmp_path, lambda name: None)
    servers = {(row["server"], row["protocol"]) for row in found}
    assert servers >= {(OURS, REST), (OURS, GRPC), (KSERVE, REST), (KSERVE, GRPC), (FASTAPI, REST)}
    for row in found:
        assert row["per_second"] > 0 and 0 < row["p50_ms"] <= row["p99_ms"], row
    for server in servers:
        rounds = {row["clients"]: len(row.get("p50s_ms", [])) for row in found if is_of(row, server)}
        assert rounds == dict.fromkeys(CLIENTS, 0) | ({1: 5} if server[1] != "none" else {})
    assert all(bar["value"] > 0 for bar in bars(found))


def is_of(row: dict[str, Any], server: tuple[str, str]) -> bool:
    return (row["server"], row["protocol"]) == server


def test_a_wrong_answer_or_a_failure_ends_the_report(tmp_path: Path) -> None:
    path = tmp_path / "small.onnx"
    onnx.save(SMALL.build(), path)
    command = commands(SMALL, path, "cpu")[FASTAPI]
    files = requests(SMALL, tmp_path)
    with started(FASTAPI, command, "small", tmp_path / "log") as (server, _):
        with pytest.raises(BenchError, match=r"FastAPI gives a wrong answer \(200\)"):
            check(server, files[REST, FASTAPI], np.ones((1, 16), np.float32))
        with pytest.raises(BenchError, match=r"FastAPI, REST: \d+ failures: status 404"):
            measure_once(server, REST, files[REST, OURS], 1, 0.05)


@pytest.mark.parametrize(("gpus", "several"), [(1, False), (2, True)])
def test_processes_are_spread_over_the_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, several: bool
) -> None:
    monkeypatch.setattr("lab.servers.gpus", lambda: gpus)
    found = commands(SMALL, tmp_path / "small.onnx", "cuda")
    assert list(found) == server_names("cuda") and (PROCESSES in found) == several
    if several:
        *_, processes, option, config = found[PROCESSES]
        assert (processes, option) == (str(gpus), "--config")
        assert tomllib.loads(Path(config).read_text()) == {"server": {"devices": [0, 1]}}


def test_a_server_that_ends_is_reported_with_its_log(tmp_path: Path) -> None:
    command = ["lab.servers", "fastapi", str(tmp_path / "none.onnx"), "cpu"]
    starting = started(FASTAPI, command, "none", tmp_path / "log")
    with pytest.raises(BenchError, match=r"FastAPI ended at its start:\n(.|\n)*none.onnx"), starting:
        pass
