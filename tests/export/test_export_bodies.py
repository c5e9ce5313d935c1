"""Tests that function bodies compute what the kernels compute, with each node's own attributes."""

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from export_models import model_of
from samples import RECORDS, values

from twinop import torch_op
from twinop.export import attach_bodies, export
from twinop.model.attach import inlined_nodes
from twinop.model.schema import registered_schemas
from twinop.record.op_spec import DOMAIN
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
    assert {f.name: f.opset_import[0].version for f in attached.functions} == {
        "CustomPadAffine": opset,
        "CustomDoubleAndSum": opset,
    }
    assert {a.name for a in attached.graph.node[0].attribute} == {"pads", "scale", "sign"}  # defaults, too
    x, b = torch.randn(3, 4), torch.randn(4)
    h, d, t = body_session(attached).run({"x": x, "b": b}).values()
    wanted = torch.nn.functional.pad(x * float(np.float32(0.1)) + b, (1, 2))
    torch.testing.assert_close(h, wanted)
    torch.testing.assert_close(d, 2 * wanted)
    torch.testing.assert_close(t, wanted.sum(-1))
    dims = {
        v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim]
        for v in attached.graph.output
    }
    assert dims == {"h": ["N", 7], "d": ["N", 7], "t": ["N"]}


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


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_the_norm_sees_the_rounded_sum(op: str) -> None:
    """The body of add_<norm> has the bits of an addition followed by <norm>, as the kernel has."""
    names = {
        "layer_norm": ("CustomAddLayerNorm", "CustomLayerNorm"),
        "rms_norm": ("CustomAddRmsNorm", "CustomRmsNorm"),
    }
    fused, norm = names[op]
    nodes = [
        f"y, s = {DOMAIN}.{fused}(x, r, w)",
        f"t = {DOMAIN}.CustomAdd(x, r)",
        f"z = {DOMAIN}.{norm}(t, w)",
    ]
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
    model = model_of(
        [
            f"p = {DOMAIN}.CustomPadAffine(x, w)",
            f'q = {DOMAIN}.CustomPadAffine(x, "", b)',
            f"r = {DOMAIN}.CustomPadAffine(y)",
        ],
        "float16[N, 4] x, float[4] w, float[4] b, float16[N, 6] y",
    )
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
    nodes = [
        f"{name} = {DOMAIN}.CustomRelu({source})"
        for name, source in (("p", "x"), ("q", "y"), ("r", "p"), ("s", "z"))
    ]
    attached = attach_bodies(model_of(nodes, "float16[N] x, bfloat16[N] y, double[N] z"), RECORDS)
    inputs = {
        "x": values((65,), torch.float16, 1),
        "y": values((65,), torch.bfloat16, 2),
        "z": values((65,), torch.float64, 3),
    }
    results = body_session(attached).run(inputs).values()
    for found, source in zip(results, ("x", "y", "x", "z"), strict=True):
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


def nested(count: int) -> onnx.ModelProto:
    """A model whose functions become 8 nodes a pair of calls: Relu, If with three nodes, a call with two."""
    names = [*(f"v{index}" for index in range(2 * count)), "y"]
    calls = " ".join(
        f"{after} = d.F({before}, c)" for before, after in zip(["x", *names], names, strict=False)
    )
    return onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 20, "d" : 1]>
            net (float[4] x, bool c) => (float[4] y) {{ {calls} }}
            <domain: "d", opset_import: ["" : 20, "d" : 1]> F (x, c) => (y) {{ y = If (c) <
            then_branch = t () => (r) {{ q = Relu (x) r = d.G (q) }},
            else_branch = e () => (s) {{ s = Relu (x) }} > }} <domain: "d", opset_import: ["" : 20]>
            G (x) => (y) {{ a = Relu (x) y = Relu (a) }}"""
    )


def test_nodes_of_functions_are_counted_as_onnx_runtime_does() -> None:
    proto = nested(2)
    count = inlined_nodes(ir.from_proto(proto))
    for limit, fits in ((count, True), (count - 1, False)):
        options = onnxruntime.SessionOptions()
        options.add_session_config_entry("session.function_expansion_node_limit", str(limit))
        with nullcontext() if fits else pytest.raises(Exception, match="cumulative node expansion limit"):
            onnxruntime.InferenceSession(proto.SerializeToString(), options)


def test_an_export_says_that_onnx_runtime_refuses_so_many_nodes_of_bodies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Twice(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch_op.silu(torch_op.silu(x))

    model = Twice()
    path, x = tmp_path / "net.onnx", torch.randn(4)
    report = export(model, x, path, exporter="torchscript", verify=False, optimize=False)
    count = inlined_nodes(ir.load(path))
    assert count > 2 and not report.notes
    monkeypatch.setattr("twinop.export.exporter.MOST_INLINED", count - 1)
    [note] = export(model, x, path, exporter="torchscript", verify=False, optimize=False).notes
    assert f"are {count:,} nodes" in note and "session.function_expansion_node_limit" in note
