"""One declaration gives an op to every layer."""

import inspect
from typing import Any

import op_bodies  # noqa: F401 (registers the test ops' bodies)
import pytest
import torch
from onnx import helper
from samples import RECORDS, has_derivative

from twinop import torch_op
from twinop.export import op_schema
from twinop.libraries.library import find_library
from twinop.record.op_schema import default_of
from twinop.record.op_spec import DOMAIN, DOMAIN_VERSION, OpSpec
from twinop.testing.one_node import make_session, one_node_model

ALL = torch_op.records()  # with the backward ops
CPU = ["CPUExecutionProvider"]
each_op = pytest.mark.parametrize("record", RECORDS.values(), ids=list(RECORDS))


@pytest.mark.parametrize("record", ALL.values(), ids=list(ALL))
def test_torch_has_the_op(record: OpSpec) -> None:
    name = f"{DOMAIN}::{record.name}"
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    keys = ["CPU", "CUDA", "Autograd", "Meta", "FuncTorchBatched", "SparseCPU", "QuantizedCPU", "MkldnnCPU"]
    assert {key: has_kernel(name, key) for key in keys} == dict.fromkeys(keys, True)
    parameters = inspect.signature(getattr(torch_op, record.name)).parameters.values()
    declared = [entry.name for entry in record.inputs] + [entry.name for entry in record.attributes]
    assert [parameter.name for parameter in parameters] == declared
    kinds = {getattr(torch, dtypes[name]) for dtypes in record.combinations for name in record.outputs}
    has_none = record.is_backward or record.written or not any(kind.is_floating_point for kind in kinds)
    has_none = has_none or any("float8_e4m3fn" in dtypes.values() for dtypes in record.combinations)
    derived = has_derivative(record) or has_none
    assert derived and record.devices[0] == "cpu"


def test_backward_ops_are_torchs_only() -> None:
    backward = {name: record for name, record in ALL.items() if record.is_backward}
    assert backward and set(backward) | set(RECORDS) == set(ALL)
    model = one_node_model(
        backward["relu_backward"], {"grad_y": "float32", "y": "float32", "grad_x": "float32"}, [True] * 2, {}
    )
    with pytest.raises(Exception, match="CustomReluBackward"):
        make_session(model, find_library("custom_ops"), "cpu")


@each_op
def test_onnx_declares_the_op_like_the_record(record: OpSpec) -> None:
    schema: Any = op_schema(record)  # onnx's enumerations have no types
    assert (schema.name, schema.domain, schema.since_version) == (record.onnx_name, DOMAIN, DOMAIN_VERSION)
    assert [(entry.name, entry.option.name == "Optional") for entry in schema.inputs] == [
        (entry.name, entry.optional) for entry in record.inputs
    ]
    assert [entry.name for entry in schema.outputs] == list(record.outputs)
    kinds = {"int": "INT", "bool": "INT", "float": "FLOAT", "str": "STRING", "int[]": "INTS"}
    attributes = dict(schema.attributes)
    for entry in record.attributes:
        found = attributes.pop(entry.name)
        assert (found.type.name, found.required) == (kinds[entry.kind], entry.required)
        value = helper.get_attribute_value(found.default_value)
        value = tuple(value) if entry.kind == "int[]" else value
        assert (value.decode() if isinstance(value, bytes) else value) == default_of(entry)
    assert not attributes


MODULES = {
    torch_op.CustomGELU: "gelu",
    torch_op.CustomSoftmax: "softmax",
    torch_op.CustomLayerNorm: "layer_norm",
    torch_op.CustomRMSNorm: "rms_norm",
}


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_modules_have_the_ops_defaults(module: type[torch.nn.Module]) -> None:
    """Parameters that a module shares with its op have the op's defaults."""
    op = RECORDS[MODULES[module]]
    parameters = inspect.signature(module).parameters
    shared = {entry.name: entry.default for entry in op.attributes if entry.name in parameters}
    if module is torch_op.CustomRMSNorm:
        shared["eps"] = None  # torch's own: it depends on the dtype
    assert shared and {name: parameters[name].default for name in shared} == shared
