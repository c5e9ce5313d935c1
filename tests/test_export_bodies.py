"""Function bodies: equal to the kernels, written once, bound to the node's own attributes; refusals."""

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from export_models import body_session, model_of, run_body
from one_node import one_node_model
from samples import RECORDS, Sample, samples, values

from twinop.export import attach_bodies
from twinop.export.bodies import find_body
from twinop.export.parity import same_bits, unsupported_cell
from twinop.export.schema import default_of, registered_schemas
from twinop.export.trace import CallSite
from twinop.record import DOMAIN, Record

OPSETS = (20, 21, 22, 23)
# Where the library and a body may differ: a sum in another order.
INEXACT = {("double_and_sum", "total")}

# ONNX Runtime 1.31.1, CPU provider: op x dtype cells that it cannot run without the library, with the reason.
NOT_RUNNABLE: dict[tuple[str, str], str] = {}


def combinations(runnable_only: bool = False) -> list[Any]:
    return [
        pytest.param(record, dtypes, id=f"{record.name}-{'-'.join(dict.fromkeys(dtypes.values()))}")
        for record in RECORDS.values()
        for dtypes in record.combinations
        if not (runnable_only and cell(record, dtypes) in NOT_RUNNABLE)
    ]


def cell(record: Record, dtypes: dict[str, str]) -> tuple[str, str]:
    return record.name, dtypes[record.inputs[0].name]


def torch_results(record: Record, sample: Sample) -> tuple[torch.Tensor, ...]:
    results = getattr(getattr(torch.ops, DOMAIN), record.name)(*sample.inputs.values(), **sample.attributes)
    return results if isinstance(results, tuple) else (results,)


@pytest.mark.parametrize(("record", "dtypes"), combinations(runnable_only=True))
def test_the_body_gives_what_the_kernel_gives(record: Record, dtypes: dict[str, str]) -> None:
    sessions: dict[str, ort.InferenceSession] = {}
    for sample in samples(record, dtypes):
        given = {name: tensor for name, tensor in sample.inputs.items() if tensor is not None}
        key = f"{list(given)}{sample.attributes}"
        if key not in sessions:
            present = [name in given for name in sample.inputs]
            model = attach_bodies(one_node_model(record, dtypes, present, sample.attributes), RECORDS)
            sessions[key] = body_session(model)
        results = run_body(sessions[key], given)
        for name, found, expected in zip(record.outputs, results, torch_results(record, sample), strict=True):
            where = f"{name} {[tuple(t.shape) for t in given.values()]} {sample.attributes}"
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape), where
            if (record.name, name) in INEXACT:
                assert same_sums(found, expected, given["x"]), where
            else:
                assert same_bits(found, expected), where


def same_sums(found: torch.Tensor, expected: torch.Tensor, x: torch.Tensor) -> bool:
    """Equal up to the order of the sums over x's last dimension, where no order overflows."""
    magnitude = x.double().abs().nan_to_num(0, posinf=0).sum(-1)
    safe = magnitude < torch.finfo(x.dtype if x.element_size() > 2 else torch.float32).max
    a, b, bound = (
        found.double()[safe],
        expected.double()[safe],
        (torch.finfo(x.dtype).eps * 257 * magnitude)[safe],
    )
    finite = b.isfinite()
    return same_bits(a[~finite], b[~finite]) and bool(((a - b).abs() <= bound)[finite].all())


@pytest.mark.parametrize(("record", "dtypes"), combinations())
def test_cells_that_onnxruntime_cannot_run(record: Record, dtypes: dict[str, str]) -> None:
    attributes = {entry.name: default_of(entry) for entry in record.attributes}
    everything = frozenset(entry.name for entry in record.inputs)
    required = frozenset(entry.name for entry in record.inputs if not entry.optional)
    for opset in (OPSETS[0], OPSETS[-1]):
        for present in {everything, required}:
            reason = unsupported_cell(record, CallSite("node", dtypes, present, attributes), opset)
            assert reason == NOT_RUNNABLE.get(cell(record, dtypes), "")


def test_every_op_has_a_body_that_fits_its_record() -> None:
    for record in RECORDS.values():
        found = find_body(record.name)
        assert found is not None, record.name
        found.check(record)


@pytest.mark.parametrize("opset", OPSETS)
def test_a_bare_model_gets_bodies_and_passes_the_checker(opset: int) -> None:
    """No types are given but the inputs'; an optional input is absent in the middle; defaults are left to the
    op."""
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
    assert [a.name for a in attached.graph.node[0].attribute] == ["pads"]  # defaults are not written
    x, b = torch.randn(3, 4), torch.randn(4)
    h, d, t = run_body(body_session(attached), {"x": x, "b": b})
    wanted = torch.nn.functional.pad(x * float(np.float32(0.1)) + b, (1, 2))
    torch.testing.assert_close(h, wanted)
    torch.testing.assert_close(d, 2 * wanted)
    torch.testing.assert_close(t, wanted.sum(-1))
    dims = {
        v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim]
        for v in attached.graph.output
    }
    assert dims == {"h": ["N", 7], "d": ["N", 7], "t": ["N"]}


def test_each_node_keeps_its_own_attributes() -> None:
    """One body for nodes with different values: attributes are references."""
    model = model_of(
        [
            f'p = {DOMAIN}.CustomPadAffine<sign = "minus", scale = 2.0, pads = [0, 0]>(x, "", b)',
            f'q = {DOMAIN}.CustomPadAffine<scale = 3.0>(x, "", b)',
        ],
        "double[2, 3] x, double[3] b",
    )
    attached = attach_bodies(model, RECORDS)
    x, b = torch.randn(2, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    p, q = run_body(body_session(attached), {"x": x, "b": b})
    torch.testing.assert_close(p, 2 * x - b)
    torch.testing.assert_close(q, torch.nn.functional.pad(3 * x + b, (0, 1)))


def test_floats_are_narrowed_as_in_the_kernels() -> None:
    """The attribute 0.1 is fp32 in ONNX; an fp64 body must use that number, as the kernels do."""
    record = RECORDS["pad_affine"]
    x = torch.full((1,), 1.0, dtype=torch.float64)
    (found,) = run_body(
        body_session(
            attach_bodies(one_node_model(record, record.combinations[3], [True, False, False], {}), RECORDS)
        ),
        {"x": x},
    )
    assert found[0].item() == float(np.float32(0.1)) != 0.1
    assert torch.equal(found, torch.ops.custom_domain.pad_affine(x))


def test_mixed_presence_gets_neutral_inputs() -> None:
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
    for found, wanted in zip(run_body(body_session(attached), inputs | weights), expected, strict=True):
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
    results = run_body(body_session(attached), inputs)
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
    (found,) = run_body(body_session(attached), {"c": torch.tensor(True), "x": x})
    assert torch.equal(found, 2 * x)


def test_an_ir_model_is_changed_in_place() -> None:
    model = ir.from_proto(model_of([f"p = {DOMAIN}.CustomRelu(x)"], "float[2] x"))
    assert attach_bodies(model) is model
    assert [name for _, name, _ in model.functions] == ["CustomRelu"]
