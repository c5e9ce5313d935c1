"""Products of weights that DequantizeLinear makes floats run as products of quantised weights."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper
from onnxruntime.quantization import matmul_nbits_quantizer as quantizer
from optimizing import nodes, optimized, parsed, rewritten, types, weights
from quantised_weights import weight_of

from twinop import deploy
from twinop.optimize import dequantize
from twinop.optimize.equivalence import NotEquivalent
from twinop.optimize.quantised import Quantised, QuantisedGates
from twinop.optimize.rewrite import skipped
from twinop.optimize.segments import cut
from twinop.optimize.weight_check import check_weights

K, N, BLOCK = 128, 64, 32
KINDS = {"int4": 4, "uint4": 4, "int8": 8, "uint8": 8}


def integers(kind: str, *shape: int) -> np.ndarray:
    bits = KINDS[kind]
    low = 0 if kind.startswith("u") else -(2 ** (bits - 1))
    return np.random.default_rng(len(shape)).integers(low, low + 2**bits, shape, np.int16)


def model(kind: str, axis: int, zero: bool = True, reader: str = "", block: int = BLOCK) -> onnx.ModelProto:
    """x @ dequantised, in fp16: [K, N] with blocks along axis 0, or [N, K] that is turned."""
    shape, few = ((K, N), (K // block, N)) if axis == 0 else ((N, K), (N, K // block))
    reader = reader or ("y = MatMul(x, d)" if axis == 0 else "t = Transpose<perm=[1, 0]>(d) y = MatMul(x, t)")
    given = "q, s, z" if zero else "q, s"
    text = f"(float16[M, {K}] x) => (float16[M, {N}] y) "
    text += f"{{ d = DequantizeLinear <axis = {axis}, block_size = {block}> ({given}) {reader} }}"
    scales = np.random.default_rng(0).uniform(1e-3, 2e-3, few).astype(np.float16)
    made = parsed(text, s=scales, bias=weights(N).astype(np.float16))
    element = TensorProto.DataType.Value(kind.upper())
    made.graph.initializer.append(helper.make_tensor("q", element, shape, integers(kind, *shape).ravel()))
    if zero:
        zeros = integers(kind, *few, 1).ravel()
        made.graph.initializer.append(helper.make_tensor("z", element, few, zeros))
    made.opset_import[0].version = 21
    return made


@pytest.mark.parametrize(
    ("kind", "axis", "zero", "reader"),
    [
        ("int4", 0, True, ""),
        ("int4", 1, False, ""),
        ("uint4", 1, False, ""),
        ("int8", -1, False, ""),
        ("uint8", 0, True, ""),
        ("int4", 0, True, "y = Gemm (x, d, bias)"),
        ("int4", 1, True, "y = Gemm <transB = 1> (x, d, bias)"),
        ("int4", 1, True, "y = Gemm <transB = 1> (x, d)"),
    ],
)
def test_each_form_is_one_product(kind: str, axis: int, zero: bool, reader: str, tmp_path: Path) -> None:
    """The comparison with the original in fp32 and in 16 bits has seen each number."""
    report, made = optimized(model(kind, axis, zero=zero, reader=reader), tmp_path)
    assert report.fused["linear_q"] == 1 and not report.skipped
    assert types(made) == {"CustomLinearQ": 1}
    [product] = nodes(made, "CustomLinearQ")
    assert product.attributes["bits"].value == KINDS[kind] and product.attributes["block"].value == BLOCK
    has_zero = len(product.inputs) > 3 and product.inputs[3] is not None
    assert has_zero == (zero or kind.startswith("u"))
    assert report.error < 1e-2


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"block": 64}, "blocks of 64; linear_q has those of 32 and 128"),
        ({"reader": "y = Gemm <alpha = 2.0> (x, d)"}, "a weight that is read by others than matmuls"),
        ({"reader": "w = Neg (d) y = MatMul (x, w)"}, "a weight that is read by others"),
    ],
)
def test_what_stays_is_named(options: dict[str, Any], reason: str) -> None:
    proto = model("int4", 0, **options)
    made = rewritten(proto, dequantize.Dequantize, infers=True)
    [(said, count)] = skipped(made).items()
    assert said.startswith(f"DequantizeLinear: {reason}") and count == 1
    assert types(made) == Counter(node.op_type for node in proto.graph.node)


def test_a_mixture_of_experts_stays_as_it_is(tmp_path: Path) -> None:
    """In its 16 bits, and what follows it is fused."""
    random, half = np.random.default_rng(0), np.float16
    text = """(float16[M, 32] x) => (float16[M, 32] y) { r = MatMul (x, w)
        e = com.microsoft.QMoE <k = 2, activation_type = "silu", normalize_routing_weights = 1>
        (x, r, w1, s1, , w2, s2) a = Add (e, x) y = LayerNormalization <axis = -1> (a, g) }"""
    given = {f"w{i}": random.integers(0, 256, (4, 32, 16), np.uint8) for i in (1, 2)}
    scales = {f"s{i}": random.uniform(1e-3, 2e-3, (4, 32)).astype(half) for i in (1, 2)}
    proto = parsed(text, w=weights(32, 4).astype(half), g=weights(32).astype(half), **given, **scales)
    proto.graph.value_info.append(helper.make_tensor_value_info("e", TensorProto.FLOAT16, ["M", 32]))
    report, made = optimized(proto, tmp_path)
    assert types(made) == {"CustomLinear": 1, "QMoE": 1, "CustomAddLayerNorm": 1}
    assert report.skipped == {"QMoE: a mixture of experts stays as it is": 1}
    assert "needs ONNX Runtime: com.microsoft QMoE x 1" in str(report)


@pytest.mark.parametrize(("kind", "axis"), [*zip(KINDS, (0, 1, 0, 1), strict=True)])
def test_the_bytes_are_compared_with_the_source(kind: str, axis: int, tmp_path: Path) -> None:
    """Also one that is off is found."""
    _, made = optimized(model(kind, axis), tmp_path)
    source = ir.load(tmp_path / "old.onnx")
    assert not check_weights(source, made, cut(source, made))
    [blocks] = [node.inputs[1] for node in nodes(made, "CustomLinearQ")]
    assert blocks is not None and blocks.const_value is not None
    array = blocks.const_value.numpy().copy()
    array.reshape(-1)[7] ^= 1
    blocks.const_value = ir.tensor(array)
    with pytest.raises(NotEquivalent, match="differs from q in line"):
        check_weights(source, made, cut(source, made))


@pytest.mark.parametrize("symmetric", [True, False])
def test_what_the_quantizer_of_onnx_runtime_writes(symmetric: bool, tmp_path: Path) -> None:
    text = f"(float[M, {K}] x) => (float[M, {N}] y) {{ y = MatMul (x, w) }}"
    proto = parsed(text, 21, w=weights(K, N))
    form = quantizer.QuantFormat.QDQ
    made = quantizer.MatMulNBitsQuantizer(proto, block_size=32, is_symmetric=symmetric, quant_format=form)
    made.process()
    assert "DequantizeLinear" in [node.op_type for node in made.model.model.graph.node]
    report, result = optimized(made.model.model, tmp_path, dtype="float16")
    assert types(result)["CustomLinearQ"] == 1 and not report.skipped


WIDTH, COLUMNS = 64, 32
SILU = "a = custom_domain.CustomSilu(g) y = Mul(a, u)"
READ = SILU.replace("y =", "b =")


@pytest.mark.parametrize(
    ("gate", "up", "rest", "expected"),
    [
        ({}, {}, SILU, {"CustomLinearQSwiglu": 1}),
        ({"zero": True}, {"zero": True}, SILU, {"CustomLinearQSwiglu": 1}),
        ({}, {"x": "z"}, SILU, {"CustomLinearQ": 2, "Mul": 1}),
        ({}, {"bits": 8}, SILU, {"CustomLinearQ": 2, "Mul": 1}),
        ({}, {"zero": True}, SILU, {"CustomLinearQ": 2, "Mul": 1}),
        ({}, {}, f"{READ} y = Add(b, g)", {"CustomLinearQ": 2, "CustomSilu": 1, "Mul": 1, "Add": 1}),
        ({}, {}, "s = Add(g, row) y = Mul(s, u)", {"CustomLinearQ": 2, "Mul": 1}),
        ({}, {}, "s = Add(g, one) y = Mul(s, u)", {"CustomLinearQ": 2, "Mul": 1, "Add": 1}),
        ({}, {"order": True}, "y = Mul(g, u)", {"CustomLinearQ": 1, "MatMulNBits": 1, "Mul": 1}),
    ],
    ids=str,
)
def test_gated_products(gate: Any, up: Any, rest: str, expected: dict[str, int]) -> None:
    random = np.random.default_rng(0)
    feeds = {name: random.standard_normal((3, WIDTH)).astype(np.float16) for name in "xz"}
    values = {"row": random.standard_normal(COLUMNS).astype(np.float16), "one": np.ones(1, np.float16)}
    constants, text = dict(values), ""
    for name, form in {"g": gate, "u": up}.items():
        x, bits = form.get("x", "x"), form.get("bits", 4)
        weight = weight_of(COLUMNS, WIDTH, bits, 32, form.get("zero", False))
        values[name] = feeds[x] @ weight.dense.numpy().T
        found = {f"{name}_{key}": array for key, array in weight.stored.items()}
        found[f"{name}_scales"] = found[f"{name}_scales"].astype(np.float16)
        zero = f"{name}_zero_points" if form.get("zero") else ""
        more = [zero, "order"] if form.get("order") else [zero]
        constants |= found | ({"order": np.arange(WIDTH, dtype=np.int32) // 32} if "order" in form else {})
        inputs = ", ".join([x, f"{name}_B", f"{name}_scales", *more]).rstrip(", ")
        attributes = f"K = {WIDTH}, N = {COLUMNS}, bits = {bits}, block_size = 32"
        text += f"{name} = com.microsoft.MatMulNBits <{attributes}> ({inputs}) "
    dims = f"(float16[3, {WIDTH}] x, float16[3, {WIDTH}] z) => (float16[3, {COLUMNS}] y)"
    model = rewritten(parsed(f"{dims} {{ {text} {rest} }}", **constants), QuantisedGates, Quantised)
    assert types(model) == expected
    assert skipped(model) == ({"MatMulNBits: columns in another order (g_idx)": 1} if "order" in up else {})
    if "order" in up:
        return
    y = deploy.session(ir.to_proto(model), ["CPUExecutionProvider"]).run(feeds)["y"]
    g, u = values["g"], values["u"]
    truth = {"Add(g, row)": (g + values["row"]) * u, "Add(g, one)": (g + 1) * u}
    wanted = next((found for said, found in truth.items() if said in rest), g / (1 + np.exp(-g)) * u)
    wanted = wanted + g if "Add(b, g)" in rest else wanted
    np.testing.assert_allclose(y, wanted, rtol=1e-2, atol=1e-2)
