"""LibraryOf libraries on a GPU, in both runtimes: kernels in PTX, which the driver compiles."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from aot_ops import ONE, LibraryOf, record
from onnx import ModelProto, TensorProto, helper

from twinop import deploy, torch_op
from twinop.aot_kernels.expression import Expression, constant, size
from twinop.aot_kernels.plan import (
    POINTER,
    DeviceOp,
    Fill,
    Image,
    Kernel,
    Launch,
    Plan,
    Pointer,
    Scalar,
    Variant,
)

pytestmark = pytest.mark.cuda

# y = factor * x + y, a thread for each element.
PTX = b"""
.version 7.0
.target sm_80
.address_size 64
.visible .entry scale(.param .u64 x, .param .u64 y, .param .u32 n, .param .f32 factor)
{
  .reg .pred %p;
  .reg .b32 %r<5>;
  .reg .b64 %d<6>;
  .reg .f32 %f<5>;
  ld.param.u64 %d1, [x];
  ld.param.u64 %d2, [y];
  ld.param.u32 %r1, [n];
  ld.param.f32 %f1, [factor];
  mov.u32 %r2, %ctaid.x;
  mov.u32 %r3, %ntid.x;
  mov.u32 %r4, %tid.x;
  mad.lo.u32 %r4, %r2, %r3, %r4;
  setp.ge.u32 %p, %r4, %r1;
  @%p bra done;
  mul.wide.u32 %d3, %r4, 4;
  add.u64 %d4, %d1, %d3;
  add.u64 %d5, %d2, %d3;
  ld.global.f32 %f2, [%d4];
  ld.global.f32 %f3, [%d5];
  fma.rn.f32 %f4, %f1, %f2, %f3;
  st.global.f32 [%d5], %f4;
done:
  ret;
}
"""


def library(library_of: LibraryOf) -> Path:
    """y = 6 * x, through a temporary tensor of 2 * x."""

    def step(source: Pointer, target: Pointer, factor: float, kernel: int) -> Launch:
        arguments = (source, target, Scalar(n, "int"), Scalar(constant(factor), "fp32"))
        parameters = ((0, POINTER), (1, POINTER), (2, "i32"), (3, "fp32"))
        return Launch((blocks, ONE, ONE), arguments, (Variant((), parameters, kernel),))

    of = Expression.of
    n = of("*", size(0, 0), size(0, 1))
    total, blocks = of("*", n, 4), of("FloorDivide", of("+", n, 127), 128)
    x, middle, y = Pointer("input", 0), Pointer("temporary", 0), Pointer("output", 0)
    steps = (Fill(middle, total), step(x, middle, 2.0, 0), Fill(y, total), step(middle, y, 3.0, 1))
    plan = Plan(0, (2,), steps, temporaries=(total,))
    image = Image("80", PTX, is_ptx=True)
    plain = Kernel("scale", "scale, test_on_gpu.py", (image,))
    other = replace(plain, images=(replace(image, shared=100_000),))  # more than 48 KiB
    return library_of(DeviceOp(record(dtypes="float32"), (plan,)), plain, other)


def model(shape: tuple[int, ...]) -> ModelProto:
    node = helper.make_node("CustomK", ["x"], ["y"], domain="aot")
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, list(shape)) for name in "xy"]
    graph = helper.make_graph([node], "g", value[:1], value[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("aot", 1)], ir_version=10)


@pytest.mark.parametrize("shape", [(1, 1), (3, 1000), (1024, 1025)])
def test_in_both_runtimes(shape: tuple[int, int], library_of: LibraryOf) -> None:
    path = library(library_of)
    x = torch.randn(shape, device="cuda")
    in_torch = torch_op.load(path, f"aot_{shape[0]}").functions["k"](x)
    torch.testing.assert_close(in_torch, 6 * x, rtol=1e-6, atol=0)
    session = deploy.session(model(shape), ["CUDAExecutionProvider"], path)
    assert np.array_equal(session.run({"x": x.cpu().numpy()})["y"], in_torch.cpu().numpy())


def test_in_cuda_graphs(library_of: LibraryOf) -> None:
    """Temporary tensors, fills and launches become nodes of the graph."""
    path = library(library_of)
    op = torch_op.load(path, "aot_graph").functions["k"]
    x = torch.ones(33, 65, device="cuda")
    op(x)  # loads the kernels, which a capture cannot
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = op(x)
    session = deploy.session(model((33, 65)), ["CUDAExecutionProvider"], path, enable_cuda_graph=True)
    for seed in range(3):
        x.copy_(torch.randn(33, 65, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        torch.testing.assert_close(y, 6 * x, rtol=1e-6, atol=0)
        assert torch.equal(session.run({"x": x})["y"], y)
