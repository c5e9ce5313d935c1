"""Rows and products in 8 bits: quantize_rows, the ops that quantise their results, linear_fp8."""

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from export_models import model_of
from same_bits import assert_same_bits
from samples import DEVICES, RECORDS
from torch import Tensor
from torch.nn import functional as F

from twinop import torch_op
from twinop.errors import RecordError
from twinop.export import attach_bodies
from twinop.record.op_spec import DOMAIN
from twinop.testing.one_node import body_session

E4M3 = torch.float8_e4m3fn
each_device = pytest.mark.parametrize("device", DEVICES)
each_dtype = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
ROUNDED = {torch.float16: 2e-3, torch.bfloat16: 6e-3}
"""The relative error of a product whose operands are given in 8 bits."""


def numbers(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(*shape, generator=generator)
    x[..., ::7] *= 40
    return x.to(device, dtype)


def formula(x: Tensor) -> tuple[Tensor, Tensor]:
    """The definition in NumPy's fp32, whose divisions are exact."""
    wide = x.float().cpu().numpy()
    largest = np.maximum(np.abs(wide).max(-1, initial=0), np.float32(2.0**-60))
    scale = largest / np.float32(448)
    q = torch.from_numpy(wide * (np.float32(1) / scale)[..., None]).clamp(-448, 448).to(E4M3)
    return q, torch.from_numpy(scale)


def dense(q: Tensor, scale: Tensor) -> Tensor:
    return q.double() * scale.double().unsqueeze(-1)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@each_device
@each_dtype
@pytest.mark.parametrize("columns", [0, 1, 8, 256, 264, 1000, 1024, 4096, 16384, 20000])
def test_the_formula(columns: int, dtype: torch.dtype, device: str) -> None:
    """Of one row, several and none; of rows of a wider tensor, also at an address of any alignment."""
    wide = numbers(5, columns + 3, dtype=dtype, device=device)
    for x in (wide[:, :columns].contiguous(), wide[:, :columns], wide[:1, 3:], wide[:0, 3:]):
        for found, expected in zip(torch_op.quantize_rows(x), formula(x), strict=True):
            assert_same_bits(found.cpu(), expected, f"{x.shape}")


@each_device
@each_dtype
@pytest.mark.parametrize("columns", [2, 264])
def test_every_scale(columns: int, dtype: torch.dtype, device: str) -> None:
    """A row for each number of 16 bits, its largest one."""
    every = torch.arange(1 << 15, dtype=torch.int16).view(dtype)
    x = every[every.isfinite()].unsqueeze(1) * torch.ones(columns, dtype=dtype)
    for column in range(1, columns):
        x[:, column] *= 2.0 ** -(column % 9)
    for found, expected in zip(torch_op.quantize_rows(x.to(device)), formula(x), strict=True):
        assert_same_bits(found.cpu(), expected, f"{dtype} {columns}")


PRODUCERS = {
    "rms_norm": ("x", "weight"),
    "layer_norm": ("x", "weight", "bias"),
    "add_rms_norm": ("x", "residual", "weight", "bias"),
    "add_layer_norm": ("x", "residual", "weight"),
    "gelu": ("x",),
    "swiglu_packed": ("packed",),
}


@each_device
@each_dtype
@pytest.mark.parametrize("name", PRODUCERS)
@pytest.mark.parametrize("columns", [2, 264, 768, 1032, 2048, 4104, 16384, 16392])
def test_they_are_the_op_and_quantize_rows(name: str, columns: int, dtype: torch.dtype, device: str) -> None:
    """Bit for bit, for rows that one kernel takes and for others."""
    shapes = {"weight": (columns,), "bias": (columns,), "packed": (3, 2 * columns)}
    given = [numbers(*shapes.get(each, (3, columns)), dtype=dtype, device=device) for each in PRODUCERS[name]]
    for attributes in ({"approximate": "none"}, {"approximate": "tanh"}) if name == "gelu" else ({},):
        results = getattr(torch_op, name)(*given, **attributes)
        results = results if isinstance(results, tuple) else (results,)
        expected = (*torch_op.quantize_rows(results[0]), *results)
        found = getattr(torch_op, f"{name}_fp8")(*given, **attributes)
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert_same_bits(a, b, f"{name} {attributes}, output {i}")


@each_dtype
def test_their_bodies_are_those_of_the_op_and_of_quantize_rows(dtype: torch.dtype) -> None:
    attributes = dict.fromkeys(("rms_norm", "add_rms_norm"), "<eps = 0.5, offset = 1>")
    attributes |= {"gelu": '<approximate = "tanh">', "add_layer_norm": "<eps = 0.5>"}
    nodes = []
    for name, inputs in PRODUCERS.items():
        call = f"{attributes.get(name, '')}({', '.join(inputs)})"
        ys = f"{name}_y, {name}_sum" if "residual" in inputs else f"{name}_y"
        nodes += [
            f"{name}_q, {name}_scale, {ys} = {DOMAIN}.{RECORDS[f'{name}_fp8'].onnx_name}{call}",
            f"{ys.replace(name, f'of_{name}')} = {DOMAIN}.{RECORDS[name].onnx_name}{call}",
            f"of_{name}_q, of_{name}_scale = {DOMAIN}.CustomQuantizeRows(of_{name}_y)",
        ]
    shapes = {"x": (3, 64), "residual": (3, 64), "weight": (64,), "bias": (64,), "packed": (3, 128)}
    kind = str(dtype).removeprefix("torch.")
    model = model_of(nodes, ", ".join(f"{kind}{[*shape]} {each}" for each, shape in shapes.items()))
    given = {each: numbers(*shape, dtype=dtype, device="cpu") for each, shape in shapes.items()}
    found = body_session(attach_bodies(model, RECORDS)).run(given)
    for name in (each for each in found if f"of_{each}" in found):
        assert_same_bits(found[name], found[f"of_{name}"], name)


def operands(m: int, n: int, k: int, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    x, weight = numbers(m, k, dtype=dtype, device=device), numbers(n, k, dtype=dtype, device=device) / k
    bias = numbers(n, dtype=dtype, device=device)
    return *torch_op.quantize_rows(x), *torch_op.quantize_rows(weight), bias


def check_product(m: int, n: int, k: int, dtype: torch.dtype, device: str) -> None:
    x, x_scale, weight, weight_scale, bias = given = operands(m, n, k, dtype, device)
    product = dense(x, x_scale) @ dense(weight, weight_scale).mT + bias.double()
    residual = numbers(m, n, dtype=dtype, device=device)
    activations = {"none": lambda y: y, "relu": F.relu, "gelu": F.gelu, "silu": F.silu}
    activations["gelu_tanh"] = lambda y: F.gelu(y, approximate="tanh")
    for activation, function in activations.items():
        for added in (None, residual):
            found = torch_op.linear_fp8(*given, added, activation)
            expected = function(product if added is None else product + added.double())
            assert found.dtype == dtype and error(found, expected) < ROUNDED[dtype], (m, n, k, activation)


@each_device
@each_dtype
@pytest.mark.parametrize("sizes", [(1, 16, 16), (7, 48, 64), (300, 256, 1024), (64, 768, 3072)], ids=str)
def test_products(sizes: tuple[int, int, int], dtype: torch.dtype, device: str) -> None:
    check_product(*sizes, dtype, device)


def products_of_16_bits(x: Tensor, *weights: Tensor, **options: float) -> dict[str, Tensor]:
    """With a residual, and with a gate, by the activation."""
    residual = numbers(len(x), len(weights[0]), dtype=x.dtype, device=x.device.type)
    plain, gated = torch_op.linear_w8, torch_op.linear_w8_swiglu
    found = {name: plain(x, *weights, residual, name, **options) for name in ("none", "gelu")}
    return found | {name: gated(x, *weights, name, **options) for name in ("silu", "gelu_tanh")}


@each_device
@each_dtype
@pytest.mark.parametrize("sizes", [(16, 16), (48, 80), (256, 1024), (6160, 576)], ids=str)
def test_x_in_16_bits(sizes: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    """Few rows are not put in 8 bits: the error is that of one rounding to 16."""
    n, k = sizes if device == "cuda" else (min(sizes[0], 256), sizes[1])
    weight, weight_scale, bias = weights = operands(1, n, k, dtype, device)[2:]
    for rows, eps in itertools.product((1, 9, 32), (0.0, 1e-2)):
        x = numbers(rows, k, dtype=dtype, device=device) / 8
        wide = F.rms_norm(x.double(), [k], eps=eps) if eps else x.double()
        product = wide @ dense(weight, weight_scale).mT + bias.double()
        total = product + numbers(rows, n, dtype=dtype, device=device).double()
        gate, others = product.chunk(2, -1)
        expected = {"none": total, "gelu": F.gelu(total), "silu": F.silu(gate) * others}
        expected["gelu_tanh"] = F.gelu(gate, approximate="tanh") * others
        for name, found in products_of_16_bits(x, *weights, rms_eps=eps).items():
            assert error(found, expected[name]) < torch.finfo(dtype).eps / 2, (rows, eps, name)


def check_more_rows(m: int, n: int, k: int, dtype: torch.dtype, few_rows: int) -> None:
    weights = operands(1, n, k, dtype, "cuda")[2:]
    x, residual = (numbers(m, each, dtype=dtype, device="cuda") for each in (k, n))
    for eps in (0.0, 1e-2):
        found = products_of_16_bits(x, *weights, rms_eps=eps, few_rows=few_rows)
        rows = torch_op.rms_norm_fp8(x, eps=eps)[:2] if eps else torch_op.quantize_rows(x)
        for name in ("none", "gelu"):
            expected = torch_op.linear_fp8(*rows, *weights, residual, name)
            assert_same_bits(found[name], expected, f"{m} rows, {name}")
        packed = torch_op.linear_fp8(*rows, *weights)
        assert_same_bits(found["silu"], torch_op.swiglu_packed(packed), f"{m} rows with a gate")
        gate, others = packed.double().chunk(2, -1)
        assert error(found["gelu_tanh"], F.gelu(gate, approximate="tanh") * others) < ROUNDED[dtype]


@pytest.mark.cuda
@each_dtype
@pytest.mark.parametrize(("m", "few_rows"), [(1, 0), (33, 32), (65, 64), (300, 32)])
def test_more_rows_of_16_bits_are_put_in_8(m: int, few_rows: int, dtype: torch.dtype) -> None:
    """Bit for bit quantize_rows, or the norm that quantises, and the product of 8 bits."""
    for n, k in ((256, 1024), (48, 80), (768, 4096), (1040, 16384)):
        check_more_rows(m, n, k, dtype, few_rows)


@each_device
def test_x_in_other_bits_than_the_op_has(device: str) -> None:
    """Each op takes its own: linear_fp8 with a scale a row, linear_w8 without one, and normed if asked."""
    q, q_scale, *weights = operands(2, 32, 64, torch.float16, device)
    x = numbers(2, 64, dtype=torch.float16, device=device)
    with pytest.raises((RecordError, RuntimeError), match="no kernel takes these dtypes; .* x_scale"):
        torch_op.linear_fp8(x, q_scale, *weights)
    with pytest.raises((RecordError, RuntimeError), match="no kernel takes these dtypes; .* weight=float8"):
        torch_op.linear_w8(q, *weights)
    with pytest.raises(RuntimeError, match="rms_eps"):
        torch_op.linear_fp8(q, q_scale, *weights, rms_eps=0.1)


@pytest.mark.cuda
@pytest.mark.parametrize("target", ["8.9", "8.0"])
def test_products_for_other_gpus(target: str) -> None:
    """Sums that a kernel scales, and operands that are made 16 bits wide."""
    check = "from test_linear_fp8 import *; [check_product(300, 256, 1024, d, 'cuda') for d in ROUNDED]"
    check += "; [check_more_rows(300, 256, 1024, d, 32) for d in ROUNDED]"
    environment = os.environ | {"TWINOP_TARGET": target, "TWINOP_TRACE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(["tests/kernels", "tests/helpers", *sys.path])
    done = subprocess.run([sys.executable, "-c", check], env=environment, capture_output=True, text=True)
    said = "8 bits, sums scaled" if target == "8.9" else "8 bits made 16"
    assert done.returncode == 0 and said in done.stderr, done.stderr[-2000:]


@each_device
def test_rows_without_numbers(device: str) -> None:
    """NaN and infinity make their rows NaN; the others keep their bits. Rows and columns of zeros give 0."""
    x = numbers(4, 512, dtype=torch.float16, device=device)
    weight = numbers(64, 512, dtype=torch.float16, device=device)
    weight[5] = 0
    bias = torch.zeros(64, dtype=torch.float16, device=device)
    columns = torch_op.quantize_rows(weight)
    expected = torch_op.linear_fp8(*torch_op.quantize_rows(x), *columns, bias)
    assert torch.equal(expected[:, 5], torch.zeros_like(expected[:, 5]))
    x[1, 7], x[2, 9], x[3] = torch.nan, torch.inf, 0
    found = torch_op.linear_fp8(*torch_op.quantize_rows(x), *columns, bias)
    assert_same_bits(found[0], expected[0], "another row")
    assert found[1:3].isnan().all() and not found[3].any()
    assert torch_op.linear_fp8(*torch_op.quantize_rows(x[:0]), *columns, bias).shape == (0, 64)


@pytest.mark.cuda
def test_sizes_that_no_gpu_multiplies() -> None:
    with pytest.raises(RuntimeError, match="K is 24 and N 16; expected multiples of 16"):
        torch_op.linear_fp8(*operands(4, 16, 24, torch.float16, "cuda"))
