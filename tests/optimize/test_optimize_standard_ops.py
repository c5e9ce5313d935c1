"""Tests that standard operators become twinop's nodes where the user asks for it."""

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from export_models import CPU
from optimizing import optimized, parsed, types
from other_sizes import assert_same

from twinop import deploy
from twinop.errors import ExportError
from twinop.libraries.library import find_library, read_library
from twinop.optimize import optimize
from twinop.optimize.standard_ops import standard_node

RECORDS = read_library(find_library("custom_ops")).records
STANDARD = {
    "add": "Add", "mul": "Mul", "pow": "Pow", "softmax": "Softmax", "gelu": "Gelu", "sigmoid": "Sigmoid",
    "tanh": "Tanh", "softplus": "Softplus", "exp": "Exp", "log": "Log",
}  # fmt: skip


def test_the_standard_operators_are_read_off_the_bodies() -> None:
    found = {name: standard_node(record) for name, record in RECORDS.items()}
    assert {name: standard.op_type for name, standard in found.items() if standard} == STANDARD


@pytest.mark.parametrize("op", sorted(STANDARD))
def test_each_operator_computes_the_same(op: str, tmp_path: Path) -> None:
    given = "a, b" if len(RECORDS[op].inputs) == 2 else "a"
    options = {"softmax": "<axis=0>", "gelu": '<approximate="tanh">'}.get(op, "")
    text = "(float[N, 1, 5] a, float[4, 1] b) => (float[N, M, 5] y) { t = Abs (a)"
    text += f" y = {STANDARD[op]} {options} ({given.replace('a', 't')}) n = Neg (b) }}"
    _, model = optimized(parsed(text), tmp_path, replace=[op], without=["activation"])
    assert types(model)[RECORDS[op].onnx_name] == 1 and STANDARD[op] not in types(model)
    assert_same(tmp_path, a=(3, 1, 5), b=(4, 1))
    feeds = {"a": torch.rand(3, 1, 5) + 0.5, "b": torch.rand(4, 1)}
    expected = deploy.session(tmp_path / "old.onnx", CPU).run(feeds)["y"]
    without = deploy.session(tmp_path / "fast.onnx", CPU, library=False).run(feeds)["y"]
    torch.testing.assert_close(without, expected)


def test_a_softmax_and_sums_of_functions(tmp_path: Path) -> None:
    """A sum that a norm reads is fused with it, integer sums stay, and so does what is not asked for."""
    text = """(float[N, 4] x, float[N, 4] m, int64[N] i) => (float[N, 4] y, float[N, 4] z, int64[N] j) {
        a = Add (x, m) s = Softmax <axis=-1> (a) b = Add (s, one) y = Relu (b)
        c = Add (x, b) z = custom_domain.CustomLayerNorm (c, w) j = Add (i, i) }"""
    constants = {"one": np.array(1, np.float32), "w": np.ones(4, np.float32)}
    report, model = optimized(parsed(text, **constants), tmp_path, replace=["add", "softmax"])
    assert report.fused == {"add": 2, "softmax": 1, "add_layer_norm": 1}
    kinds = {"CustomAdd": 2, "CustomSoftmax": 1, "Relu": 1, "CustomAddLayerNorm": 1, "Add": 1}
    assert types(model) == kinds


@pytest.mark.parametrize("op", ["relu", "nothing"])
def test_an_op_without_a_standard_operator_is_refused(op: str, tmp_path: Path) -> None:
    onnx.save(parsed("(float[N] x) => (float[N] y) { y = Relu (x) }"), tmp_path / "in.onnx")
    message = f"twinop has no op '{op}' that replaces a standard operator; expected one of: add"
    with pytest.raises(ExportError, match=message):
        optimize(tmp_path / "in.onnx", tmp_path / "out.onnx", replace=[op])
