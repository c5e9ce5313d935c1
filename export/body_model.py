"""Makes the model of an op's function body that a library carries to run the op on the CPU."""

from collections.abc import Collection, Mapping

import onnx_ir as ir

from twinop.op_spec import OpSpec

from .schema import ONNX_TYPES


def model_of(
    function: ir.Function, record: OpSpec, dtypes: Mapping[str, str], present: Collection[str]
) -> bytes:
    """Makes the model of a function body, for all values of the attributes.

    Args:
        function: `<domain>::<onnx_name>`, with all the record's inputs and with references to its attributes.
        dtypes: one of the record's combinations.
        present: the names of the inputs that the op gets.

    Returns:
        The bytes that `twinop_op.body` gives (`kernels/abi.h`).
    """

    def values(names: Collection[str]) -> list[ir.Value]:
        return [ir.val(name, dtype=ONNX_TYPES[dtypes[name]]) for name in names]

    opsets = {**function.opset_imports, record.domain: record.domain_version}
    inputs = [entry.name for entry in record.inputs if entry.name in present]
    graph = ir.Graph(values(inputs), values(record.outputs), nodes=[], name="body", opset_imports=opsets)
    model = ir.Model(graph, ir_version=10, functions=[function])
    return ir.to_proto(model).SerializeToString()
