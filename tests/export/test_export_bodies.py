"""Tests that function bodies compute what the kernels compute, with each node's own attributes."""

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from export_models import model_of
from onnx import helper
from samples import RECORDS, values

from twinop.errors import ExportError
from twinop.export import DefaultInput, attach_bodies, body
from twinop.model.bodies import Body
from twinop.model.calls import find_calls
from twinop.model.schema import registered_schemas
from twinop.record.op_spec import DOMAIN
from twinop.record.schema_text import record_of
from twinop.record.tolerance import same_bits
from twinop.testing.one_node import body_session, one_node_model

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


def test_norms_with_and_without_weights_in_one_model() -> None:
    """The default weight depends on the node's axis and offset."""
    nodes = [
        f"p = {DOMAIN}.CustomLayerNorm<axis = 1>(x, w)",
        f'q = {DOMAIN}.CustomLayerNorm<axis = 1>(x, "", w)',
        f"r = {DOMAIN}.CustomLayerNorm<axis = -1>(x)",
        f"s = {DOMAIN}.CustomRmsNorm<axis = 1, offset = 1>(x, w)",
        f"t = {DOMAIN}.CustomRmsNorm<offset = 1>(x)",
        f"u = {DOMAIN}.CustomRmsNorm(x)",
    ]
    attached = attach_bodies(model_of(nodes, "float16[N, 3, 4] x, float[3, 4] w"), RECORDS)
    x, w = torch.randn(2, 3, 4).half(), torch.randn(3, 4)
    op = torch.ops.custom_domain
    expected = [
        op.layer_norm(x, w, None, 1),
        op.layer_norm(x, None, w, 1),
        op.layer_norm(x),
        op.rms_norm(x, w, 1, offset=1),
        op.rms_norm(x, offset=1),
        op.rms_norm(x),
    ]
    for found, wanted in zip(body_session(attached).run({"x": x, "w": w}).values(), expected, strict=True):
        torch.testing.assert_close(found, wanted)


def test_both_approximations_in_one_model() -> None:
    nodes = [f'p = {DOMAIN}.CustomGelu<approximate = "tanh">(x)', f"q = {DOMAIN}.CustomGelu(x)"]
    x = torch.randn(100)
    p, q = body_session(attach_bodies(model_of(nodes, "float[N] x"), RECORDS)).run({"x": x}).values()
    torch.testing.assert_close(p, torch.nn.functional.gelu(x, approximate="tanh"))
    torch.testing.assert_close(q, torch.nn.functional.gelu(x))
    attached = attach_bodies(model_of(nodes[:1], "double[N] x"), RECORDS)
    (found,) = body_session(attached).run({"x": x.double()}).values()
    torch.testing.assert_close(found, torch.nn.functional.gelu(x.double(), approximate="tanh"))


@pytest.mark.parametrize("norm", ["LayerNorm", "RmsNorm"])
def test_the_norm_sees_the_rounded_sum(norm: str) -> None:
    """The body has the bits of an addition followed by the norm, as the kernel has."""
    nodes = [f"y, s = {DOMAIN}.CustomAdd{norm}(x, r, w)", f"t = {DOMAIN}.CustomAdd(x, r)"]
    nodes.append(f"z = {DOMAIN}.Custom{norm}(t, w)")
    attached = attach_bodies(model_of(nodes, "bfloat16[N, 64] x, bfloat16[N, 64] r, bfloat16[64] w"), RECORDS)
    inputs = {name: torch.randn(5, 64).bfloat16() for name in "xr"} | {"w": torch.randn(64).bfloat16()}
    y, s, t, z = body_session(attached).run(inputs).values()
    assert same_bits(s, t) and same_bits(y, z)
    assert same_bits(s, inputs["x"] + inputs["r"])


def test_floats_are_narrowed_as_in_the_kernels() -> None:
    """The attribute 0.1 is fp32 in ONNX; an fp64 body must use the rounded number, as the kernels do."""
    record = RECORDS["pad_affine"]
    x = torch.full((1,), 1.0, dtype=torch.float64)
    model = one_node_model(record, record.combinations[3], [True, False, False], {})
    (found,) = body_session(attach_bodies(model, RECORDS)).run({"x": x}).values()
    assert found[0].item() == float(np.float32(0.1)) != 0.1
    assert torch.equal(found, torch.ops.custom_domain.pad_affine(x))


def test_mixed_presence_gets_default_inputs() -> None:
    pad = f"{DOMAIN}.CustomPadAffine"
    nodes = [f"p = {pad}(x, w)", f'q = {pad}(x, "", b)', f"r = {pad}(y)"]
    model = model_of(nodes, "float16[N, 4] x, float[4] w, float[4] b, float16[N, 6] y")
    attached = attach_bodies(model, RECORDS)
    custom = [node for node in attached.graph.node if node.domain == DOMAIN]
    assert [len(node.input) for node in custom] == [3, 3, 3] and all(all(node.input) for node in custom)
    inputs = {"x": values((3, 4), torch.float16, 1), "y": values((3, 6), torch.float16, 2)}
    weights = {"w": torch.randn(4), "b": torch.randn(4)}
    op = torch.ops.custom_domain.pad_affine
    expected = [op(inputs["x"], weights["w"]), op(inputs["x"], None, weights["b"]), op(inputs["y"])]
    for found, wanted in zip(body_session(attached).run(inputs | weights).values(), expected, strict=True):
        assert same_bits(found, wanted)


def test_one_body_for_several_dtypes() -> None:
    nodes = [f"{name} = {DOMAIN}.CustomRelu({source})" for name, source in ("px", "qy", "rp", "sz")]
    attached = attach_bodies(model_of(nodes, "float16[N] x, bfloat16[N] y, double[N] z"), RECORDS)
    kinds = {"x": torch.float16, "y": torch.bfloat16, "z": torch.float64}
    inputs = {name: values((65,), kind, seed) for seed, (name, kind) in enumerate(kinds.items(), 1)}
    results = body_session(attached).run(inputs).values()
    for found, source in zip(results, "xyxz", strict=True):
        assert same_bits(found, torch.ops.custom_domain.relu(inputs[source]))


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


def test_an_ir_model_is_changed_in_place() -> None:
    model = ir.from_proto(model_of([f"p = {DOMAIN}.CustomRelu(x)"], "float[2] x"))
    assert attach_bodies(model) is model
    assert [name for _, name, _ in model.functions] == ["CustomRelu"]


def test_models_share_no_function() -> None:
    """A body is traced once for calls that are alike; each model has it as its own."""
    texts = [f"p = {DOMAIN}.CustomPadAffine<scale = {scale}>(x)" for scale in ("0.0", "0.0", "-0.0")]
    found = [attach_bodies(ir.from_proto(model_of([text], "float[2] x"))).functions for text in texts]
    nodes = [{*function.all_nodes()} for each in found for function in each.values()]
    assert len({*nodes[0], *nodes[1], *nodes[2]}) == sum(map(len, nodes)) == 3 * len(nodes[0]) > 0
    [function] = found[0].values()
    function.outputs.pop()
    [again] = attach_bodies(ir.from_proto(model_of(texts[:1], "float[2] x"))).functions.values()
    assert len(again.outputs) == 1


def with_body(monkeypatch: pytest.MonkeyPatch, name: str, build: Any, **defaults: DefaultInput) -> None:
    from twinop.model import bodies

    monkeypatch.setitem(bodies.BODIES, name, Body(build, defaults))


def attach(*nodes: str, inputs: str = "float[N, 3] x", records: Any = None, **more: Any) -> onnx.ModelProto:
    return attach_bodies(model_of(list(nodes), inputs, **more), records or RECORDS)


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
    said = r"needs one value of times .* 3 in node p, 2 in node q.*bodies=False"
    with pytest.raises(ExportError, match=said):
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
        ('CustomGelu<aproximate = "tanh">(x)', "float[2] x", r"unknown attribute aproximate; did you mean"),
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
