"""Triton ops that read or write floats of 8 bits: built for sm_90 without a GPU, run in both runtimes."""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import warm_python
from samples import DEVICES

from twinop.building.builder import build
from twinop.building.project import Options, find_project
from twinop.libraries.library import Library
from twinop.testing.one_node import make_session, one_node_model, run_bound

pytest.importorskip("triton", reason="kernels in Python need it")

OPS = """\
import torch
import triton
import triton.language as tl

import twinop


@triton.jit
def scaled_kernel(x, scale, y, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + offsets, mask=offsets < n).to(tl.float32) * tl.load(scale)
    tl.store(y + offsets, v.to(y.dtype.element_ty), mask=offsets < n)


def launch(x, scale, dtype):
    y = torch.empty_like(x, dtype=dtype)
    scaled_kernel[(triton.cdiv(x.numel(), 256),)](x, scale, y, x.numel(), BLOCK=256)
    return y


def scaled(x, scale):
    return x * scale


def samples(dtype, size):
    yield torch.randn(3, size).to(dtype), torch.ones(1)


@twinop.triton_op(
    "to_float8(Tensor x, Tensor scale) -> Tensor", body=scaled, samples=samples, input_shapes="scale = [1]",
    dtypes=("float32 y=float8_e4m3fn",),
)
def to_float8(x, scale):
    return launch(x, scale, torch.float8_e4m3fn)


@twinop.triton_op(
    "from_float8(Tensor x, Tensor scale) -> Tensor", body=scaled, samples=samples, input_shapes="scale = [1]",
    dtypes=("float8_e4m3fn scale=float32 y=float32",),
)
def from_float8(x, scale):
    return launch(x, scale, torch.float32)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    folder = tmp_path_factory.mktemp("float8")
    (folder / "float8_ops.py").write_text(OPS)
    return build(find_project([folder / "float8_ops.py"]), options=Options("90")).library


@pytest.mark.parametrize("device", DEVICES)
def test_both_runtimes_store_8_bits(library: Library, device: str) -> None:
    """On the CPU both run the body, whose results are rounded as the kernel rounds them."""
    assert library.records["to_float8"].dtypes == "float32 y=float8_e4m3fn"
    ops: Any = sys.modules["float8_ops"]
    x, scale = torch.randn(3, 100) * 200, torch.tensor([2.0])
    expected = (x * 2).clamp(-448, 448).to(torch.float8_e4m3fn)
    cases = [("to_float8", x, expected), ("from_float8", expected, expected.float() * 2)]
    for name, given, wanted in cases:
        inputs = given.to(device), scale.to(device)
        found = getattr(ops, name)(*inputs)
        assert found.dtype == wanted.dtype and found.float().cpu().equal(wanted.float())
        dtypes = {"x": str(given.dtype)[6:], "scale": "float32", "y": str(wanted.dtype)[6:]}
        model = one_node_model(library.records[name], dtypes, [1, 1], {})
        session = make_session(model, library.path, device)
        result = torch.empty_like(wanted, device=device)
        run_bound(session, dict(zip(("x", "scale"), inputs, strict=True)), {"y": result})
        assert result.float().cpu().equal(wanted.float())


def test_without_its_python_file_and_a_gpu_nothing_can_be_tested(library: Library, tmp_path: Path) -> None:
    command = ["-m", "twinop", "test", shutil.copy(library.path, tmp_path)]
    done = warm_python.run(command, cwd=tmp_path, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 1
    assert "its ops have no CPU kernels, and this machine has no GPU. Put the Python file" in done.stderr
