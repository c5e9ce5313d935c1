"""Tests that function bodies compute what the kernels compute, with each node's own attributes."""

from typing import Any

import numpy as np
import onnx
import pytest
import torch
from export_models import model_of
from samples import RECORDS

from twinop.errors import ExportError
from twinop.export import DefaultInput, attach_bodies, body
from twinop.model.bodies import Body
from twinop.model.schema import registered_schemas
from twinop.record.op_spec import DOMAIN
from twinop.record.schema_text import record_of
from twinop.testing.one_node import body_session

OPSETS = (20, 23, 24, 25)


@pytest.mark.parametrize("opset", OPSETS)
def test_a_bare_model_gets_bodies_and_passes_the_checker(opset: int) -> None:
    """The model has types for its inputs only, an absent input before a given one, and no default values."""
    model = model_of(
        [
            f'h = {DOMAIN}.CustomPadAffine<pads = [1, 2], sign = "plus", scale = 0.1>(x, "", b)',
            f"d, t = {DOMAIN}.CustomDoubleAndSum(h)",
        ],
        "float[N, 4] x, float[4] b",
        opset,
    )
    before = model.SerializeToString()
    attached = attach_bodies(model, RECORDS)
    assert model.SerializeToString() == before  # the caller's model is the caller's
    with registered_schemas(RECORDS.values()):
        attached = onnx.shape_inference.infer_shapes(attached, strict_mode=True)
    onnx.checker.check_model(attached, full_check=True)
    versions = {f.name: f.opset_import[0].version for f in attached.functions}
    assert versions == dict.fromkeys(("CustomPadAffine", "CustomDoubleAndSum"), opset)
    assert {a.name for a in attached.graph.node[0].attribute} == {"pads", "scale", "sign"}  # defaults, too
    x, b = torch.randn(3, 4), torch.randn(4)
    h, d, t = body_session(attached).run({"x": x, "b": b}).values()
    wanted = torch.nn.functional.pad(x * float(np.float32(0.1)) + b, (1, 2))
    torch.testing.assert_close(h, wanted)
    torch.testing.assert_close(d, 2 * wanted)
    torch.testing.assert_close(t, wanted.sum(-1))
    dims = [[d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in attached.graph.output]
    assert dims == [["N", 7], ["N", 7], ["N"]]


def test_nodes_in_subgraphs_and_unlisted_outputs() -> None:
    branch = f"then_branch = t () => (float[N, 3] a) {{ a, u = {DOMAIN}.CustomDoubleAndSum(x) }}"
    other = "else_branch = e () => (float[N, 3] b) { b = Identity(x) }"
    text = f'''<ir_version: 10, opset_import: ["": 20, "{DOMAIN}": 1]>
        g (bool c, float[N, 3] x) => (float[N, 3] y) {{ y = If <{branch}, {other}> (c) }}'''
    model = onnx.parser.parse_model(text)
    inner = model.graph.node[0].attribute[0].g.node[0]
    inner.output.pop()  # a caller of a function must list all of them
    attached = attach_bodies(model, RECORDS)
    onnx.checker.check_model(attached, full_check=True)
    x = torch.randn(2, 3)
    (found,) = body_session(attached).run({"c": torch.tensor(True), "x": x}).values()
    assert torch.equal(found, 2 * x)


def with_body(monkeypatch: pytest.MonkeyPatch, name: str, build: Any, **defaults: DefaultInput) -> None:
    from twinop.model import bodies

    monkeypatch.setitem(bodies.BODIES, name, Body(build, defaults))


def attach(*nodes: str, inputs: str = "float[N, 3] x", records: Any = None, **more: Any) -> onnx.ModelProto:
    return attach_bodies(model_of(list(nodes), inputs, **more), records or RECORDS)


def test_a_value_needed_in_python_may_vary_in_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is a branch for each value, in halves: protobuf reads up to 32 graphs in each other."""
    record = record_of("twice(Tensor x, int times=2, int[] of=[1]) -> Tensor", DOMAIN)

    def twice(op: Any, x: Any, *, times: Any, of: Any) -> Any:
        for _ in range(times.value + of.value[0] - 1):
            x = op.Add(x, x)
        return x

    with_body(monkeypatch, "twice", twice)
    nodes = [f"p{n} = {DOMAIN}.CustomTwice<times = {n}>(x)" for n in range(40)]
    found = body_session(attach(*nodes, records={"twice": record})).run({"x": torch.ones(1, 3)})
    assert [y[0, 0] for y in found.values()] == [2**n for n in range(40)]
    with pytest.raises(ExportError, match=r"takes of\.value.*Name them.*limits=\"of in 1 | 2\""):
        attach(*nodes, f"q = {DOMAIN}.CustomTwice<of = [2]>(x)", records={"twice": record})
    record = record_of("scale(Tensor x, float by=1.0) -> Tensor", DOMAIN)
    with_body(monkeypatch, "scale", lambda op, x, *, by: op.Mul(x, by.value))
    with pytest.raises(ExportError, match="more values than it could have branches for"):  # Equal has no NaN
        attach(
            *(f"p{n[0]} = {DOMAIN}.CustomScale<by = {n}>(x)" for n in ("1.0", "nan")),
            records={"scale": record},
        )


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
        ('CustomGelu<aproximate = "tanh">(x)', "float[2] x", r"unknown attribute aproximate; did you mean"),
        ("CustomRelu(h) h = Foo.Bar(x)", "float[2] x", r"type of input x \(h\) is not known"),
    ],
)
def test_nodes_that_do_not_fit_their_record(node: str, inputs: str, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        attach(f"p = {DOMAIN}.{node}", inputs=inputs)


@pytest.mark.parametrize("opset", [18, 19, 26])
def test_opsets_without_bodies(opset: int) -> None:
    with pytest.raises(ExportError, match=rf"opset {opset}; function bodies need 20 to 25"):
        attach(f"p = {DOMAIN}.CustomRelu(x)", opset=opset)
