"""Products of few rows on a GPU: values, and the same bits in every company. Weights of integers."""

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import abi_files
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from abi_files import FLOAT
from linear_calls import ACTIVATIONS, linear_node, model_of, random
from onnx import TensorProto, helper
from quantised_weights import Weight, weight_of
from samples import ALL
from torch import Tensor
from torch.nn import functional as F

from twinop import torch_op
from twinop.libraries.library import find_library
from twinop.model.attach import attach_bodies
from twinop.testing.one_node import body_session, make_session, one_node_model, run_bound

LIBRARY = find_library("custom_ops")
FORMS = list(itertools.product((4, 8), (32, 128), (False, True)))  # bits, block, zero points
ROWS = (1, 2, 7, 8, 9, 15, 16, 17, 31, 32)
MORE = (33, 63, 64)  # of a quantised weight


def close(found: Tensor, expected: Tensor, size: Tensor, units: float = 1.5) -> bool:
    """Whether the error is that of rounding weights and results to the dtype of `found`."""
    unit = torch.finfo(found.dtype).eps / 2
    return bool(((found.double() - expected).abs() <= unit * (units * expected.abs() + size)).all())


@pytest.mark.parametrize(("bits", "block", "with_zero"), FORMS)
def test_weights_are_those_of_onnxruntime(bits: int, block: int, with_zero: bool) -> None:
    """The op, its body and MatMulNBits compute one product; K is no multiple of a chunk or block."""
    n, k = 16, 96 if block == 32 else 160
    weight = weight_of(n, k, bits, block, with_zero)
    x = random(5, k, dtype=torch.float16)
    expected, size = x.double() @ weight.dense.mT, x.double().abs() @ weight.dense.abs().mT
    assert close(torch_op.linear_q(x, **weight.given, bits=bits, block=block), expected, size)

    types = dict.fromkeys(("x", "scale", "bias", "residual", "y"), "float16")
    types |= {"weight": "uint8", "zero": "uint8"}
    given = [1, 1, 1, int(with_zero), 0, 0]
    model = one_node_model(ALL["linear_q"], types, given, {"bits": bits, "block": block})
    fed = {name: each.numpy() for name, each in {"x": x, **weight.given}.items()}
    in_body = body_session(attach_bodies(model)).run(fed)["y"]
    (in_kernel,) = make_session(model, LIBRARY, "cpu").run(None, fed)
    for y in (in_body, in_kernel):
        assert close(torch.from_numpy(y), expected, size)

    names = list(weight.stored)
    node = helper.make_node(
        "MatMulNBits", ["x", *names], ["y"], domain="com.microsoft", K=k, N=n, bits=bits, block_size=block
    )
    proto = abi_files.model([node], {"x": FLOAT}, {"y": FLOAT}, weight.stored, com__microsoft=1)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    (theirs,) = session.run(None, {"x": x.float().numpy()})
    assert np.abs(theirs - expected.numpy()).max() < 1e-2 * size.max().item()


def test_weights_of_4_and_8_bits_in_one_body() -> None:
    x, expected = random(5, 64, dtype=torch.float16), torch.zeros(5, 16, dtype=torch.float64)
    given, nodes = dict[str, Tensor](), list[onnx.NodeProto]()
    for i, (bits, block) in enumerate(((4, 32), (8, 32), (8, 128))):
        weight = weight_of(16, 64, bits, block, True)
        parts = {f"{name}{i}": each for name, each in weight.given.items()}
        node = helper.make_node("CustomLinearQ", ["x", *parts], [f"y{i}"], bits=bits, block=block)
        node.domain, given = "custom_domain", given | parts
        nodes.append(node)
        expected += x.double() @ weight.dense.mT
    nodes.append(helper.make_node("Sum", ["y0", "y1", "y2"], ["y"]))
    model = model_of(nodes, [5, 64], given, TensorProto.FLOAT16)
    y = body_session(attach_bodies(model)).run({"x": x})["y"]
    assert (y.double() - expected).norm() < 2e-3 * expected.norm()


def constant_weight_session(op: str, shape: list[Any], weight: Weight, bits: int, block: int) -> Any:
    """Returns a session of one node that adds a bias of ones and has a constant weight."""
    given = {**weight.given, "bias": torch.ones(len(weight.dense), dtype=torch.float16)}
    names = ["x", "weight", "scale", "zero" if "zero" in given else "", "bias"]
    node = helper.make_node(op, names, ["y"], domain="custom_domain", bits=bits, block=block)
    return make_session(model_of([node], shape, given, TensorProto.FLOAT16), LIBRARY, "cpu")


@pytest.mark.parametrize("shape", [["B", "K"], [5, 160]], ids=["open", "known"])
@pytest.mark.parametrize(("bits", "block", "with_zero"), FORMS)
def test_a_constant_weight(bits: int, block: int, with_zero: bool, shape: list[Any]) -> None:
    """ONNX Runtime packs it. The width of x, which is no multiple of a block, is known or not."""
    weight, x = weight_of(16, 160, bits, block, with_zero), random(5, 160, dtype=torch.float16)
    expected = x.double() @ weight.dense.mT + 1
    size = x.double().abs() @ weight.dense.abs().mT + 1
    session = constant_weight_session("CustomLinearQ", shape, weight, bits, block)
    for rows in (5, 1):
        (y,) = session.run(None, {"x": x[:rows].numpy()}) if shape[0] == "B" or rows == 5 else (None,)
        assert y is None or close(torch.from_numpy(y), expected[:rows], size[:rows])
    gate, up = expected.chunk(2, -1)
    session = constant_weight_session("CustomLinearQSwiglu", shape, weight, bits, block)
    (y,) = session.run(None, {"x": x.numpy()})
    assert np.abs(y - (F.silu(gate) * up).numpy()).max() < 4e-3 * size.max().item()


@pytest.mark.parametrize(("n", "k"), [(0, 64), (16, 0)])
def test_a_constant_weight_without_elements(n: int, k: int) -> None:
    session = constant_weight_session("CustomLinearQ", ["B", k], weight_of(n, k, 4, 32, True), 4, 32)
    (y,) = session.run(None, {"x": np.ones((3, k), np.float16)})
    assert y.shape == (3, n) and (y == 1).all()


def test_slices_of_a_large_weight() -> None:
    """Weights of 8 bits are dense a slice at a time, here in ONNX Runtime and in torch: two and a rest."""
    n, k = 2 * (1 << 23) // 4096 + 3, 4096
    weight, x = weight_of(n, k, 8, 128, True), random(3, k, dtype=torch.float16)
    expected, size = x.double() @ weight.dense.mT, x.double().abs() @ weight.dense.abs().mT
    assert close(torch_op.linear_q(x, **weight.given, bits=8, block=128), expected, size)
    session = constant_weight_session("CustomLinearQ", ["B", k], weight, 8, 128)
    (y,) = session.run(None, {"x": x.numpy()})
    assert close(torch.from_numpy(y), expected + 1, size + 1)


_PEAK = """
import resource, sys
import numpy, onnxruntime
options = onnxruntime.SessionOptions()
options.register_custom_ops_library(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
session = onnxruntime.InferenceSession(sys.argv[2], options, providers=["CPUExecutionProvider"])
for rows in (16, 1):
    session.run(None, {"x": numpy.ones((rows, 2048), numpy.float16)})
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("bits", [4, 8])
def test_no_weight_is_dense_on_the_cpu(bits: int, tmp_path: Path) -> None:
    """The session and its runs take little more than the weight: in fp32 it has 134 MB."""
    n, k = 16384, 2048
    codes = np.random.default_rng(0).integers(0, 256, (n, k // 32, 4 * bits), np.uint8)
    given = {"weight": torch.from_numpy(codes), "scale": torch.full((n, k // 32), 0.01, dtype=torch.float16)}
    node = helper.make_node("CustomLinearQ", ["x", *given], ["y"], domain="custom_domain", bits=bits)
    onnx.save(model_of([node], ["B", k], given, TensorProto.FLOAT16), tmp_path / "m.onnx")
    command = [sys.executable, "-c", _PEAK, str(LIBRARY), str(tmp_path / "m.onnx")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) * 1024 < 134e6 + (n * k if bits == 8 else 0), "with ONNX Runtime's own copies"


def calls(k: int, n: int, dtype: torch.dtype, kind: str) -> tuple[Any, Any, Tensor]:
    """Returns `linear` and `linear_swiglu` of a weight as functions of x and more, and the weight in fp64."""
    if kind == "dense":
        weight = (random(n, k, device="cuda") / k**0.5).to(dtype)
        return (
            lambda x, *more, **options: torch_op.linear(x, weight, *more, **options),
            lambda x, *more, **options: torch_op.linear_swiglu(x, weight, *more, **options),
            weight.double(),
        )
    if kind == "fp8":
        q, scale = torch_op.quantize_rows(random(n, k, dtype=dtype, device="cuda"))
        zeros = torch.zeros(n, dtype=dtype, device="cuda")

        def linear(x: Tensor, bias: Tensor = zeros, residual: Tensor | None = None, **options: Any) -> Tensor:
            return torch_op.linear_w8(x, q, scale, bias, residual, few_rows=80, **options)

        return (
            linear,
            lambda x, bias=zeros, **more: torch_op.linear_w8_swiglu(x, q, scale, bias, few_rows=80, **more),
            q.double() * scale.double()[:, None],
        )
    bits, block, with_zero = (int(each) for each in kind.split())
    found = weight_of(n, k, bits, block, bool(with_zero), dtype)
    on_gpu = {"zero": None} | {name: each.cuda() for name, each in found.given.items()}
    given = [on_gpu[name] for name in ("weight", "scale", "zero")]
    sizes = dict[str, Any](bits=bits, block=block)
    return (
        lambda x, *more, **options: torch_op.linear_q(x, *given, *more, **sizes, **options),
        lambda x, *more, **options: torch_op.linear_q_swiglu(x, *given, *more, **sizes, **options),
        found.dense.cuda(),
    )


KINDS = ["dense", "4 32 0", "4 32 1", "4 128 1", "8 32 1", "8 128 0", "fp8"]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(2048, 2048), (6160, 576), (8208, 192), (16, 8256)])
def test_values_and_bits(n: int, k: int, kind: str, dtype: torch.dtype) -> None:
    """Each row is that of the call with this row alone, in every place; more rows are right."""
    linear, swiglu, weight = calls(k, n, dtype, kind)
    x, bias, residual = (random(*shape, dtype=dtype, device="cuda") for shape in ((80, k), (n,), (80, n)))
    wide = x.double()
    expected, size = wide @ weight.mT, wide.abs() @ weight.abs().mT
    most = 32 if kind == "dense" else 64
    alone = torch.cat([linear(x[i : i + 1]) for i in range(most)])
    assert close(alone, expected[:most], size[:most])
    for rows in ROWS if kind == "dense" else ROWS + MORE:
        assert torch.equal(linear(x[:rows]), alone[:rows]), rows
    turned = torch.randperm(most, device="cuda")
    assert torch.equal(linear(x[turned]), alone[turned])
    assert torch.equal(linear(x[:32].view(4, 8, k)), alone[:32].view(4, 8, n))
    assert close(linear(x), expected, size)
    sums, size = expected + bias.double(), size + bias.double().abs()
    for rows, activation in itertools.product((3, 40, 80), ACTIVATIONS):
        found = linear(x[:rows], bias, residual[:rows], activation=activation)
        total = sums[:rows] + residual[:rows].double()
        assert close(found, ACTIVATIONS[activation](total), 1.2 * size[:rows] + residual[:rows].abs(), 3)
    for rows, activation in itertools.product((3, 40, 80), ("silu", "gelu", "gelu_tanh")):
        found = swiglu(x[:rows], bias, activation=activation)
        gate, others = sums[:rows].chunk(2, -1)
        gate_size, other_size = size[:rows].chunk(2, -1)
        error = 1.2 * gate_size * others.abs() + other_size * (gate.abs() + 1) + gate_size * other_size * 0.01
        assert close(found, ACTIVATIONS[activation](gate) * others, error, 3)
        if rows <= most:
            assert torch.equal(found[2:3], swiglu(x[2:3], bias, activation=activation))


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["dense", "4 32 0", "4 32 1", "8 128 0", "fp8"])
def test_bits_of_wide_products(kind: str) -> None:
    """Which kernel runs depends on the blocks that a processor gets, so on the rows, but no bit does."""
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    sizes = [(32 * processors * each - 16, 1184) for each in range(3, 10)]  # warps have several chunks
    is_dense = kind == "dense"
    dense = [(4112, 4160), (8208, 1088), (8208, 4160), (65552, 1088)]
    # These take clusters, and the last two have blocks without a chunk.
    dense += [(1440, 8256), (2064, 8256), (6160, 4160), (2064, 64), (2064, 320)]
    for n, k in dense if is_dense else sizes:
        linear, swiglu, weight = calls(k, n, torch.float16, kind)
        most = 130 if is_dense else 64
        x = random(most, k, dtype=torch.float16, device="cuda")
        norms = kind in ("dense", "fp8")
        for call, eps in itertools.product((linear, swiglu), (0.0, 1e-3) if norms else (0.0,)):
            more = {"rms_eps": eps} if eps else {}
            alone = torch.cat([call(x[i : i + 1], **more) for i in range(most)])
            for rows in ROWS if is_dense else ROWS + MORE:
                assert torch.equal(call(x[:rows], **more), alone[:rows]), (n, rows)
            for rows in (33, 64, most) if is_dense else ():
                chosen: list[dict[str, Any]] = [{"invariant": True}]
                chosen += [{"few_rows": 64}, {"few_rows": rows}] if rows <= 64 else []
                for options in chosen:
                    assert torch.equal(call(x[:rows], **options, **more), alone[:rows]), (n, rows, options)
            if call is linear and not eps:
                wide = x.double()
                assert close(alone, wide @ weight.mT, wide.abs() @ weight.abs().mT)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["dense", "fp8"])
@pytest.mark.parametrize(
    ("n", "k"),
    [(2048, 2048), (3072, 2048), (4112, 4160), (6160, 576), (8208, 192), (8208, 4160), (16, 8256), (24, 100)],
)
def test_products_that_norm_x(n: int, k: int, kind: str, dtype: torch.dtype) -> None:
    """Each row is that of the call with this row alone, also among rows of other lengths."""
    n, k = (n, k) if kind == "dense" else (n // 16 * 16, k // 16 * 16)
    linear, swiglu, weight = calls(k, n, dtype, kind)
    lengths = torch.logspace(-2, 2, 80, dtype=torch.float64, device="cuda")[torch.randperm(80)]
    x = (random(80, k, dtype=torch.float64, device="cuda") * lengths[:, None]).to(dtype)
    bias, residual = (random(*shape, dtype=dtype, device="cuda") for shape in ((n,), (80, n)))
    more = bias.double() + residual.double()
    normed = F.rms_norm(x.double(), [k], eps=1e-3)
    expected, size = normed @ weight.mT, normed.abs() @ weight.abs().mT
    for options in ({}, {"invariant": True}) if k % 64 == 0 and kind == "dense" else ({},):
        found = linear(x, bias, residual, rms_eps=1e-3, **options)
        assert close(found, expected + more, size + more.abs() + 1, 2)
        found = swiglu(x, rms_eps=1e-3, **options)
        gate, others = expected.chunk(2, -1)
        gated = F.silu(gate) * others  # of a weight in 8 bits larger than what it is made of
        error = (found - gated).norm() / max(gated.norm(), expected.norm())
        assert error < 6 * torch.finfo(dtype).eps
    alone = torch.cat([linear(x[i : i + 1], rms_eps=1e-3) for i in range(32)])
    gates = torch.cat([swiglu(x[i : i + 1], rms_eps=1e-3) for i in range(32)])
    assert close(alone, expected[:32], size[:32])
    for rows in ROWS if k % 64 == 0 or kind == "fp8" else ():
        assert torch.equal(linear(x[:rows], rms_eps=1e-3), alone[:rows]), rows
        assert torch.equal(swiglu(x[:rows], rms_eps=1e-3), gates[:rows]), rows


@pytest.mark.cuda
def test_a_weight_that_the_kernel_before_writes() -> None:
    """In torch no weight is known to be constant: it is read when the kernel before this one has ended."""
    x, source = (random(*shape, dtype=torch.float16, device="cuda") for shape in ((4, 512), (2048, 512)))
    expected = torch_op.linear(x, source.relu())
    for _ in range(50):
        assert torch.equal(torch_op.linear(x, torch_op.relu(source)), expected)


@pytest.mark.cuda
def test_bits_in_onnxruntime() -> None:
    """A chain of products with constant weights, whose kernels overlap: each row as alone, and as torch's."""
    shapes = ((1024, 512), (512, 1024), (4096, 512))
    weights = [(random(*shape) / shape[1] ** 0.5).half() for shape in shapes]
    named = {f"w{i}": weight for i, weight in enumerate(weights)}
    x = random(384, 512, dtype=torch.float16, device="cuda")
    expected = x
    for weight in weights:
        expected = torch_op.linear(expected, weight.cuda(), activation="gelu", invariant=True)
    turned = torch.randperm(32, device="cuda")
    for most, options in ((32, {}), (64, {"few_rows": 64}), (384, {"invariant": 1})):
        nodes = [
            linear_node([before, f"w{i}"], after, activation="gelu", **options)
            for i, (before, after) in enumerate((("x", "a"), ("a", "b"), ("b", "y")))
        ]
        session = make_session(model_of(nodes, ["m", 512], named), LIBRARY, "cuda")
        several: list[Any] = [*map(slice, (*ROWS, 33, 64, 384)), turned]
        for rows in (each for each in several if len(x[each]) <= most):
            y = torch.empty_like(expected[rows])
            run_bound(session, {"x": x[rows]}, {"y": y})
            assert torch.equal(y, expected[rows]), rows


@pytest.mark.cuda
def test_rows_that_do_not_fit_are_named() -> None:
    weight = weight_of(8, 64, 4, 32, False).given
    x = torch.zeros(1, 40, dtype=torch.float16, device="cuda")
    with pytest.raises(RuntimeError, match="x has rows of 40 elements, expected a multiple of 32"):
        torch_op.linear_q(x, **{name: each.cuda() for name, each in weight.items()})


@pytest.mark.parametrize("kind", ["dense", "4 32 1"])
def test_the_cpu_pays_no_heed_to_invariant(kind: str) -> None:
    x = random(5, 64)
    weight = {"weight": random(16, 64)} if kind == "dense" else weight_of(16, 64, 4, 32, True).given
    for op in ("linear", "linear_swiglu") if kind == "dense" else ("linear_q", "linear_q_swiglu"):
        call = getattr(torch_op, op)
        given = {"x": x if kind == "dense" else x.half(), **weight}
        for options in ({"invariant": True}, {"few_rows": 64} if kind == "dense" else {}):
            assert torch.equal(call(**given, **options), call(**given))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["dense", "4 32 0", "4 128 1", "8 128 0"])
@pytest.mark.parametrize(("n", "k"), [(2048, 2048), (6160, 576), (8208, 192), (16, 8256)])
def test_bits_of_an_invariant_product(n: int, k: int, kind: str, dtype: torch.dtype) -> None:
    """Each of many rows is that of the call without the option and with this row alone, in every place."""
    linear, swiglu, weight = calls(k, n, dtype, kind)
    most = 1024
    x, bias, residual = (random(*shape, dtype=dtype, device="cuda") for shape in ((most, k), (n,), (most, n)))
    wide = x.double()
    assert close(linear(x, invariant=True), wide @ weight.mT, wide.abs() @ weight.abs().mT)
    turned = torch.randperm(most, device="cuda")
    for call, more in ((linear, [bias, residual]), (swiglu, [bias])):

        def run(rows: Any, call: Any = call, more: Any = more, **options: Any) -> Tensor:
            given = [each[rows] if each.dim() == 2 else each for each in more]
            return call(x[rows], *given, activation="silu", **options)

        alone = torch.cat([run(slice(i, i + 1)) for i in range(most)])
        for rows in (1, 65, 200, most):
            assert torch.equal(run(slice(rows), invariant=True), alone[:rows]), rows
            assert torch.equal(run(slice(-rows, None), invariant=True), alone[-rows:]), rows
        assert torch.equal(run(turned, invariant=True), alone[turned])


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("n", "k", "dtype", "layout"),
    [
        (64, 64, "float32", "nk"),
        (64, 64, "float16", "kn"),
        (64, 96, "float16", "nk"),
        (12, 64, "float16", "nk"),
    ],
)
def test_invariant_products_without_a_kernel_are_refused(n: int, k: int, dtype: str, layout: str) -> None:
    shapes = (3, k), (n, k) if layout == "nk" else (k, n)
    x, weight = (random(*shape, dtype=getattr(torch, dtype), device="cuda") for shape in shapes)
    torch_op.linear(x, weight, layout=layout)
    message = f"K is {k} and N {n}; an invariant product takes 16-bit types, layout nk, K a multiple of 64"
    with pytest.raises(RuntimeError, match=message):
        torch_op.linear(x, weight, layout=layout, invariant=True)
