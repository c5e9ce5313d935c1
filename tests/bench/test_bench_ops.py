"""The report on all ops: what it measures and what it refuses. No test asserts a speed."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from twinop import torch_op
from twinop.bench.cases import BACKWARD, FORWARD, Case, built_entries, choose, family_of
from twinop.bench.entries import ENTRIES, Entry, entry_of
from twinop.bench.measure import BUILT_IN, IN_ORT, IN_TORCH
from twinop.bench.measurements import BenchError
from twinop.bench.providers import EAGER, Providers

CPU = torch.device("cpu")
BUILT = built_entries()
each_entry = pytest.mark.parametrize("name", list(BUILT))


def on_cpu(*wanted: str) -> Providers:
    return Providers(CPU, None, 2, wanted, rounds=2, seconds=0.01)


def small(name: str, direction: str = FORWARD, entry: Entry | None = None) -> Case:
    entry = entry or BUILT[name]
    family = family_of(torch_op.records()[entry.op])
    return Case(name, entry, "float32", (6, 32) if family == "rows" else (192,), direction)


def test_an_op_without_an_entry_is_measured_beside_its_body() -> None:
    where = on_cpu("twinop", "eager")
    entry = entry_of(torch_op.records()["silu"])
    forward, backward = (where.line(small("silu", way, entry)) for way in (FORWARD, BACKWARD))
    assert forward["missing"] == backward["missing"] == {}
    assert {IN_TORCH, IN_ORT, EAGER} <= forward["times"].keys()
    assert {IN_TORCH, EAGER} <= backward["times"].keys()
    compiled = torch.compile(entry.eager, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(torch.ones(3)), torch.nn.functional.silu(torch.ones(3)))


def test_ops_are_chosen_by_name() -> None:
    assert list(choose("relu")) == ["relu"]
    with pytest.raises(BenchError, match="--ops relu,swish: expected some of relu, gelu"):
        choose("relu,swish")
    with pytest.raises(BenchError, match="--ops  , : expected some of relu"):
        choose(" , ")


# ------------------------------------------------------------------------------- a cell


@each_entry
def test_all_of_ours_and_torchs_are_right(name: str) -> None:
    where = on_cpu("twinop", "eager", BUILT_IN)
    forward = where.line(small(name))
    assert forward["missing"] == {}
    assert {IN_TORCH, IN_ORT, EAGER} <= forward["times"].keys()
    assert (BUILT_IN in forward["times"]) == bool(BUILT[name].ort)
    tensors = len(BUILT[name].input_names) + len(torch_op.records()[BUILT[name].op].outputs)
    assert forward["bytes"] <= 4 * 192 * (tensors + (name == "swiglu_packed"))
    assert all(time["median_us"] > 0 for time in forward["times"].values())
    if BUILT[name].backward:
        backward = where.line(small(name, BACKWARD))
        assert backward["missing"] == {} and {IN_TORCH, EAGER} <= backward["times"].keys()


@pytest.mark.slow  # torch.compile's first kernel takes half a minute
def test_compiled_too() -> None:
    where = on_cpu("compile", "eager")
    where.compile_seconds = 300
    for direction in (FORWARD, BACKWARD):
        line = where.line(small("relu", direction))
        assert line["missing"] == {} and "torch.compile" in line["times"]
    assert where.compile_seconds < 300


def test_the_time_for_compilation_ends() -> None:
    line = on_cpu("compile", "eager").line(small("relu"))
    assert set(line["missing"].values()) == {"not compiled: the time for compilation is spent"}


def wrong(x: Tensor) -> Tensor:
    """The exact result is that in float64."""
    return torch.relu(x) + (x.dtype == torch.float32)


def raising(x: Tensor) -> Tensor:
    if x.dtype == torch.float32:
        raise ValueError("no kernel for this\nand more")
    return torch.relu(x)


@pytest.mark.parametrize(
    ("function", "reason"),
    [(wrong, r"wrong result: relative error [0-9.e+-]+"), (raising, "ValueError: no kernel for this")],
)
def test_a_provider_that_fails_is_reported_and_not_timed(function: Any, reason: str) -> None:
    entry = replace(ENTRIES["relu"], eager=function)
    line = on_cpu("twinop in torch", "eager").line(small("relu", entry=entry))
    assert re.fullmatch(reason, line["missing"].pop(EAGER)) and not line["missing"]
    assert IN_TORCH in line["times"] and EAGER not in line["times"]
