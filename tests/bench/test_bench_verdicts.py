"""The verdicts: which bars a measurement meets."""

from typing import Any

import pytest
from bench_rows import COPY, FAST, rows_of

from twinop.bench.cells import IN_ORT, IN_TORCH, Cell, cells_of, numeric_verdicts, verdicts
from twinop.bench.providers import EAGER


def failed(rows: list[dict[str, Any]]) -> set[str]:
    return {verdict["group"] for verdict in verdicts(cells_of(rows)) if not verdict["passed"]}


@pytest.mark.parametrize(
    ("times", "op", "shape", "missed"),
    [
        ({IN_TORCH: 101.0, EAGER: 110.0}, "relu", "2^28", set()),
        ({IN_TORCH: 105.0, EAGER: 110.0}, "relu", "2^28", {"share of the copy, unary"}),
        ({IN_TORCH: 101.0, EAGER: 99.0}, "relu", "2^28", {"forward, against the best peer"}),
        ({IN_TORCH: 107.0}, "softmax", "32768x4096", set()),
        ({IN_TORCH: 110.0}, "softmax", "32768x4096", {"share of the copy, rows"}),
        ({IN_TORCH: 110.0}, "softmax", "4096x65536", set()),
        ({IN_TORCH: 105.0}, "swiglu", "32768x4096", {"share of the copy, rows"}),
        ({IN_ORT: 100.0, "ORT Softmax": 200.0}, "softmax", "32768x4096", set()),
        (
            {IN_ORT: 100.0, "ORT Softmax": 150.0},
            "softmax",
            "32768x4096",
            {"in ORT, times as fast as its built-in"},
        ),
    ],
)
def test_verdicts(times: dict[str, float], op: str, shape: str, missed: set[str]) -> None:
    assert failed(rows_of(COPY | times, op, shape)) == missed


def test_a_run_that_differs_from_itself_is_the_tolerance() -> None:
    times = COPY | {IN_TORCH: 105.0, IN_TORCH + " again": 110.0}
    [cell] = cells_of(rows_of(times))
    assert cell.tolerance == pytest.approx(5 / 105)
    assert failed(rows_of(times)) == set()
    noisy = COPY | {IN_TORCH: 150.0, IN_TORCH + " again": 300.0}
    assert failed(rows_of(noisy)) == {"share of the copy, unary"}, "noise does not excuse everything"


@pytest.mark.parametrize("aligned", [True, False])
def test_misaligned_rows_have_a_bar_of_their_own(aligned: bool) -> None:
    missed = failed(rows_of(COPY | {IN_TORCH: 115.0}, "softmax", "32768x4095", aligned=aligned))
    assert missed == ({"share of the copy, rows"} if aligned else set())


def test_backward_is_held_against_torch_compile_and_liger() -> None:
    times = COPY | {IN_TORCH: 100.0, EAGER: 50.0, "Liger": 120.0}
    assert failed(rows_of(times, direction="backward")) == set()
    times["torch.compile"] = 90.0
    assert failed(rows_of(times, direction="backward")) == {"backward, against the best peer"}


def test_cpu_bars() -> None:
    times = {IN_ORT: 107.0, "ORT Relu": 100.0, IN_TORCH: 100.0, EAGER: 100.0}
    assert failed(rows_of(times, device="cpu")) == {"CPU, element-wise, time"}
    times = {IN_ORT: 120.0, "ORT Softmax": 100.0, IN_TORCH: 130.0, EAGER: 200.0}
    assert failed(rows_of(times, "softmax", "512x4096", device="cpu")) == {"CPU, rows, speed"}


def test_numeric_verdicts() -> None:
    def row(provider: str, error: float) -> dict[str, Any]:
        return {
            "op": "exp",
            "family": "unary",
            "dtype": "float16",
            "provider": provider,
            "max_ulp": error,
            "device": "cpu",
        }

    found = numeric_verdicts([row(IN_TORCH, 0.9), row(IN_ORT, 1.5), row(EAGER, 1.0), row("ORT Exp", 0.5)])
    assert [verdict["passed"] for verdict in found] == [True, True, False, False]


def test_a_cell_knows_its_best_peer() -> None:
    [cell] = cells_of(rows_of(FAST | {"Triton": 120.0, f"{IN_TORCH}, scalar": 90.0}))
    assert isinstance(cell, Cell) and cell.best_peer == "Triton" and cell.size == 1 << 28
    assert cell.share(IN_TORCH) == 1.0 and cell.gb_per_s(IN_TORCH) == pytest.approx(10737.42, abs=0.01)
