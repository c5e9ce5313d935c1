"""The scratch memory that ops ask for: what no kernel of the call uses is not reserved."""

import ctypes
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from abi_structures import SET, Attribute, Call, Context, Error, Tensor, read_table

from twinop import torch_op
from twinop.libraries.library import find_library, read_library

LIBRARY = find_library("custom_ops")
BYTES = ctypes.POINTER(ctypes.c_int64)
SCRATCH = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.POINTER(Call), BYTES, ctypes.POINTER(Error))
TYPES = {"float32": 1, "float16": 2, "float64": 4}
MIB = 1 << 20
needs_cuda_build = pytest.mark.skipif(
    read_library(LIBRARY).cuda_archs == "none", reason="the library was built without CUDA"
)


def scratch(name: str, dtype: str, shapes: Sequence[Sequence[int]], attributes: Sequence[Any]) -> int:
    """Returns the bytes for inputs of these shapes on CUDA device 0."""
    table = read_table(LIBRARY)
    ops = (table.ops[i].contents for i in range(table.op_count))
    op = next(op for op in ops if op.schema.decode().startswith(f"{name}("))
    inputs = (Tensor * 8)()
    for i, shape in enumerate(shapes):
        numel = torch.Size(shape).numel()
        sizes = (ctypes.c_int64 * len(shape))(*shape)
        inputs[i] = Tensor(1 << 20, sizes, None, numel, len(shape), TYPES[dtype], 1)  # no data is read
    values = (Attribute * 16)()
    for value, given in zip(values, attributes, strict=False):
        text = given.encode() if isinstance(given, str) else b""
        value.i, value.f = (0, 0.0) if isinstance(given, str) else (int(given), float(given))
        value.s, value.s_size = text, len(text)
    context = Context(1, 0)
    call = Call(inputs, None, values, None, None, ctypes.pointer(context), 8)
    error = Error(SET(lambda self, text, size: None))
    found = ctypes.c_int64()
    assert SCRATCH(op.scratch_size)(ctypes.byref(call), ctypes.byref(found), ctypes.byref(error)) == 0
    return found.value


@pytest.mark.parametrize("name", ["layer_norm_backward", "rms_norm_backward"])
@pytest.mark.parametrize("dtype", TYPES)
def test_only_wide_rows_keep_their_statistics(name: str, dtype: str) -> None:
    widest = {"float32": 4096, "float16": 8192, "float64": 0}[dtype]  # in registers
    attributes = [-1, 1e-5, 0]
    for columns in (1, 128, widest) if widest > 0 else ():
        few, many = (scratch(name, dtype, [(rows, columns)] * 2, attributes) for rows in (1000, 4_000_000))
        assert few == many <= 528 * 16 * columns
    few, many = (scratch(name, dtype, [(rows, widest + 1)] * 2, attributes) for rows in (1000, 4_000_000))
    assert many - few == 64 * (4_000_000 - 1000)


def swiglu(m: int, n: int, k: int, dtype: str = "float16", **given: Any) -> int:
    defaults = {"activation": "silu", "layout": "nk", "invariant": 0, "rms_eps": 0.0, "few_rows": 32}
    return scratch("linear_swiglu", dtype, [(m, k), (n, k)], list((defaults | given).values()))


@needs_cuda_build
def test_one_kernel_needs_no_room_for_a_product() -> None:
    assert swiglu(32, 28672, 4096) == swiglu(32768, 28672, 4096, invariant=1) == 0
    assert swiglu(64, 28672, 4096, few_rows=64) == 0
    assert swiglu(33, 28672, 4096) >= 32 * MIB + 2 * 33 * 28672  # cuBLASLt's, and gate and up
    assert swiglu(32, 28672, 4096, dtype="float32") >= 32 * MIB
    assert swiglu(32, 28672, 4100) >= 32 * MIB  # K is no multiple of 64


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_memory_of_a_call(dtype: torch.dtype) -> None:
    """What the calls use beside their results."""
    x, weight = (torch.randn(size, 64, device="cuda", dtype=dtype) / 8 for size in (16384, 8192))
    grad, rows = torch.randn(2, 1_000_000, 128, device="cuda", dtype=dtype)
    calls = (
        (lambda: torch_op.linear_swiglu(x[:32], weight), 1),
        (lambda: torch_op.linear_swiglu(x, weight, invariant=True), 1),
        (lambda: torch.ops.custom_domain.layer_norm_backward(grad, rows, None, None), 4),
    )
    for call, most in calls:
        call()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results = call()
        results = results if isinstance(results, torch.Tensor) else results[0]
        peak = torch.cuda.max_memory_allocated() - before
        assert peak - results.numel() * results.element_size() <= most * MIB


@pytest.mark.cuda
def test_a_large_product_in_one_kernel() -> None:
    """The kernel of Hopper GPUs needs no room; where two kernels run, their room is there."""
    x, bias = (torch.randn(*shape, device="cuda", dtype=torch.float16) for shape in ((128 * 132, 64), (512,)))
    weight = torch.randn(512, 64, device="cuda", dtype=torch.float16) / 8
    for rows in (128 * 132, 100, 3000):  # the first fits it, the others take cuBLASLt
        gate, up = (x[:rows].double() @ weight.double().mT + bias.double()).chunk(2, -1)
        wanted = torch.nn.functional.silu(gate) * up
        y = torch_op.linear_swiglu(x[:rows], weight, bias)
        assert float((y.double() - wanted).abs().max()) < 2e-2 * float(wanted.abs().max())
