"""Makes one node of a sum and the norm behind it, where there is an op `add_<norm>`.

Such an op gives the norm and the sum, which it rounds as the sum alone does: bit for bit what the two nodes
give, with one pass over memory less. ONNX Runtime does the same with its own norms, but cannot see ours.
"""

from collections.abc import Mapping

import onnx_ir as ir

from twinop.export.attach import call_sites, custom_nodes
from twinop.record import DOMAIN, Record

_PREFIX = "add_"


def fuse_sums(model: ir.Model, records: Mapping[str, Record] | None = None) -> dict[str, int]:
    """Fuses in place; returns the number of new nodes by type. Function bodies are attached after it.

    A pair stays apart where the two addends are not known to have one shape (a bias, say), the norm is not
    over the last dimension alone, or lacks an input that the fused op requires.

    Args:
        model: with types and shapes of its values, as `torch.onnx.export` and shape inference give them.
        records: the ops by name; by default those that `twinop.torch_op` has loaded.
    """
    if records is None:
        from twinop import torch_op

        records = torch_op.records()
    fused: dict[str, int] = {}
    sums = {("", "Add")} | ({(DOMAIN, records["add"].onnx_name)} if "add" in records else set())
    nodes = custom_nodes(model, records)
    for record in records.values():
        norm = records.get(record.name.removeprefix(_PREFIX)) if record.domain == DOMAIN else None
        if norm is None or norm is record or record.is_backward:
            continue
        for node in nodes.get(norm.node_type, ()):
            addition = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
            if addition is None or (addition.domain, addition.op_type) not in sums:
                continue
            if addition.graph is node.graph and (inputs := _inputs(node, norm, addition, record)) is not None:
                _replace(node, addition, record, inputs)
                fused[record.onnx_name] = fused.get(record.onnx_name, 0) + 1
    return fused


def _inputs(node: ir.Node, norm: Record, addition: ir.Node, record: Record) -> list[ir.Value | None] | None:
    """What the fused op would get, or None where it does not fit."""
    [call] = call_sites([node], norm)
    first, *others = (entry.name for entry in norm.inputs)
    total = node.inputs[0]
    if total is None or not all(_same_shape(addend, total) for addend in addition.inputs):
        return None
    # The attribute that the fused op lacks: where its rows begin.
    rank, start = len(total.shape or ()), norm.rows.removesuffix(":")
    lost = {name: value for name, value in call.attributes.items() if record.attribute(name) is None}
    if lost not in ({start: -1}, {start: rank - 1}):
        return None
    named = dict(zip(others, node.inputs[1:], strict=False))
    given: list[ir.Value | None] = [*addition.inputs]
    given += [named.get(entry.name) for entry in record.inputs[len(given) :]]
    absent = [entry.name for entry, value in zip(record.inputs, given, strict=True) if value is None]
    if any(entry.name in absent and not entry.optional for entry in record.inputs):
        return None
    dtypes = {name: dtype for name, dtype in call.dtypes.items() if name in call.present and name != first}
    dtypes |= dict.fromkeys((entry.name for entry in record.inputs[:2]), call.dtypes[first])
    return given if record.combination_of(dtypes) is not None else None


def _same_shape(addend: ir.Value | None, total: ir.Value) -> bool:
    if addend is None or addend.shape is None or total.shape is None or addend.shape != total.shape:
        return False
    return all(isinstance(dim, int) or dim.value is not None for dim in total.shape)


def _replace(node: ir.Node, addition: ir.Node, record: Record, inputs: list[ir.Value | None]) -> None:
    graph = node.graph
    assert graph is not None
    twin = ir.Node(
        DOMAIN,
        record.onnx_name,
        inputs,
        [attribute for name, attribute in node.attributes.items() if record.attribute(name) is not None],
        num_outputs=len(record.outputs),
        name=node.name,
    )
    # The node goes where the sum was, whose other readers may come before the norm; its weights may be made
    # behind it: sort.
    ir.convenience.replace_nodes_and_values(
        graph,
        addition,
        [addition, node],
        [twin],
        [*addition.outputs, *node.outputs],
        list(reversed(twin.outputs)),
    )
    graph.sort()
