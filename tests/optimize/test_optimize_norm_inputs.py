"""Tests that a sum and the norm after it become one node without a change of bits, where this is allowed."""

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from export_models import CPU
from optimizing import nodes, optimized, parsed, types, weights

from twinop import deploy
from twinop.export import attach_bodies

NORMS = {"CustomLayerNorm": "CustomAddLayerNorm", "CustomRmsNorm": "CustomAddRmsNorm"}
each_norm = pytest.mark.parametrize("norm", NORMS)
MODEL = "(KIND[N, 4, 16] x, KIND[N, 4, 16] r%s) => (KIND[N, 4, 16] y%s) { %s }"
PAIR = "s = Add (x, r) y = custom_domain.NORM <eps=0.001> (s, w)"


def model(norm: str, body: str, kind: str = "float", given: str = "", made: str = "") -> onnx.ModelProto:
    text = (MODEL % (given, made, body)).replace("KIND", kind).replace("NORM", norm)
    numpy = {"float": np.float32, "float16": np.float16, "double": np.float64}[kind]
    constants = {"w": weights(16), "b": weights(16, seed=1), "square": weights(4, 16)}
    return parsed(text, **{name: array.astype(numpy) for name, array in constants.items()})


@pytest.mark.parametrize(
    ("norm", "kind", "add"),
    [
        ("CustomLayerNorm", "float", "Add"),
        ("CustomRmsNorm", "float16", "custom_domain.CustomAdd"),
        ("CustomLayerNorm", "double", "Add"),
    ],
)
def test_no_bit_changes(norm: str, kind: str, add: str, tmp_path: Path) -> None:
    body = PAIR.replace("Add (", f"{add} (")
    proto = attach_bodies(model(norm, body, kind, made=", KIND[N, 4, 16] s"))
    _, made = optimized(proto, tmp_path)
    assert types(made) == {NORMS[norm]: 1}
    kinds = {"float": torch.float32, "float16": torch.float16, "double": torch.float64}
    feeds = {name: torch.randn(3, 4, 16, dtype=torch.float64).to(kinds[kind]) for name in "xr"}
    expected, found = (deploy.session(tmp_path / f"{name}.onnx", CPU).run(feeds) for name in ("old", "fast"))
    assert list(found) == ["y", "s"] and all(torch.equal(found[name], expected[name]) for name in expected)


@each_norm
def test_a_sum_that_nothing_reads_is_not_written(norm: str, tmp_path: Path) -> None:
    """The node and its function omit it, unless another node of the op needs it."""
    for made in ("", ", KIND[N, 4, 16] s"):
        optimized(model(norm, PAIR, made=made), tmp_path)
        proto = onnx.load(tmp_path / "fast.onnx")
        assert [len(each.output) for each in (proto.graph.node[0], proto.functions[0])] == [
            1 + bool(made)
        ] * 2


@each_norm
def test_other_readers_of_the_sum(norm: str, tmp_path: Path) -> None:
    """A node before the norm, a second norm and the graph read the sum; a weight is made between the two."""
    body = """s = Add (x, r) n = Neg (s) v = Abs (raw) o = custom_domain.NORM (s, w) z = Neg (o)
        y = custom_domain.NORM (s, v)"""
    made = "".join(f", float[N, 4, 16] {name}" for name in "nzs")
    _, fast = optimized(model(norm, body, given=", float[16] raw", made=made), tmp_path)
    assert types(fast) == {"Neg": 2, "Abs": 1, norm: 1, NORMS[norm]: 1}  # the sum is made once


STAYS = {
    "a bias": "s = Add (x, b) y = custom_domain.NORM (s, w) q = Neg (r)",
    "no weight": "s = Add (x, r) y = custom_domain.NORM (s)",
    "not the last dimension alone": "s = Add (x, r) y = custom_domain.NORM <axis=1> (s, square)",
    "not a sum": "s = Mul (x, r) y = custom_domain.NORM (s, w)",
}


@pytest.mark.parametrize(("norm", "body"), zip([*NORMS] * 2, STAYS.values(), strict=True), ids=list(STAYS))
def test_what_stays_apart(norm: str, body: str, tmp_path: Path) -> None:
    _, made = optimized(model(norm, body), tmp_path)
    assert nodes(made, norm) and not nodes(made, NORMS[norm])


@each_norm
def test_sizes_that_may_differ(norm: str, tmp_path: Path) -> None:
    proto = model(norm, PAIR)
    proto.graph.input[1].type.tensor_type.shape.dim[0].dim_param = "M"
    _, made = optimized(proto, tmp_path)
    assert nodes(made, norm) and not nodes(made, NORMS[norm])


def test_weights_in_fp32_beside_rows_in_16_bits(tmp_path: Path) -> None:
    """The fused op takes them as the norm does; an attribute of the norm stays."""
    proto = model("CustomRmsNorm", PAIR.replace("eps=0.001", "axis=2, offset=1"), "float16")
    _, made = optimized(proto, tmp_path)
    [fused] = made.graph
    assert fused.op_type == "CustomAddRmsNorm" and fused.attributes.get_int("offset", 0) == 1
