"""Tests of attention over few tokens, which twinop's own op computes from packed q, k and v."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from export_models import CPU
from optimizing import nodes, optimized, parsed, types, weights

from lab.model_zoo import Size, batch, encoder
from twinop import deploy
from twinop.bench.cases import relative_error
from twinop.deploy.tensor_specs import RIGHT_PADDED
from twinop.export import export

SMALL = Size(layers=2, width=64, heads=2, vocabulary=101, batch=2, tokens=16)
DTYPES = ["float16", "bfloat16"]
PROVIDERS: dict[str, list[Any]] = {"cpu": CPU, "cuda": ["CUDAExecutionProvider", *CPU]}


def bert(size: Size) -> torch.nn.Module:
    return encoder("bert", size, "sdpa")


def made(size: Size, folder: Path, fixed: bool = True, **options: Any) -> tuple[Any, ir.Model]:
    path = folder / "bert.onnx"
    dynamic = None if fixed else {name: {0: "batch"} for name in ("ids", "mask")}
    given: dict[str, Any] = {"exporter": "torchscript", "verify": False, "optimize": False}
    given["dynamic"] = dynamic
    export(bert(size), batch(size, padding=5), path, **given)
    return optimized(path, folder, **options)


# ONNX Runtime's CPU provider has no Where in bfloat16.
@pytest.mark.parametrize(
    ("device", "dtype"),
    [("cpu", "float16"), *(pytest.param("cuda", each, marks=pytest.mark.cuda) for each in DTYPES)],
)
@pytest.mark.parametrize("padding", ["right", pytest.param(None, marks=pytest.mark.slow)])
def test_short_sequences(dtype: str, padding: str | None, device: str, tmp_path: Path) -> None:
    report, model = made(SMALL, tmp_path, dtype=dtype, padding=padding)
    assert report.fused["attention of packed q, k and v"] == SMALL.layers
    attentions = nodes(model, "CustomAttentionPacked")
    assert len(attentions) == SMALL.layers
    assert len({node.inputs[1] for node in attentions}) == 1  # one bias for all layers
    assert not {"MultiHeadAttention", "Split", "ReduceSum"} & types(model).keys()
    assert RIGHT_PADDED not in model.metadata_props  # the mask itself is added: no promise is needed
    ids, mask = batch(SMALL, padding=5)
    mask[0, ::3] = 0
    [y] = deploy.session(report.path, PROVIDERS[device]).run({"ids": ids, "mask": mask}).values()
    with torch.no_grad():
        expected = bert(SMALL)(ids, mask).double()
    shown = mask.bool()
    assert relative_error(y[shown], expected[shown]) < (1e-2 if dtype == "float16" else 8e-2)


LENGTHS = """(float[2, 8, 64] x, int64[%s] m) => (float[2, 8, 64] y) {
    p = MatMul (x, w) q, k, v = Split <axis=-1, num_outputs=3> (p) n = Cast <to=6> (m)
    t = ReduceSum <keepdims=0> (n, axes)
    y = com.microsoft.MultiHeadAttention <num_heads=2> (q, k, v, , t) }"""


WINDOWS = """(float[B, 49, 64] x) => (float[B, 49, 64] y) {
    a = MatMul (x, v) q = Add (a, p) b = MatMul (x, w) k = Add (b, p) c = MatMul (x, u) v_ = Add (c, p)
    s = com.microsoft.MultiHeadAttention <num_heads=2> (q, k, v_, , , bias)
    y = com.microsoft.MultiHeadAttention <num_heads=2> (s, s, s) }"""


@pytest.mark.parametrize(
    ("change", "options", "wanted"),
    [
        ({}, {}, 1),
        (
            {"MatMul (x, w)": "MatMul (z, w)", "a = MatMul": "z = Neg (x) a = MatMul"},
            {},
            0,
        ),  # of another tensor
        ({}, {"dtype": None}, 0),  # fp32 has no tensor cores
        ({}, {"device": "cpu"}, 0),
        ({}, {"without": ["packed_attention"]}, 0),
        ({"49": "65"}, {}, 0),  # faster in small batches only
        ({"heads=2": "heads=4"}, {}, 0),  # of 16
        ({"49": "512"}, {}, 0),  # too many
    ],
    ids=str,
)
def test_products_of_one_tensor_are_merged(
    change: dict[str, str], options: dict[str, Any], wanted: int, tmp_path: Path
) -> None:
    """Swin's windows: any number of them, and a bias for each head. Others stay ONNX Runtime's."""
    text = WINDOWS
    for old, new in change.items():
        text = text.replace(old, new)
    tokens, heads = int(change.get("49", "49")), 4 if "heads=4" in text else 2
    values = {name: weights(64, 64) for name in "uvw"} | {"bias": weights(1, heads, tokens, tokens)}
    given: dict[str, Any] = {"dtype": "float16"} | options
    report, model = optimized(parsed(text, p=weights(64), **values), tmp_path, **given)
    assert report.fused.get("attention of packed q, k and v", 0) == wanted
    assert len(nodes(model, "CustomAttentionPacked")) == wanted
    assert len(nodes(model, "MultiHeadAttention")) == 2 - wanted  # q, k and v of the other are one tensor
    if given["device" if "device" in given else "dtype"] == "float16":
        assert len(nodes(model, "CustomLinear")) == (1 if wanted else 3)


def test_shared_weights_are_merged_once(tmp_path: Path) -> None:
    """The layers of ALBERT have the same weights."""
    text = """(float[B, 8, 64] x) => (float[B, 8, 64] z) {
        q = MatMul (x, u) k = MatMul (x, v) w_ = MatMul (x, w)
        y = com.microsoft.MultiHeadAttention <num_heads=2> (q, k, w_)
        a = MatMul (y, u) b = MatMul (y, v) c = MatMul (y, w)
        z = com.microsoft.MultiHeadAttention <num_heads=2> (a, b, c) }"""
    _, model = optimized(parsed(text, **{name: weights(64, 64) for name in "uvw"}), tmp_path, dtype="float16")
    first, second = nodes(model, "CustomLinear")
    assert first.inputs[1] is second.inputs[1]


def test_attention_with_a_bias_and_without(tmp_path: Path) -> None:
    """A bias of zeros takes the place of a missing one, so that one body serves all."""
    text = """(float[B, 8, 64] x) => (float[B, 8, 64] y, float[B, 8, 64] z) {
        a = MatMul (x, w) q, k, v = Split <axis=-1, num_outputs=3> (a)
        b = MatMul (x, u) q_, k_, v_ = Split <axis=-1, num_outputs=3> (b)
        y = com.microsoft.MultiHeadAttention <num_heads=2> (q, k, v, , , bias)
        z = com.microsoft.MultiHeadAttention <num_heads=2> (q_, k_, v_) }"""
    proto = parsed(text, w=weights(64, 192), u=weights(64, 192), bias=weights(1, 2, 8, 8))
    _, model = optimized(proto, tmp_path, dtype="float16")
    assert [len(node.inputs) for node in nodes(model, "CustomAttentionPacked")] == [2, 2]


@pytest.mark.parametrize(("sizes", "axis"), [("2, 8", 1), ("2, 4", 1), ("8, 2", 0)])
def test_lengths_of_the_models_own_stay(sizes: str, axis: int, tmp_path: Path) -> None:
    """They count tokens from the first one, wherever they come from."""
    proto = parsed(LENGTHS % sizes, w=weights(64, 192), axes=np.array([axis]))
    _, model = optimized(proto, tmp_path, dtype="float16")
    assert not nodes(model, "CustomAttentionPacked")
    assert len(nodes(model, "MultiHeadAttention")) == 1
