"""Products that norm what they read: which norms go, and what the file then computes."""

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from decoder_graphs import Sizes, write
from optimizing import nodes, parsed, rewritten, types, weights

from twinop.deploy import check_model
from twinop.optimize import graph as g
from twinop.optimize import merge_linear, norm_into_matmul, optimize_folder
from twinop.optimize.rewrite import fused

DECODER = Sizes(width=128, inner=256, heads=2, kv_heads=1, vocab=1024)


def test_norms_of_a_decoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the last one, which the logits' product reads, go; the file is compared as any other."""
    monkeypatch.setattr(norm_into_matmul, "_MOST_ELEMENTS", 1024 * 128)
    report = optimize_folder(write(tmp_path / "old", DECODER, "bfloat16"), tmp_path / "new")
    assert report.fused["norms in matmuls"] == 4 and report.fused["add_rms_norm"] == 1 and not report.skipped
    model = ir.load(report.path)
    kinds = types(model)
    assert kinds["CustomAddRmsNorm"] == 1 and "CustomRmsNorm" not in kinds
    # q, k and v and the logits read one tensor; two products add another one to theirs.
    eps = [round(node.attributes["rms_eps"].as_float(), 9) for node in nodes(model, "CustomLinear")]
    assert sorted(eps) == [0, 0, 0, 0, 0, 1e-6, 1e-6]
    assert sorted(len(node.inputs) for node in nodes(model, "CustomLinear")) == [2, 2, 2, 2, 4, 4, 4]
    assert {n.attributes["rms_eps"].as_float() > 0 for n in nodes(model, "CustomLinearSwiglu")} == {True}
    check_model(report.path, tmp_path / "new/libcustom_ops.so")


def normed(text: str, outputs: str = "float16[M, 64] y", **arrays: np.ndarray) -> ir.Model:
    """Rewrites a model that has attention over a cache, too."""
    given = "float16[M, 64] x, float16[1,1,192] qkv, float16[1,1,8,64] cache, int32[1] place, int32[1] total"
    text = f"""({given}) =>
        ({outputs}, float16[1, 1, 64] a, float16[1, 1, 8, 64] b, float16[1, 1, 8, 64] c) {{
        {text}
        a, b, c = custom_domain.CustomAttentionCached (qkv, cache, cache, place, total)
    }}"""
    given_arrays = {"w": weights(64, 64), "v": weights(64, 64), "row": 1 + weights(64)} | arrays
    proto = parsed(text, **{name: each.astype(np.float16) for name, each in given_arrays.items()})
    return rewritten(proto, norm_into_matmul.NormIntoMatmul)


LINEAR, NORM = "custom_domain.CustomLinear", "custom_domain.CustomRmsNorm"
ADD_NORM = "custom_domain.CustomAddRmsNorm"


def test_a_weight_of_gemma_counts_from_one() -> None:
    model = normed(f"n = {NORM} <offset = 1, eps = 0.5> (x, row) y = {LINEAR} (n, w)", row=weights(64))
    [product] = nodes(model, "CustomLinear")
    weight, eps = product.inputs[1].const_value.numpy(), product.attributes["rms_eps"].as_float()  # type: ignore[union-attr]
    row, w = (each.astype(np.float16).astype(np.float32) for each in (weights(64), weights(64, 64)))
    assert eps == 0.5 and np.array_equal(weight, (w * (row + 1)).astype(np.float16))
    assert fused(model)["norms in matmuls"] == 1 and "CustomRmsNorm" not in types(model)


def test_a_sum_is_added_to_the_product_before() -> None:
    """Other readers of the sum read the product; the other term may be computed after the product."""
    text = f"""p = {LINEAR} (x, v) r = Relu (x) n, s = {ADD_NORM} (r, p, row)
        q = {LINEAR} (n, w) y = Add (q, s)"""
    model = normed(text)
    first, second = nodes(model, "CustomLinear")
    assert first.inputs[3].producer().op_type == "Relu" and second.inputs[0] is first.outputs[0]  # type: ignore[union-attr]
    assert first.outputs[0] in nodes(model, "Add")[0].inputs
    assert fused(model)["norms in matmuls"] == 1


STAYS = [
    f"n = {NORM} (x, row) q = {LINEAR} (n, w) y = Add (q, n)",  # others read the norm
    f"n = {NORM} (x, row) y = {LINEAR} (n, w, , n)",
    f"n = {NORM} (x, row) q = {LINEAR} (n, w) r = {LINEAR} (x, w) y = Add (q, r)",  # or the weight
    f"n = {NORM} <axis = 0> (x) y = {LINEAR} (n, w)",
    f'n = {NORM} (x, row) y = {LINEAR} <layout = "kn"> (n, w)',
    f"n = {NORM} <eps = 0.0> (x, row) y = {LINEAR} (n, w)",
    f"p = Relu (x) n, s = {ADD_NORM} (x, p, row) y = {LINEAR} (n, w)",  # no product
    f'p = {LINEAR} <activation = "relu"> (x, v) n, s = {ADD_NORM} (x, p, row) y = {LINEAR} (n, w)',
    f"p = {LINEAR} (x, v) n, s = {ADD_NORM} (x, p, row) q = {LINEAR} (n, w) y = Add (q, p)",
    f"p = {LINEAR} (x, v, , x) n, s = {ADD_NORM} (x, p, row) y = {LINEAR} (n, w)",
    f"n = {NORM} (x, row) y = {LINEAR} <rms_eps = 0.5> (n, w)",  # it norms what it reads already
    f"p = {LINEAR} (x, v) n, s = {ADD_NORM} (p, p, row) y = {LINEAR} (n, w)",
    f"n = {NORM} (x, large) y = {LINEAR} (n, w)",
    f"n = {NORM} (x, small) y = {LINEAR} (n, w)",  # numbers that fp16 does not have
]
OUTPUTS = [  # where n is one, too
    f"n = {NORM} (x, row) y = {LINEAR} (n, w)",
    f"p = {LINEAR} (x, v) m, n = {ADD_NORM} (x, p, row) y = {LINEAR} (m, w)",
]


@pytest.mark.parametrize(("text", "more"), [*((t, "") for t in STAYS), *((t, "n") for t in OUTPUTS)])
def test_norms_that_stay(text: str, more: str) -> None:
    outputs = "float16[M, 64] y" + (", float16[M, 64] n" if more else "")
    model = normed(text, outputs, large=np.full(64, 6e4), small=np.full(64, 2e-5))
    assert not fused(model)
    assert all(g.attribute(node, "rms_eps", 0.5) == 0.5 for node in nodes(model, "CustomLinear"))


def test_a_sum_that_nothing_reads() -> None:
    text = f"p = {LINEAR} (x, v) n = {ADD_NORM} (x, p, row) y = {LINEAR} (n, w)"
    assert fused(normed(text))["norms in matmuls"] == 1


@pytest.mark.parametrize("attribute", ["rms_eps = 0.5", "invariant = 1", "few_rows = 64"])
def test_products_that_are_more_than_sums_are_not_merged(attribute: str) -> None:
    text = f"y = {LINEAR} <{attribute}> (x, w) z = {LINEAR} <{attribute}> (x, v)"
    text = f"(float[2, 64] x) => (float[2, 64] y, float[2, 64] z) {{ {text} }}"
    proto = parsed(text, w=weights(64, 64), v=weights(64, 64))
    assert types(rewritten(proto, merge_linear.MergeLinear)) == {"CustomLinear": 2}
