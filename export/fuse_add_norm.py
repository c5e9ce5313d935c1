"""Fuses a sum and the norm that follows it into one node, where there is an op `add_<norm>`.

Such an op returns the norm and the sum. It rounds the sum as an Add does, so the results have the bits of the
two nodes, with one pass over memory less. ONNX Runtime does the same for its own norms but cannot see ours.
"""

from collections import Counter
from collections.abc import Mapping

import onnx_ir as ir

from twinop.record import DOMAIN, Record

from .calls import Call, op_nodes, read_call, records_or_loaded

_PREFIX = "add_"


def fuse_sums(model: ir.Model, records: Mapping[str, Record] | None = None) -> dict[str, int]:
    """Fuses sums and norms in place. Attach function bodies afterwards.

    A pair is left as it is if the two addends are not known to have one shape (a bias, for example), if the
    norm is not over the last dimension alone, or if it lacks an input that the fused op requires.

    Args:
        model: with types and shapes of its values, as `torch.onnx.export` and shape inference give them.
        records: the ops by name; by default the ops that `twinop.torch_op` has loaded.

    Returns:
        The number of new nodes by type.
    """
    records = records_or_loaded(records)
    sums = {("", "Add")} | ({records["add"].node_type} if "add" in records else set())
    fused_ops = {
        records[unfused].node_type: (records[unfused], record)
        for name, record in records.items()
        if name.startswith(_PREFIX) and record.domain == DOMAIN and not record.is_backward
        if (unfused := name.removeprefix(_PREFIX)) in records
    }
    count: Counter[str] = Counter()
    for node_type, nodes in op_nodes(model, records).items():
        if node_type not in fused_ops:
            continue
        norm, fused = fused_ops[node_type]
        for node in nodes:
            addition = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
            if addition is None or addition.graph is not node.graph:
                continue
            if (addition.domain, addition.op_type) not in sums:
                continue
            inputs = _fused_inputs(read_call(norm, node), addition, fused)
            if inputs is not None:
                _fuse(addition, node, fused, inputs)
                count[fused.onnx_name] += 1
    return dict(count)


def _fused_inputs(call: Call, addition: ir.Node, fused: Record) -> list[ir.Value | None] | None:
    """Returns the inputs of the fused node, or None where the two nodes cannot be fused."""
    norm, total = call.record, call.node.inputs[0]
    if total is None or not all(_same_shape(addend, total) for addend in addition.inputs):
        return None
    # The attribute that the fused op lacks: the first dimension of the norm's rows.
    rank, start = len(total.shape or ()), norm.rows.removesuffix(":")
    lost = {name: value for name, value in call.attributes.items() if fused.attribute(name) is None}
    if lost not in ({start: -1}, {start: rank - 1}):
        return None
    first, second, *rest = fused.inputs
    given = dict(zip((first.name, second.name), addition.inputs, strict=True))
    given |= {entry.name: call.inputs.get(entry.name) for entry in rest}
    if any(given[entry.name] is None and not entry.optional for entry in fused.inputs):
        return None
    source = norm.inputs[0].name
    dtypes = {name: call.dtypes[name] for name in call.inputs if name != source}
    dtypes |= dict.fromkeys((first.name, second.name), call.dtypes[source])
    return list(given.values()) if fused.combination_of(dtypes) is not None else None


def _same_shape(addend: ir.Value | None, total: ir.Value) -> bool:
    if addend is None or addend.shape is None or total.shape is None or addend.shape != total.shape:
        return False
    return all(isinstance(dim, int) or dim.value is not None for dim in total.shape)


def _fuse(addition: ir.Node, norm: ir.Node, record: Record, inputs: list[ir.Value | None]) -> None:
    graph = norm.graph
    assert graph is not None
    fused = ir.Node(
        *record.node_type,
        inputs,
        [attribute for name, attribute in norm.attributes.items() if record.attribute(name) is not None],
        num_outputs=len(record.outputs),
        name=norm.name,
    )
    # The fused node takes the place of the sum, which may have readers before the norm. Its weights may be
    # computed after that place, so the graph is sorted.
    ir.convenience.replace_nodes_and_values(
        graph,
        addition,
        [addition, norm],
        [fused],
        [*addition.outputs, *norm.outputs],
        list(reversed(fused.outputs)),
    )
    graph.sort()
