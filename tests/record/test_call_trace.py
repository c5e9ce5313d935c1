"""TWINOP_TRACE=1 prints each call of an op, its kernels and why they were chosen."""

import os

import pytest
import warm_python

TORCH = """
import torch
from twinop import torch_op
x = torch.ones(2, 768, device=DEVICE)
torch_op.gelu(x[:, 1:], "tanh")
torch_op.rms_norm(x, eps=1e-5)
"""
ORT = """
import torch
from twinop import deploy, export, torch_op
import onnx.helper as h
node = h.make_node("CustomGelu", ["x"], ["y"], domain="custom_domain", approximate="tanh")
x, y = (h.make_tensor_value_info(n, 1, [2, 3]) for n in "xy")
model = h.make_model(h.make_graph([node], "g", [x], [y]), ir_version=10,
                     opset_imports=[h.make_opsetid("", 20), h.make_opsetid("custom_domain", 1)])
deploy.session(model, ["CPUExecutionProvider"]).run({"x": torch.ones(2, 3).numpy()})
"""


def traced(code: str, value: str = "1") -> list[str]:
    done = warm_python.run(["-c", code], env=os.environ | {"TWINOP_TRACE": value})
    assert done.returncode == 0, done.stderr
    return [line for line in done.stderr.splitlines() if line.startswith("twinop: ")]


def test_calls_in_torch() -> None:
    gelu, norm = traced(TORCH.replace("DEVICE", "'cpu'"))
    assert gelu.startswith("twinop: custom_domain::gelu(x: float32[2, 767], approximate=tanh) on the CPU, ")
    assert "rms_norm(x: float32[2, 768], weight: absent, axis=-1, eps=1e-05, offset=0)" in norm
    assert traced(TORCH.replace("DEVICE", "'cpu'"), "0") == []


def test_calls_in_onnxruntime() -> None:
    (gelu,) = traced(ORT)
    assert "custom_domain::gelu(x: float32[2, 3], approximate=tanh) on the CPU" in gelu


@pytest.mark.cuda
def test_kernels_and_their_reasons() -> None:
    text = "\n".join(traced(TORCH.replace("DEVICE", "'cuda'")))
    assert "gelu(x: float32[2, 767], approximate=tanh) on CUDA device 0" in text
    assert "not one aligned sequence: element by element" in text and "StridedKernel<" in text
    assert "2 rows of 768 columns: a block takes a row, aligned vectors" in text and "ResidentKernel<" in text
    assert "blocks of" in text and "threads" in text
