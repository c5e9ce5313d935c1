"""Makes the model of an op's function body that a library carries to run the op on the CPU."""

from collections.abc import Iterable

import onnx_ir as ir

from .calls import Call
from .schema import ONNX_TYPES


def model_of(function: ir.Function, call: Call) -> bytes:
    """Makes the model of a function body, for all values of the attributes.

    Args:
        function: `<domain>::<onnx_name>`, with all the record's inputs and with references to its attributes.
        call: has the dtypes, and the inputs that the op gets.

    Returns:
        The bytes that `twinop_op.body` gives (`kernels/abi.h`).
    """

    def values(names: Iterable[str]) -> list[ir.Value]:
        return [ir.val(name, dtype=ONNX_TYPES[call.dtypes[name]]) for name in names]

    record = call.record
    opsets = {**function.opset_imports, record.domain: record.domain_version}
    graph = ir.Graph(values(call.inputs), values(record.outputs), nodes=[], name="body", opset_imports=opsets)
    model = ir.Model(graph, ir_version=10, functions=[function])
    return ir.to_proto(model).SerializeToString()
