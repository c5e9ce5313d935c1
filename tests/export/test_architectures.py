"""Tests that models of torch, transformers, timm and torchvision keep their results through an export.

A table of what passes comes after the tests; CONTRIBUTING.md says how it is recorded.
"""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import architectures_table as table
import pytest
import torch
from architectures import ARCHITECTURES, check, missing
from export_models import EXPORTERS, each_exporter
from torch import nn

from twinop import torch_op
from twinop.errors import ExportError
from twinop.export import export

pytestmark = pytest.mark.usefixtures("one_thread")


def state(model: nn.Module) -> set[tuple[Any, ...]]:
    """Returns each bit of the parameters and buffers, and each module's mode."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {
        *((name, id(t), t.requires_grad, t.dtype, t.detach().numpy().tobytes()) for name, t in tensors),
        *((name, module.training) for name, module in model.named_modules()),
    }


@pytest.mark.slow
@each_exporter
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_export(
    name: str, exporter: str, tmp_path: Path, record_property: Any, libraries: dict[str, Path]
) -> None:
    architecture = ARCHITECTURES[name]
    if reason := missing(architecture.library):
        pytest.skip(reason)
    row: dict[str, Any] = {"architecture": name, "exporter": exporter, "outcome": table.FAILS}
    record_property(table.PROPERTY, row)

    model = torch_op.replace_modules(architecture.model().train())
    next(iter(model.children())).eval()  # as a frozen part of a model in training
    before = state(model)
    tensors = architecture.inputs(*check.EXAMPLE)
    path = tmp_path / "ours" / "model.onnx"
    path.parent.mkdir()
    try:
        report = export(
            model, (), path, kwargs={**tensors, **architecture.constants}, exporter=exporter,
            dynamic=dict.fromkeys(tensors, architecture.axes),
         optimize=False)  # fmt: skip
    except ExportError:
        assert not list(path.parent.iterdir())
        refused = check.torchs_own(architecture, exporter, tmp_path / "torch.onnx")
        if not refused or recorded(name, exporter) == table.PASSES:
            raise
        row |= {"outcome": table.TORCH_CANNOT, "reason": refused}
    else:
        check.compare(architecture, path, libraries["custom_ops"])
        check.compare(architecture, path, None)
        row |= {"outcome": table.PASSES, "ops": report.custom_ops}
    assert (changed := {name for name, *_ in state(model) ^ before}) == set(), f"changed: {changed}"


def recorded(name: str, exporter: str) -> str:
    """Returns the recorded outcome: a model that torch no longer exports deserves attention, too."""
    return table.load().get(name, {}).get(exporter, {}).get("outcome", "")


def test_the_recorded_table_has_every_architecture() -> None:
    found = table.load()
    assert found.keys() == ARCHITECTURES.keys()
    outcomes = {
        name: {exporter: rows[exporter]["outcome"] for exporter in EXPORTERS} for name, rows in found.items()
    }
    assert not [name for name, each in outcomes.items() if table.FAILS in each.values()]
    assert sum(set(each.values()) == {table.PASSES} for each in outcomes.values()) >= 40


def report(outcome: str, when: str = "call", message: str = "", **row: Any) -> Any:
    """Makes a report as pytest passes it to its hooks."""
    return SimpleNamespace(
        user_properties=[(table.PROPERTY, row | {"outcome": outcome})] if row else [],
        when=when,
        failed=bool(message),
        longrepr=SimpleNamespace(reprcrash=SimpleNamespace(message=message)),
    )


def test_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The cause of a failure comes from pytest's report, because the test did not finish."""
    passed = {"architecture": "b", "exporter": "dynamo"}
    reports = [
        report(table.PASSES, **passed),
        report(table.PASSES, "teardown", **passed),
        report(table.FAILS, message="output 0 differs\nmore", architecture="a", exporter="dynamo"),
        report(table.TORCH_CANNOT, architecture="a", exporter="torchscript", reason="no [diff]"),
        report(table.PASSES),
        SimpleNamespace(),
    ]
    monkeypatch.setenv(table.OUTPUT, str(tmp_path / "table.json"))
    table.pytest_terminal_summary(SimpleNamespace(stats={"passed": reports[:2], "": reports[2:]}))
    shown = capsys.readouterr().out
    for text in (
        "a",
        "fails: output 0 differs",
        "torch cannot: no [diff]",
        "1 passes, 1 torch cannot, 1 fails",
    ):
        assert text in shown
    document = json.loads((tmp_path / "table.json").read_text())
    assert document["versions"]["torch"] == torch.__version__
    assert document["architectures"]["b"] == {"dynamo": {"outcome": "passes"}}
    assert document["architectures"]["a"]["dynamo"]["reason"] == "output 0 differs"


def test_no_table_without_architectures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(table.OUTPUT, str(tmp_path / "table.json"))
    table.pytest_terminal_summary(SimpleNamespace(stats={"passed": [report(table.PASSES)]}))
    assert not list(tmp_path.iterdir())


def test_a_missing_library_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert missing("timm") == (
        "no timm; ./build.sh test --all installs it, as does "
        f"pip install --no-deps --target {table.SITE} -r requirements/architectures.txt"
    )
