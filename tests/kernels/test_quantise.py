"""Floats and integers of 8 bits as storage types: every number, layouts, broadcasting, both devices.

tests/ops/quantise.h has the ops.
"""

import ml_dtypes
import numpy as np
import pytest
import torch
from abi_files import FLOAT, model
from onnx import TensorProto, helper
from samples import DEVICES
from torch import Tensor

from twinop import deploy, torch_op
from twinop.libraries.library import find_library
from twinop.record.dtypes import to_array

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
each_device = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture(scope="module")
def ops() -> object:
    return torch_op.load(find_library("test_quantise"))


def near(numbers: Tensor) -> Tensor:
    """Returns the numbers, those halfway between them, and the floats beside each of these, of both signs."""
    finite = numbers.float()[numbers.float().isfinite()].abs().unique()
    found = torch.cat([finite, (finite[1:] + finite[:-1]) / 2, finite[-1:] * 1.0625, finite[-1:] * 1.125])
    bits = found.view(torch.int32)
    found = torch.cat([(bits + step).view(torch.float32) for step in (-1, 0, 1)])
    special = torch.tensor([0.0, torch.inf, torch.nan, 1e-45, 1e-30, 3.4e38])
    spread = torch.randn(20000) * torch.exp2(torch.randn(20000) * 6)
    found = torch.cat([found[found.isfinite()], special, spread])
    return torch.cat([found, -found])


def same(found: Tensor, expected: Tensor) -> None:
    """Fails where bits differ. All NaN count as equal."""
    a, b = (to_array(each) for each in (found, expected))
    number = ~np.isnan(b.astype(np.float32))
    assert a.dtype == b.dtype and np.array_equal(~np.isnan(a.astype(np.float32)), number)
    assert a[number].tobytes() == b[number].tobytes()


@each_device
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_every_float(ops: torch_op.Ops, device: str, dtype: torch.dtype) -> None:
    """All 256 numbers become fp32 as in torch, and fp32 is rounded as by torch and by ml_dtypes."""
    every = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(dtype)
    one = torch.ones(1, device=device)
    same(ops.dequantise(every.to(device), one), every.float())
    same(ops.dequantise(every.to(device), 0.5), every.float() * 0.5)  # a number has the record's dtype

    x = near(every)
    largest = torch.finfo(dtype).max
    found = (ops.quantise if dtype == E4M3 else ops.quantise_e5m2)(x.to(device), one).cpu()
    if dtype == E4M3:  # saturates, as in torch 2.13 and in ONNX
        x = x.clamp(-largest, largest)
    same(found, x.to(dtype))
    narrow = x.numpy().astype(getattr(ml_dtypes, str(dtype)[6:]))
    same(found, torch.from_numpy(narrow.view(np.uint8)).view(dtype))


@each_device
def test_int8_rounds_to_even_and_saturates(ops: torch_op.Ops, device: str) -> None:
    every = torch.arange(-128, 128).to(torch.int8)
    one = torch.ones(1, device=device)
    assert ops.dequantise(every.to(device), one).cpu().equal(every.float())
    x = torch.cat([near(every), torch.tensor([127.5, 128.5, -128.5, -1e9])])
    expected = x.nan_to_num(0, 1e9, -1e9).round().clamp(-128, 127).to(torch.int8)
    assert ops.quantise_int8(x.to(device), one).cpu().equal(expected)


LAYOUTS = {
    "contiguous": lambda x: x.clone(),
    "transposed": lambda x: x.T.clone().T,
    "strided": lambda x: torch.stack([x, x], -1)[..., 0],
    "shifted": lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),
}


@each_device
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(3, 5), (7, 64), (40, 1000), (65, 4097)], ids=str)
def test_layouts_and_broadcasting(
    ops: torch_op.Ops, device: str, shape: tuple[int, int], layout: str
) -> None:
    """A scale for each row, each column, and for all: the bits of the same arithmetic in torch."""
    torch.manual_seed(0)
    x = (torch.randn(shape) * 30).to(torch.bfloat16)
    place = LAYOUTS[layout]
    for scale in (torch.rand(shape[0], 1) + 0.1, torch.rand(shape[1]) + 0.1, torch.tensor(0.3)):
        exact = x.float() / scale
        given = place(x).to(device), scale.to(device)
        found = ops.quantise(*given)
        same(found, exact.clamp(-448, 448).to(E4M3))
        assert ops.quantise_int8(*given).cpu().equal(exact.round().clamp(-128, 127).to(torch.int8))
        same(ops.dequantise(place(found.cpu()).to(device), given[1]), found.cpu().float() * scale)


@each_device
def test_a_launcher_with_a_scale_for_each_row(ops: torch_op.Ops, device: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(33, 257)
    y, scale = ops.quantise_rows(x.to(device))
    expected = x.abs().amax(-1, keepdim=True) / 448
    assert scale.cpu().equal(expected)
    same(y, (x / expected).to(E4M3))


@each_device
@pytest.mark.parametrize(
    ("op", "node", "kind"),
    [
        ("quantise", "CustomQuantise", TensorProto.FLOAT8E4M3FN),
        ("quantise_e5m2", "CustomQuantiseE5m2", TensorProto.FLOAT8E5M2),
        ("quantise_int8", "CustomQuantiseInt8", TensorProto.INT8),
    ],
)
def test_in_onnx_runtime(ops: torch_op.Ops, device: str, op: str, node: str, kind: int) -> None:
    """Between two nodes and as an output there are the same bits as in torch."""
    nodes = [
        helper.make_node(node, ["x", "scale"], ["q"], domain="test_quantise"),
        helper.make_node("CustomDequantise", ["q", "scale"], ["y"], domain="test_quantise"),
    ]
    made = model(nodes, {"x": FLOAT, "scale": FLOAT}, {"q": kind, "y": FLOAT}, test_quantise=1)
    provider = "CUDAExecutionProvider" if device == "cuda" else "CPUExecutionProvider"
    session = deploy.session(made.SerializeToString(), [provider], find_library("test_quantise"))
    x, scale = torch.randn(33, 65, device=device) * 30, torch.rand(33, 1, device=device) + 0.1
    found = session.run({"x": x, "scale": scale})
    q = getattr(ops, op)(x, scale)
    same(found["q"].cpu(), q.cpu())
    assert found["y"].equal(ops.dequantise(q, scale))
