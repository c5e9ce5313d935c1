"""Tests what real models need: they stay as they were, and flaws of torch's exporters do not show."""

import logging
import os
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from export_models import each_by_one_exporter, each_exporter, plain
from torch import nn

from twinop import torch_op
from twinop.deploy import ort_process, ort_runs
from twinop.errors import ExportError
from twinop.export.inputs import resized


class Defaults(nn.Module):
    """Has the signature of transformers' decoders, which index with an argument that is an int by default."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 5)

    def forward(
        self,
        x: torch.Tensor,
        mask: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> torch.Tensor:
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return self.head(torch_op.relu(x[:, keep]))


def test_numbers_beside_tensors_are_named(tmp_path: Path) -> None:
    class Sized(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return torch_op.relu(x), x.shape[0], {"scale": 0.5}

    report = plain(Sized(), torch.randn(3, 4), tmp_path / "m.onnx", dynamic={"x": 0})
    assert list(report.outputs) == ["y_0"]
    note = "the model returns 3, 0.5 beside tensors: the file has no output for it"
    assert report.notes[0] == note


@each_by_one_exporter("verify", [True, False])
def test_python_defaults_are_no_inputs(exporter: str, verify: bool, tmp_path: Path) -> None:
    path, given = tmp_path / "m.onnx", torch.randn(2, 4, 3)
    options: dict[str, Any] = {"verify": verify, "kwargs": {} if verify else {"use_cache": False}}
    plain(Defaults().eval(), given, path, exporter=exporter, dynamic={"x": [0]}, **options)
    graph = onnx.load(path).graph
    assert [value.name for value in graph.input] == ["x"]
    assert {value.name for value in graph.initializer} >= {"head.bias"}  # named as in the model


@pytest.mark.parametrize(
    ("exporter", "frozen"), [("dynamo", True), ("torchscript", True), ("torchscript", False)]
)
def test_attention_with_padding(exporter: str, frozen: bool, tmp_path: Path) -> None:
    """torch's fused attention, which frozen layers use, writes zeros at padding and cannot be exported."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval().requires_grad_(not frozen)
    model = nn.TransformerEncoder(layer, 1).eval()
    x, padding = torch.randn(2, 5, 16), torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True
    dynamic = {"src": [0], "src_key_padding_mask": [0]}
    kwargs = {"src_key_padding_mask": padding}
    report = plain(model, x, tmp_path / "m.onnx", kwargs=kwargs, exporter=exporter, dynamic=dynamic)
    assert report.parity is not None and report.resized


@each_exporter
def test_a_recurrent_layer_keeps_its_time_axis_open(exporter: str, tmp_path: Path) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.GRU(8, 8, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch_op.relu(self.inner(x)[0])

    x, dynamic = torch.randn(2, 3, 8), {"x": [0, 1]}
    # The first export must not change the second.
    for verify in (False, True) if exporter == "torchscript" else (True,):
        report = plain(Recurrent(), x, tmp_path / "m.onnx", exporter=exporter, dynamic=dynamic, verify=verify)
    assert report.resized and "GRU" in report.nodes
    assert report.outputs["y"].split(",")[1] != "3"  # torch's dynamo exporter declares it so


class Masked(nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        mask = mask.bool()[:, None, None, :].expand(-1, 2, x.shape[2], -1)
        return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)


def masked_inputs() -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.ones(3, 5, dtype=torch.int64)
    mask[2] = 0
    return torch.randn(3, 2, 5, 8), mask


def test_rows_that_a_mask_hides_are_named_and_opset_23_passes(tmp_path: Path) -> None:
    message = r"differs from torch .*most in the rows (\[2, \d, \d\](, |\. )){3}If .*Export with opset 23"
    with pytest.raises(ExportError, match=message):
        plain(Masked(), masked_inputs(), tmp_path / "m.onnx", opset=22)
    report = plain(Masked(), masked_inputs(), tmp_path / "m.onnx", opset=23)
    assert report.parity is not None


def test_the_comparison_has_fresh_data_and_a_masked_row() -> None:
    example = {
        "x": torch.rand(3, 4) + 2,
        "ids": torch.tensor([[1, 7, 9], [9, 3, 1]]),
        "mask": torch.ones(3, 4, dtype=torch.int64),
        "padding": torch.zeros(3, 4, dtype=torch.bool),
        "additive": torch.tensor([[0.0, float("-inf")], [0.0, 0.0]]),
        "flag": torch.ones(3),
        "left": torch.randn(2),
        "complex": torch.randn(3, 4, dtype=torch.complex64),
        "empty": torch.ones(2, 0, dtype=torch.bool),
    }
    axes = {name: {0: "batch"} for name in example if name != "left"}
    larger = resized(example, axes, fresh=True)
    assert {name: tensor.shape[0] for name, tensor in larger.items()} == {
        name: tensor.shape[0] + (name != "left") for name, tensor in example.items()
    }
    x = larger["x"]
    assert example["x"].min() <= x.min() and x.max() <= example["x"].max() and len(x.unique()) == x.numel()
    assert set(larger["ids"].flatten().tolist()) <= {1, 3, 7, 9}
    assert larger["mask"].tolist() == [[1, 1, 1, 1]] * 3 + [[1, 1, 0, 0]]
    assert larger["padding"].tolist() == [[False] * 4] * 3 + [[False, False, True, True]]
    assert torch.equal(larger["additive"], example["additive"][[0, 1, 0]])
    assert torch.equal(larger["flag"], torch.ones(4)) and larger["left"] is example["left"]


def test_a_crash_in_each_run_leaves_it_uncompared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*call: Any) -> list[Any]:
        raise ort_process.OrtCrash("SIGABRT")

    monkeypatch.setattr(ort_process.SERVER, "run", crash)
    report = plain(torch_op.CustomReLU(), torch.randn(3), tmp_path / "m.onnx", exporter="torchscript")
    assert report.parity is None and "crashes (SIGABRT) on this model" in report.parity_reason


def test_an_interrupted_run_does_not_answer_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.onnx"
    plain(torch_op.CustomReLU(), torch.randn(3), path, exporter="torchscript")

    def interrupted(stream: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ort_process.pickle, "load", interrupted)
        ort_runs.run(path, None, [{"x": torch.full((3,), 1.0)}])
    [[found]] = ort_runs.run(path, None, [{"x": torch.full((3,), 2.0)}]).outputs
    assert found.tolist() == [2.0] * 3


class Unsupported(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._fft_r2c(x, [0], 0, True).abs() if x.any() else x


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_a_failing_export_is_silent(exporter: str, tmp_path: Path, capfd: Any, caplog: Any) -> None:
    said = {"dynamo": "not guard on data", "torchscript": r"aten::_fft_r2c.*not supported"}[exporter]
    with caplog.at_level(logging.WARNING), pytest.raises(ExportError, match=said):
        plain(Unsupported(), torch.randn(4, 3), tmp_path / "m.onnx", exporter=exporter)
    assert capfd.readouterr() == ("", "") and not caplog.records


def test_a_request_that_fails_in_no_foreseen_way_ends_its_process() -> None:
    """Half of its answer may have been sent."""
    with pytest.raises(ort_process.OrtCrash, match="exit code 1"):
        ort_process.SERVER.run(os.listdir, "/no such folder")
