"""Products of quantised weights become linear_q: what is one node, and what stays apart."""

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from optimizing import parsed, rewritten, types
from quantised_weights import weight_of

from twinop import deploy
from twinop.optimize.quantised import Quantised, QuantisedGates
from twinop.optimize.rewrite import skipped

K, N = 64, 32
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
def test_products(gate: dict[str, Any], up: dict[str, Any], rest: str, expected: dict[str, int]) -> None:
    random = np.random.default_rng(0)
    feeds = {name: random.standard_normal((3, K)).astype(np.float16) for name in "xz"}
    values = {"row": random.standard_normal(N).astype(np.float16), "one": np.ones(1, np.float16)}
    constants, text = dict(values), ""
    for name, form in {"g": gate, "u": up}.items():
        x, bits = form.get("x", "x"), form.get("bits", 4)
        weight = weight_of(N, K, bits, 32, form.get("zero", False))
        values[name] = feeds[x] @ weight.dense.numpy().T
        found = {f"{name}_{key}": array for key, array in weight.stored.items()}
        found[f"{name}_scales"] = found[f"{name}_scales"].astype(np.float16)
        zero = f"{name}_zero_points" if form.get("zero") else ""
        more = [zero, "order"] if form.get("order") else [zero]
        constants |= found | ({"order": np.arange(K, dtype=np.int32) // 32} if "order" in form else {})
        inputs = ", ".join([x, f"{name}_B", f"{name}_scales", *more]).rstrip(", ")
        attributes = f"K = {K}, N = {N}, bits = {bits}, block_size = 32"
        text += f"{name} = com.microsoft.MatMulNBits <{attributes}> ({inputs}) "
    dims = f"(float16[3, {K}] x, float16[3, {K}] z) => (float16[3, {N}] y)"
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
