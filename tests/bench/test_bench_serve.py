"""The verdicts and rows of the serving report."""

from pathlib import Path
from typing import Any

import pytest

from twinop.bench.serving.serve import CLIENTS, bare, bars
from twinop.bench.serving.servers import GRPC, KSERVE, MODELS, OURS, REST, write


def rows(ours: list[float], peers: list[float]) -> list[dict[str, Any]]:
    """Returns rows of the encoder with one client, from the p50 of each round."""
    return [
        {"model": "encoder", "server": server, "protocol": protocol, "clients": 1}
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


def test_the_session_alone_is_called_by_as_many_threads(tmp_path: Path) -> None:
    small = MODELS[0]
    found, expected = bare(write(small, tmp_path), "cpu", small.inputs(), 0.05)
    assert set(found) == set(CLIENTS) and expected.shape == (1, 16)
    for row in found.values():
        assert row["per_second"] > 0 and 0 < row["p50_ms"] <= row["p99_ms"]
