"""Makes the model of an op's function body, which a library carries to run the op on the CPU."""

from collections.abc import Sequence

import onnx_ir as ir

from .calls import Call
from .schema import ONNX_TYPES


def model_of(function: ir.Function, call: Call, nodes: Sequence[ir.Node] = ()) -> bytes:
    """Makes the model of a function body, for all values of the attributes.

    Args:
        function: `<domain>::<onnx_name>`, with all the record's inputs and with references to its attributes.
        call: of `make_call`: has the dtypes, and the inputs that the op gets.
        nodes: those of the graph. A library's model has none: it is run with the op's own node.

    Returns:
        The bytes that `twinop_op.body` gives (`kernels/abi.h`).
    """
    inputs = [ir.val(name, dtype=ONNX_TYPES[call.dtypes[name]]) for name in call.inputs]
    opsets = {**function.opset_imports, call.record.domain: call.record.domain_version}
    graph = ir.Graph(inputs, call.node.outputs, nodes=nodes, name="body", opset_imports=opsets)
    model = ir.Model(graph, ir_version=10, functions=[function])
    return ir.to_proto(model).SerializeToString()
