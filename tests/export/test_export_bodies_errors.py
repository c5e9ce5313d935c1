"""Tests the refusal of bodies and of models that cannot get them, each with its message."""

from typing import Any

import onnx
import onnx_ir as ir
import pytest
import torch
from export_models import model_of
from onnx import helper
from samples import RECORDS

from twinop.errors import ExportError
from twinop.export import DefaultInput, attach_bodies, body
from twinop.model.bodies import Body
from twinop.model.calls import find_calls
from twinop.record.op_spec import DOMAIN
from twinop.record.schema_text import record_of
from twinop.testing.one_node import body_session


def with_body(monkeypatch: pytest.MonkeyPatch, name: str, build: Any, **defaults: DefaultInput) -> None:
    from twinop.model import bodies

    monkeypatch.setitem(bodies.BODIES, name, Body(build, defaults))


def attach(
    *nodes: str, inputs: str = "float[N, 3] x", records: Any = None, **options: Any
) -> onnx.ModelProto:
    return attach_bodies(model_of(list(nodes), inputs, **options), records or RECORDS)


def test_a_value_needed_in_python_must_be_one_for_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    record = record_of("twice(Tensor x, int times=2) -> Tensor", DOMAIN)

    def twice(op: Any, x: Any, *, times: Any) -> Any:
        for _ in range(times.value):
            x = op.Add(x, x)
        return x

    with_body(monkeypatch, "twice", twice)
    node = f"p = {DOMAIN}.CustomTwice<times = 3>(x)"
    attached = attach(node, f"q = {DOMAIN}.CustomTwice<times = 3>(p)", records={"twice": record})
    assert body_session(attached).run({"x": torch.ones(1, 3)})["p"][0, 0] == 8
    with pytest.raises(
        ExportError, match=r"needs one value of times .* 3 in node p, 2 in node q.*bodies=False"
    ):
        attach(node, f"q = {DOMAIN}.CustomTwice(x)", records={"twice": record})


def test_an_attribute_used_as_a_python_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    record = record_of("twice(Tensor x, int times=2) -> Tensor", DOMAIN)
    with_body(monkeypatch, "twice", lambda op, x, *, times: op.Mul(x, x) if times == 2 else x)
    with pytest.raises(ExportError, match=r"times is used as a Python value.*Write times\.value"):
        attach(f"p = {DOMAIN}.CustomTwice(x)", records={"twice": record})


def test_mixed_presence_without_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such nodes call overloads of the function, which IR 10 has; alike nodes need none."""
    record = record_of("maybe(Tensor x, Tensor? w=None) -> Tensor", DOMAIN)
    with_body(monkeypatch, "maybe", lambda op, x, w: op.Identity(x) if w is None else op.Mul(x, w))
    nodes = [f"p = {DOMAIN}.CustomMaybe(x)", f"q = {DOMAIN}.CustomMaybe(x, p)"]
    mixed = attach(*nodes, records={"maybe": record})
    assert {function.overload for function in mixed.functions} == {"", "x,w"} and mixed.ir_version >= 10
    assert body_session(mixed).run({"x": torch.full((1, 3), 3.0)})["q"][0, 0] == 9
    for node in (nodes[0], nodes[1].replace("p)", "x)")):
        assert [function.overload for function in attach(node, records={"maybe": record}).functions] == [""]


def test_a_body_that_does_not_fit_its_record(monkeypatch: pytest.MonkeyPatch) -> None:
    record = record_of("scale(Tensor x, float by=1.0) -> Tensor", DOMAIN)
    call = f"p = {DOMAIN}.CustomScale(x)"
    for build, message in (
        (lambda op, x: x, r"does not fit the op scale.*expected def scale\(op, x, \*, by\)"),
        (lambda op, x, *, factor: x, r"does not fit the op"),
        (lambda op, y, *, by: y, r"does not fit the op"),
        (lambda op, x, *, by: op.Frobnicate(x), r"opset 20 has no operator Frobnicate"),
        (lambda op, x, *, by: op.Upsample(x, x), r"opset 20 has no operator Upsample"),  # deprecated
        (lambda op, x, *, by: (x, x), r"expected 1 tensors: y"),
        (lambda op, x, *, by: None, r"expected 1 tensors: y"),
    ):
        with_body(monkeypatch, "scale", build)
        with pytest.raises(ExportError, match=message):
            attach(call, records={"scale": record})
    with_body(monkeypatch, "scale", lambda op, x, *, by: op.Mul(x, by), weight=DefaultInput(1))
    with pytest.raises(ExportError, match=r"defaults names weight; the optional inputs .* are: none"):
        attach(call, records={"scale": record})


def test_an_op_has_one_body() -> None:
    def relu(op: Any, x: Any) -> Any:
        return x

    with pytest.raises(ExportError, match=r"op relu has a body already, from twinop\.model\.bodies\.relu"):
        body(relu)


def test_an_op_without_body() -> None:
    record = record_of("plain(Tensor x) -> Tensor", DOMAIN)
    with pytest.raises(ExportError, match=r"op plain has no function body.*bodies\.py.*bodies=False"):
        attach(f"p = {DOMAIN}.CustomPlain(x)", records={"plain": record})
    model = model_of([f"p = {DOMAIN}.CustomPlain(x)"], "float[N] x")
    assert not attach_bodies(model, {"plain": record}, allow_missing=True).functions


@pytest.mark.parametrize(
    ("node", "inputs", "message"),
    [
        ("CustomNothing(x)", "float[2] x", r"CustomNothing, which no loaded library has"),
        ("CustomRelu(x)", "int64[2] x", r"no kernel for these dtypes: x is int64\. It takes: float32"),
        ("CustomRelu(x)", "int8[2] x", r"no kernel for these dtypes: x is int8"),
        ('CustomGelu<aproximate = "tanh">(x)', "float[2] x", r"unknown attribute aproximate; did you mean"),
        ("CustomGelu<approximate = 1>(x)", "float[2] x", r"approximate is INT, expected STRING \(str\)"),
        ("CustomRelu(x, x)", "float[2] x", r"2 inputs; it takes 1 \(x\)"),
        ('CustomPadAffine("", x)', "float[2] x", r"input x is absent"),
        ("CustomPadAffine(x, w)", "float[2] x, double[2] w", r"x is float32, weight is float64"),
        ("CustomRelu(h) h = Foo.Bar(x)", "float[2] x", r"type of input x \(h\) is not known"),
    ],
)
def test_nodes_that_do_not_fit_their_record(node: str, inputs: str, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        attach(f"p = {DOMAIN}.{node}", inputs=inputs)


def test_empty_list_and_missing_attribute() -> None:
    record = record_of("listed(Tensor x, int[] n=[1]) -> Tensor", DOMAIN)
    for given in ({}, {"n": helper.make_attribute("n", [], attr_type=onnx.AttributeProto.INTS)}):
        model = model_of([f"p = {DOMAIN}.CustomListed(x)"], "float[2] x")
        model.graph.node[0].attribute.extend(given.values())
        [[call]] = find_calls(ir.from_proto(model), {"listed": record}).values()
        assert call.attributes == {"n": () if given else (1,)}
    record = record_of("need(Tensor x, int n) -> Tensor", DOMAIN)
    with pytest.raises(ExportError, match=r"attribute n \(int\) is missing and has no default"):
        attach(f"p = {DOMAIN}.CustomNeed(x)", records={"need": record})


@pytest.mark.parametrize("opset", [18, 19, 26])
def test_opsets_without_bodies(opset: int) -> None:
    with pytest.raises(ExportError, match=rf"opset {opset}; function bodies need 20 to 25"):
        attach(f"p = {DOMAIN}.CustomRelu(x)", opset=opset)
