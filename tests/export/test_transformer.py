"""Tests that BERT and Llama with twinop's ops train, export and run as torch's own do."""

import importlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from export_models import each_exporter
from slow_cases import often
from torch import nn

from lab.model_zoo import TINY, batch, encoder
from twinop import deploy, torch_op
from twinop.export import ExportReport, export
from twinop.record.tolerance import TOLERANCE, difference

pytestmark = pytest.mark.usefixtures("one_thread")
CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
SIZE = replace(TINY, layers=1)
OPS = {
    "bert": {"CustomLayerNorm": 3, "CustomGelu": 1},
    "llama": {"CustomRmsNorm": 3, "CustomSwiglu": 1},
}
each_style = pytest.mark.parametrize("style", list(OPS))


def pair(style: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
    """Returns torch's own model, and one with twinop's ops and the same weights."""
    models = encoder(style, SIZE).to(dtype), encoder(style, SIZE).to(dtype)
    torch_op.replace_modules(models[1])
    return models


def close(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Checks that the difference is within the tolerance of exports."""
    accepted = TOLERANCE[str(expected.dtype).removeprefix("torch.")]
    assert (error := difference(expected, found)) <= accepted, f"{what}: {error:.2e}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@each_style
def test_outputs(style: str, dtype: torch.dtype) -> None:
    stock, ours = pair(style, dtype)
    ids, mask = batch(TINY, padding=5)
    with torch.no_grad():
        close(ours(ids, mask), stock(ids, mask), f"{style} with twinop's ops")


FAMILIES = often(("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Gemma3"), "Llama", "Gemma3")


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_norms(family: str) -> None:
    """transformers repeats these classes in every model's file; each computes what its replacement does."""
    found = importlib.import_module(f"transformers.models.{family.lower()}.modeling_{family.lower()}")
    norm = getattr(found, f"{family}RMSNorm")(16, eps=1e-3)
    nn.init.normal_(norm.weight)
    x = torch.randn(2, 3, 16)
    expected = norm(x)
    torch_op.replace_modules(norm)
    assert isinstance(norm, torch_op.CustomRMSNorm)
    torch.testing.assert_close(norm(x), expected)


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_mlps(family: str, activation: str) -> None:
    name = f"transformers.models.{family.lower()}"
    found = importlib.import_module(f"{name}.modeling_{family.lower()}")
    made: Any = getattr(importlib.import_module(name), f"{family}{'Text' * (family == 'Gemma3')}Config")
    config = made(hidden_size=16, num_attention_heads=2, intermediate_size=24)
    config.hidden_act = config.hidden_activation = activation
    mlp = getattr(found, f"{family}MLP")(config)
    x = torch.randn(2, 3, 16)
    expected, state = mlp(x), list(mlp.state_dict())
    report: list[torch_op.Replacement] = []
    torch_op.replace_modules(mlp, report.append)
    if activation == "silu":
        assert isinstance(mlp, torch_op.CustomGatedMLP) and list(mlp.state_dict()) == state
    else:
        assert [str(entry) for entry in report] == [
            f"the model itself: {family}MLP stays: its act_fn is GELUTanh; swiglu has SiLU",
            "act_fn: GELUTanh -> CustomGELU",
        ]
    torch.testing.assert_close(mlp(x), expected)


GELUS = ("gelu", "gelu_python", "gelu_new", "gelu_fast", "gelu_pytorch_tanh")
STAY = ("quick_gelu", "relu2", "mish")


@pytest.mark.parametrize("name", [*GELUS, "relu", "sigmoid", "silu", "swish", "tanh", *STAY])
def test_activations(name: str) -> None:
    from transformers.activations import ACT2FN

    module = ACT2FN[name]
    x = torch.linspace(-8, 8, 1001)
    expected = module(x)
    torch_op.replace_modules(module)
    assert type(module).__name__.startswith("Custom") == (name not in STAY)
    if name in GELUS:
        assert isinstance(module, torch_op.CustomGELU) and "approximate" in repr(module)
    torch.testing.assert_close(module(x), expected, rtol=1e-5, atol=2e-6)


def exported(
    style: str, exporter: str, path: Path, dtype: torch.dtype = torch.float32, **options: Any
) -> ExportReport:
    given = batch(TINY, padding=5)
    return export(pair(style, dtype)[1], given, path, exporter=exporter, **options, optimize=False)


@pytest.mark.parametrize(
    ("style", "exporter"),
    [("llama", "dynamo"), ("bert", "torchscript")],
)
def test_both_exporters(style: str, exporter: str, tmp_path: Path) -> None:
    """Compares at other sizes and without the library; counts twinop's nodes and their runs."""
    path = tmp_path / "encoder.onnx"
    axes = {0: "batch", 1: "tokens"}
    report = exported(style, exporter, path, dynamic={"ids": axes, "mask": axes})
    nodes = {name.removeprefix("custom_domain."): n for name, n in report.nodes.items() if "Custom" in name}
    assert nodes == OPS[style]
    assert report.parity is not None and report.resized and report.without_library is not None

    session = deploy.session(path, [CPU], profile=True)
    for seed in range(3):
        ids, mask = batch(TINY, seed, padding=5 * seed)
        with torch.no_grad():
            expected = encoder(style, SIZE)(ids, mask)
        [found] = session.run({"ids": ids, "mask": mask}).values()
        close(found, expected, f"{style} in ONNX Runtime, against torch's own")
    ours = session.executed_on()
    assert Counter(node.op_type for node in ours) == OPS[style]
    assert all(node.provider == CPU and node.runs == 3 and node.microseconds > 0 for node in ours)


@each_style
def test_float16(style: str, tmp_path: Path) -> None:
    report = exported(style, "torchscript", tmp_path / "encoder.onnx", torch.float16)
    assert report.parity is not None and report.without_library is not None


@pytest.mark.cuda
@pytest.mark.parametrize("library", [None, False], ids=["library", "bodies"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@each_exporter
@each_style
def test_cuda(style: str, exporter: str, dtype: torch.dtype, library: bool | None, tmp_path: Path) -> None:
    path = tmp_path / "encoder.onnx"
    exported(style, exporter, path, dtype, verify=False)
    # TF32 has 10 bits, which would dominate the error.
    session = deploy.session(path, [(CUDA, {"use_tf32": 0}), CPU], library, profile=True)
    ids, mask = (tensor.cuda() for tensor in batch(TINY, padding=5))
    with torch.no_grad():
        expected = encoder(style, SIZE).to(dtype).cuda()(ids, mask)
    [found] = session.run({"ids": ids, "mask": mask}).values()
    close(found.cpu(), expected.cpu(), f"{style} on CUDA, against torch's own")
    ran = session.executed_on()
    assert Counter(node.op_type for node in ran) == ({} if library is False else OPS[style])
    assert {node.provider for node in ran} <= {CUDA}
