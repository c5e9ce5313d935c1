"""Sharding rules of ops for DTensor (tensor parallelism), derived from their records.

For each dimension of a mesh a rule lists what DTensor may choose: the placements of the outputs, and those of
the inputs that give them. DTensor redistributes inputs that have other placements.
"""

import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from twinop.errors import RecordError
from twinop.record.call_checks import infer_shapes
from twinop.record.op_spec import OpSpec
from twinop.record.shapes import Unknown, evaluate, nodes_of

from .arguments import bind, signature_of
from .rules import PRODUCTS

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

Placements = Mapping[str, Any]  # torch's Placement by the name of the tensor
Shapes = Mapping[str, tuple[int, ...]]

_registered: set[str] = set()  # OpSpec.torch_name


def register_sharding_rule(record: OpSpec) -> None:
    """Gives DTensor the rule of an op, if the process has imported DTensor. (Its import takes a second.)"""
    if record.torch_name in _registered or "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor.experimental import register_sharding

    _registered.add(record.torch_name)
    signature = signature_of(record)

    def rule(*args: Any, **kwargs: Any) -> list[Any]:
        arguments = bind(signature, args, kwargs)
        found = [
            _strategy(record, arguments, outputs, inputs) for outputs, inputs in _splits(record, arguments)
        ]
        tensors = [value for value in arguments.values() if hasattr(value, "placements")]
        if not found and not all(place.is_replicate() for tensor in tensors for place in tensor.placements):
            raise RecordError(
                f"{record.qualified_name} has no sharding rule for these tensors. Redistribute them to "
                "Replicate(), or call the op on local tensors (to_local, local_map)"
            )
        return [_strategy(record, arguments, {}, {}), *found]

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RecordError(f"{record.qualified_name} mutates, and takes no DTensors. Call {record.torch_path}")

    for name, each in {record.name: refuse, record.functional_name: rule}.items():
        register_sharding(getattr(getattr(torch.ops, record.namespace), name).default)(each)


def _strategy(
    record: OpSpec, arguments: dict[str, Any], outputs: Placements, inputs: Placements
) -> tuple[list["Placement | None"], list["Placement | None"]]:
    """Completes placements by name, as DTensor takes them: tensors without one are whole on each rank."""
    from torch.distributed.tensor import Replicate

    whole = Replicate()
    tensors = {entry.name for entry in record.inputs if arguments[entry.name] is not None}
    return (
        [outputs.get(name, whole) for name in record.outputs],
        [inputs.get(name, whole) if name in tensors else None for name in arguments],
    )


def _splits(record: OpSpec, arguments: dict[str, Any]) -> Iterator[tuple[Placements, Placements]]:
    """Yields the placements of outputs and inputs for each way to split a call."""
    given = {entry.name: arguments[entry.name] for entry in record.inputs}
    shapes = {name: tuple(tensor.shape) for name, tensor in given.items() if tensor is not None}
    if record.key in PRODUCTS:
        yield from _of_product(record, arguments, shapes)
    elif record.is_elementwise:
        yield from _of_elementwise(record, shapes)
    elif record.rows:
        yield from _of_rows(record, arguments, shapes)


def _of_elementwise(record: OpSpec, shapes: Shapes) -> Iterator[tuple[Placements, Placements]]:
    from torch.distributed.tensor import Shard

    rank = max(len(shape) for shape in shapes.values())
    sizes = [max(shape[i - rank] for shape in shapes.values() if len(shape) >= rank - i) for i in range(rank)]
    for i in range(rank):
        inputs = {
            name: Shard(i - rank + len(shape))
            for name, shape in shapes.items()
            if len(shape) >= rank - i and shape[i - rank] == sizes[i]
        }
        yield dict.fromkeys(record.outputs, Shard(i)), inputs


def _of_product(
    record: OpSpec, arguments: dict[str, Any], shapes: Shapes
) -> Iterator[tuple[Placements, Placements]]:
    from torch.distributed.tensor import Partial, Shard

    last = len(shapes["x"]) - 1
    for i in range(last):
        yield {"y": Shard(i)}, {"x": Shard(i), "residual": Shard(i)}
    if record.key != "linear":  # half of the columns of linear_swiglu are gates of the others
        return
    of_n, of_k = (0, 1) if arguments["layout"] == "nk" else (1, 0)
    yield {"y": Shard(last)}, {"weight": Shard(of_n), "bias": Shard(0), "residual": Shard(last)}
    is_sum = arguments["activation"] == "none" and arguments["rms_eps"] == 0
    if shapes.keys() == {"x", "weight"} and is_sum:  # each rank would add the others
        yield {"y": Partial()}, {"x": Shard(last), "weight": Shard(of_k)}


def _of_rows(
    record: OpSpec, arguments: dict[str, Any], shapes: Shapes
) -> Iterator[tuple[Placements, Placements]]:
    """Splits an op that computes each row alone, along the dimensions that are not in rows.

    Tensors whose shapes have the same size by the record are split with it. Others are whole. The gradient of
    a whole input is the sum of what the ranks have.
    """
    from torch.distributed.tensor import Partial, Shard

    assert record.rows is not None
    dimension, to_the_end = record.rows
    declared = record.input_shapes
    names = {name: [n for n in nodes_of(each.tree) if isinstance(n, str)] for name, each in declared.items()}
    uses = {name: {*names.get(name, ())} & shapes.keys() for name in shapes}
    base = next(name for name in shapes if uses[name] <= {name})  # its sizes are those of the others
    rank = len(shapes[base])
    axis = (dimension if isinstance(dimension, int) else arguments[dimension]) % max(rank, 1)
    attributes = {entry.name: arguments[entry.name] for entry in record.attributes}
    marks = tuple(Unknown(str(i)) for i in range(rank))
    marked: dict[str, Any] = {entry.name: shapes.get(entry.name) for entry in record.inputs}
    marked[base] = marks
    for name in shapes:
        if uses[name] - {name}:
            marked[name] = evaluate(record, declared[name], marked, attributes)
    results = infer_shapes(record, marked, attributes)
    for i in range(axis if to_the_end else rank):
        inputs = {name: Shard(marked[name].index(marks[i])) for name in shapes if marks[i] in marked[name]}
        outputs = {name: Shard(shape.index(marks[i])) for name, shape in results.items() if marks[i] in shape}
        sums = {f"grad_{name}": Partial() for name in record.parameters if name not in inputs}
        if i != axis and outputs and results.keys() <= sums.keys() | outputs.keys():
            yield {**sums, **outputs}, inputs
