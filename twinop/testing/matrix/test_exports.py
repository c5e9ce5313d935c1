"""Models with the op export, with a function body that computes what the kernel computes."""

import re
from collections.abc import Set
from functools import cache
from pathlib import Path
from typing import Any

import onnx
import onnx.parser
import onnxruntime as ort
import pytest
import torch

from twinop.deploy import Session
from twinop.errors import ExportError
from twinop.export import attach_bodies, export
from twinop.export.verify import unsupported_cell
from twinop.libraries.declare import CPU_FUNCTIONS
from twinop.libraries.kernel_op import DECLARED
from twinop.model.attach import OPSETS
from twinop.model.bodies import find_body
from twinop.model.calls import make_call
from twinop.record.op_schema import default_of, onnx_value
from twinop.record.op_spec import OpSpec
from twinop.record.tolerance import same_bits

from ..messages import fail, first_difference
from ..one_node import body_session, one_node_model
from ..references import as_close_as_torch_asks
from ..rounding import OrtRoundingOps
from ..samples import Sample, called, make_sample, presence_patterns, run_in_torch, samples
from ..ulps import is_defined, measure
from ..under_test import advice, library_of, op_of, records_under_test, reference_of


def with_body(record: OpSpec) -> None:
    """Skips an op without a function body."""
    if find_body(record.key) is None:
        pytest.skip(f"{record.qualified_name} has no function body")


def why_not_runnable(record: OpSpec, dtypes: dict[str, str], present: Set[str], opset: int) -> str:
    """Returns why ONNX Runtime's CPU provider cannot run the body, or "". It lacks kernels for float64."""
    attributes = {entry.name: default_of(entry) for entry in record.attributes}
    if required := [entry for entry in record.attributes if entry.required]:
        given = make_sample(record, dtypes, (3, 4)).attributes
        attributes |= {entry.name: onnx_value(entry, given[entry.name]) for entry in required}
    reason = unsupported_cell(make_call(record, dtypes, frozenset(present), attributes), opset)
    if reason:
        missing_kernel = re.fullmatch(r"ONNX Runtime [\d.]+ has no CPU kernel for \w+", reason)
        assert "float64" in dtypes.values() and missing_kernel, (
            f"the body of {record.name} in {op_of(record).place} does not run for {dtypes}: {reason}"
        )
    return reason


def session_or_none(model: onnx.ModelProto, dtypes: dict[str, str]) -> Session | None:
    """Opens a session without the library; None where ONNX Runtime lacks a kernel for float64."""
    try:
        return body_session(model)
    except Exception as error:
        if "float64" in dtypes.values() and "it has no CPU kernel for" in str(error):
            return None
        raise


@cache
def runs_opset(opset: int) -> bool:
    """Whether this ONNX Runtime knows the version of the standard operators."""
    head = f'<ir_version: 10, opset_import: ["" : {opset}]> relu'
    try:
        body_session(onnx.parser.parse_model(f"{head} (float[n] x) => (float[n] y) {{ y = Relu(x) }}"))
    except Exception as error:
        if "Current official support for domain ai.onnx is till opset" not in str(error):
            raise
        return False
    return True


def test_the_body_fits_the_record(record: OpSpec) -> None:
    with_body(record)
    body = find_body(record.key)
    assert body is not None
    try:
        body.check(record)
    except ExportError as error:
        fail(str(error))


def test_the_body_gives_what_the_kernel_gives(record: OpSpec, dtypes: dict[str, str]) -> None:
    """Bit for bit where nothing is rounded; otherwise within the error that the reference allows."""
    with_body(record)
    everything = {entry.name for entry in record.inputs}
    if "float64" in dtypes.values() and (reason := why_not_runnable(record, dtypes, everything, OPSETS[0])):
        pytest.skip(reason)
    sessions: dict[str, Session | None] = {}
    attributes: dict[str, dict[str, Any]] = {}
    reference = reference_of(record)
    for sample in samples(record, dtypes):
        given = sample.tensors()
        # A session for each takes long: other dtypes have one set of attributes for each choice of inputs.
        chosen = attributes.setdefault(str(list(given)), sample.attributes)
        if dtypes != record.combinations[0] and sample.attributes != chosen:
            continue
        key = f"{list(given)}{sample.attributes}"
        if key not in sessions:
            present = [name in given for name in sample.inputs]
            model = one_node_model(record, dtypes, present, sample.attributes)
            sessions[key] = session_or_none(attach_bodies(model, records_under_test()), dtypes)
        session = sessions[key]
        if session is None:
            continue
        try:
            results = list(session.run(given).values())
        except Exception as error:  # ONNX Runtime's own classes
            if not all(tensor.numel() for tensor in given.values()):
                continue  # several of its operators refuse what has no elements
            fail(f"{called(record, sample)}: the function body fails in ONNX Runtime: {error}")
        if not is_defined(record, sample.inputs, sample.attributes):
            continue
        expected = run_in_torch(record, sample)
        same_shapes = [a.shape for a in results] == [b.shape for b in expected]
        if not same_shapes and not all(tensor.numel() for tensor in given.values()):
            continue  # several of its operators give another shape for what has no elements
        measured = measure(record, sample.inputs, sample.attributes, results, 1.0, OrtRoundingOps)
        for name, a, b, each in zip(record.outputs, results, expected, measured, strict=True):
            assert (a.dtype, a.shape) == (b.dtype, b.shape), f"{called(record, sample)}: {name} of the body"
            allowed = reference.allowed_of_body(dtypes[name])
            assert allowed or same_bits(a, b), f"{called(record, sample)}: {name} of the body has other bits"
            wrong = (each.errors > allowed) & ~each.exact.isnan()  # ORT's operators may lose a NaN
            if record.key in DECLARED and reference.ulps is None:
                wrong &= ~as_close_as_torch_asks(a, each.exact)
            if wrong.any():
                fail(
                    f"{called(record, sample)}: in ONNX Runtime, the function body differs from its "
                    f"meaning in float64 by {each.worst:.4g} ulp, allowed {allowed}\n"
                    + first_difference(name, wrong, a, each.exact, sample, ("ONNX Runtime", "float64"))
                    + f"\n{advice(record, 'body_ulps')}"
                )


def test_the_body_runs_with_and_without_optional_inputs(record: OpSpec, dtypes: dict[str, str]) -> None:
    """In the newest opset that runs here; other tests of the bodies have the first one."""
    with_body(record)
    everything = frozenset(entry.name for entry in record.inputs)
    required = frozenset(entry.name for entry in record.inputs if not entry.optional)
    opset = max(filter(runs_opset, OPSETS))
    found = {why_not_runnable(record, dtypes, present, opset) for present in {everything, required}}
    assert len(found) == 1


@pytest.mark.parametrize("opset", OPSETS)
def test_the_body_in_every_opset(record: OpSpec, opset: int) -> None:
    """With all inputs and with only the required ones, the checker passes and ONNX Runtime runs the model."""
    with_body(record)
    if not runs_opset(opset):
        pytest.skip(f"ONNX Runtime {ort.__version__} does not know opset {opset}")
    dtypes = record.combinations[0]
    for present in (presence_patterns(record, dtypes)[0], presence_patterns(record, dtypes)[-1]):
        sample = make_sample(record, dtypes, (3, 4), present=present, tame=True)
        model = one_node_model(record, dtypes, list(present.values()), sample.attributes)
        model.opset_import[0].version = opset
        attached = attach_bodies(model, records_under_test())
        shaped = onnx.ModelProto.FromString(attached.SerializeToString())
        expected = run_in_torch(record, sample)
        ranks = {name: tensor.dim() for name, tensor in sample.tensors().items()}
        ranks |= {name: tensor.dim() for name, tensor in zip(record.outputs, expected, strict=True)}
        for value in (*shaped.graph.input, *shaped.graph.output):  # the checker wants ranks
            value.type.tensor_type.shape.SetInParent()
            for _ in range(ranks[value.name]):
                value.type.tensor_type.shape.dim.add()
        onnx.checker.check_model(shaped, full_check=True)
        found = body_session(attached).run(sample.tensors()).values()
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, equal_nan=True)


class OneOp(torch.nn.Module):
    def __init__(self, record: OpSpec, sample: Sample) -> None:
        super().__init__()
        self.function, self.attributes = op_of(record).function, sample.attributes

    def forward(self, *tensors: Any) -> Any:
        return self.function(*tensors, **self.attributes)


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_both_exporters_carry_the_op(record: OpSpec, exporter: str, tmp_path: Path) -> None:
    """The exported file, of fixed sizes, gives torch's bits with the library, and runs without it."""
    if exporter == "torchscript" and {"uint16", "uint32", "uint64"}.intersection(
        record.combinations[0].values()
    ):
        pytest.skip("torch's TorchScript exporter does not know these integers")
    many = (make_sample(record, record.combinations[0], (3, 4), seed, tame=True) for seed in range(8))
    sample = next((each for each in many if all(y.numel() for y in run_in_torch(record, each))), None)
    if sample is None:
        pytest.skip("an output is empty for every input, so there is nothing to compare")
    path = tmp_path / "op.onnx"
    given = tuple(sample.inputs.values())
    report = export(
        OneOp(record, sample).eval(),
        given,
        path,
        exporter=exporter,
        library=library_of(record),
        optimize=False,
    )
    assert report.parity is not None, f"{called(record, sample)}: {report}"
    assert report.parity.equal or record.key in CPU_FUNCTIONS, f"{called(record, sample)}: {report}"
    if find_body(record.key) is not None:
        assert report.without_library is not None, f"{called(record, sample)}: {report.without_reason}"
