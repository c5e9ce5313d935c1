"""Our ops pass ONNX's node tests. Each test replaces the node with our op and runs it in ONNX Runtime.

The inputs and outputs come from the onnx package (`onnx.backend.test`).
"""

import importlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.backend.test.case import node as node_cases
from samples import RECORDS, library_of

from twinop.op_spec import DOMAIN, DOMAIN_VERSION
from twinop.testing.one_node import make_session

# Maps an ONNX operator to our op, and its attribute names to ours.
OPS: dict[str, tuple[str, dict[str, str]]] = {
    "Relu": ("relu", {}),
    "Gelu": ("gelu", {"approximate": "approximate"}),
    "Softmax": ("softmax", {"axis": "dim"}),
    "LayerNormalization": ("layer_norm", {"axis": "axis", "epsilon": "eps"}),
    "RMSNormalization": ("rms_norm", {"axis": "axis", "epsilon": "eps"}),
    "Swish": ("silu", {}),
    "Sigmoid": ("sigmoid", {}),
    "Tanh": ("tanh", {}),
    "Softplus": ("softplus", {}),
    "Exp": ("exp", {}),
    "Log": ("log", {}),
    "Add": ("add", {}),
    "Mul": ("mul", {}),
    "Pow": ("pow", {}),
}
# Attributes that our ops do not have, each with the only value that our ops support.
FIXED: dict[str, dict[str, Any]] = {
    "Swish": {"alpha": 1.0},
    "RMSNormalization": {"stash_type": 1},
    "LayerNormalization": {"stash_type": 1},
}
# ONNX's defaults where they differ from ours.
DEFAULTS: dict[str, dict[str, Any]] = {"RMSNormalization": {"epsilon": 1e-5}}

INTEGERS = "integers: twinop's ops are for floating types"
MIXED = "operands of two types: ours are of one"


def of_one_node(cases: Iterable[Any]) -> dict[str, Any]:
    """Returns by name the cases whose model is one node of the operators above."""
    return {
        case.name: case
        for case in cases
        if [n.op_type for n in case.model.graph.node] in [[op] for op in OPS]
    }


def onnx_cases() -> dict[str, Any]:
    """Loads only the files of these operators. test_no_case_is_missed loads all files."""
    for op_type in OPS:
        importlib.import_module(f"onnx.backend.test.case.node.{op_type.lower()}")
    return of_one_node(node_cases._NodeTestCases)


CASES = onnx_cases()


def attributes_of(node: onnx.NodeProto) -> dict[str, Any]:
    given = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    return DEFAULTS.get(node.op_type, {}) | given


def reason(model: onnx.ModelProto) -> str:
    """Returns why our op cannot replace the node, or ""."""
    node = model.graph.node[0]
    types = [value.type.tensor_type.elem_type for value in model.graph.input]
    floating = [
        t in (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE) for t in types
    ]
    if not any(floating):
        return INTEGERS
    if len(set(types)) > 1:
        return MIXED
    fixed = FIXED.get(node.op_type, {})
    unknown = set(attributes_of(node)) - set(OPS[node.op_type][1]) - set(fixed)
    assert not unknown, f"{node.op_type} has attributes {unknown}"
    for name, value in fixed.items():
        if attributes_of(node).get(name, value) != value:
            return f"{name} is not {value}"
    return ""


def replaced(model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns the model with our node instead of the operator. Only the first output is kept."""
    node = model.graph.node[0]
    name, names = OPS[node.op_type]
    attributes = {names[key]: value for key, value in attributes_of(node).items() if key in names}
    ours = helper.make_node(RECORDS[name].onnx_name, node.input, node.output[:1], domain=DOMAIN, **attributes)
    graph = helper.make_graph([ours], model.graph.name, model.graph.input, model.graph.output[:1])
    imports = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, DOMAIN_VERSION)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


@pytest.mark.slow  # generates the cases of all operators
@pytest.mark.filterwarnings("ignore")  # other operators' cases warn while they are generated
def test_no_case_is_missed() -> None:
    assert set(of_one_node(node_cases.collect_testcases())) == set(CASES)


TAKEN = [name for name, case in CASES.items() if not reason(case.model)]


def test_every_operator_has_cases() -> None:
    assert {CASES[name].model.graph.node[0].op_type for name in TAKEN} == set(OPS)
    assert len(TAKEN) >= 70  # as many as onnx 1.23.2 has


@pytest.mark.parametrize("name", TAKEN)
def test_case(name: str) -> None:
    case = CASES[name]
    record = RECORDS[OPS[case.model.graph.node[0].op_type][0]]
    session = make_session(replaced(case.model), library_of(record), "cpu")
    for inputs, outputs in case.data_sets:
        arrays = [numpy_helper.to_array(t) if isinstance(t, onnx.TensorProto) else t for t in inputs]
        feeds = {value.name: array for value, array in zip(case.model.graph.input, arrays, strict=True)}
        (found,) = session.run(None, feeds)
        expected = outputs[0]
        expected = numpy_helper.to_array(expected) if isinstance(expected, onnx.TensorProto) else expected
        assert found.dtype == expected.dtype
        np.testing.assert_allclose(found, expected, rtol=case.rtol, atol=case.atol)
        assert found.shape == expected.shape
