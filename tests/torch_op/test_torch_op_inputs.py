"""twinop.torch_op accepts views, Python numbers, batches and mixed dtypes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import ALL, DEVICES, make_sample
from torch.profiler import ProfilerActivity, profile

from twinop import torch_op
from twinop.errors import RecordError
from twinop.record.op_spec import OpSpec

ops = torch.ops.custom_domain


def copies(run: Callable[[], Any]) -> int:
    """Returns the number of tensors that the op copied."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        run()
    return sum(event.count for event in found.key_averages() if event.key == "aten::copy_")


ELEMENTWISE = [record for record in ALL.values() if record.is_elementwise]
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "columns": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
    "steps": lambda t: torch.stack([t, t], -1)[..., 0],
    "transposed": lambda t: t.mT.contiguous().mT,
}


def same(a: Any, b: Any) -> bool:
    pairs = zip(a, b, strict=True) if isinstance(a, tuple) else [(a, b)]
    return all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("record", ELEMENTWISE, ids=lambda record: record.name)
def test_elementwise_ops_copy_nothing(record: OpSpec, view: str) -> None:
    sample = make_sample(record, record.combinations[0], (6, 8), tame=True).map(torch.Tensor.abs)
    op = getattr(ops, record.name)
    expected = op(*sample.inputs.values())
    for mixed in (False, True):
        tensors = list(sample.map(VIEWS[view]).inputs.values())
        if mixed:
            tensors[-1] = next(reversed(sample.inputs.values()))
        assert copies(lambda: op(*tensors)) == 0  # noqa: B023
        assert same(op(*tensors), expected)
    expanded = [tensor[:1].expand(6, 8) for tensor in sample.inputs.values() if tensor is not None]
    assert copies(lambda: op(*expanded)) == 0
    assert same(op(*expanded), op(*(tensor.contiguous() for tensor in expanded)))


ROWS = [record for record in ALL.values() if record.rows and "int64" not in record.combinations[0].values()]


def row_views(
    record: OpSpec,
) -> list[tuple[str, Callable[[torch.Tensor], torch.Tensor], bool, dict[str, int]]]:
    """A view of a [4, 6, 8] tensor, whether it is copied, and the attributes that make it so."""
    views: list[tuple[str, Callable[[torch.Tensor], torch.Tensor], bool, dict[str, int]]] = [
        ("columns of wider rows", VIEWS["columns"], False, {}),
        ("one row expanded", lambda t: t[:1, :1].expand(t.shape), False, {}),
        ("every second row", lambda t: torch.stack([t, t], 2)[:, :, 0], False, {}),
        ("misaligned columns", lambda t: torch.nn.functional.pad(t, (1, 2))[..., 1:-2], False, {}),
        ("rows at two distances", lambda t: torch.cat([t, t], 1)[:, : t.shape[1]], True, {}),
        ("transposed", VIEWS["transposed"], True, {}),
        ("every second column", VIEWS["steps"], True, {}),
    ]
    if record.rows == ("axis", True):  # a row is all behind the axis
        views.append(("planes", lambda t: torch.cat([t, t], 1)[:, : t.shape[1]], False, {"axis": 1}))
        views.append(("columns of planes", VIEWS["columns"], True, {"axis": 1}))
    if record.rows == ("dim", False):  # rows side by side
        views.append(("planes", lambda t: torch.cat([t, t], 1)[:, : t.shape[1]], True, {"dim": 1}))
    return views


ROWS_AND_VIEWS = [(record, view) for record in ROWS for view in row_views(record)]
CASES = [pytest.param(record, *view, id=f"{record.name}-{view[0]}") for record, view in ROWS_AND_VIEWS]


@pytest.mark.parametrize(("record", "name", "view", "copied", "attributes"), CASES)
def test_rows_at_one_distance_are_not_copied(
    record: OpSpec,
    name: str,
    view: Callable[[torch.Tensor], torch.Tensor],
    copied: bool,
    attributes: dict[str, int],
) -> None:
    sample = make_sample(record, record.combinations[0], (4, 6, 8), attributes=attributes, tame=True)
    op = getattr(ops, record.name)
    first, *others = sample.inputs
    tensors = dict(sample.inputs) | {first: view(sample.inputs[first])}
    assert copies(lambda: op(*tensors.values(), **attributes)) == copied
    exact = {key: None if tensor is None else tensor.contiguous() for key, tensor in tensors.items()}
    expected = op(*exact.values(), **attributes)
    assert same(op(*tensors.values(), **attributes), expected)
    # Each input of rows has its own stride.
    for other in others:
        tensor = exact[other]
        if tensor is not None and tensor.dim() == 3:
            mixed = exact | {other: VIEWS["columns"](tensor)}
            assert copies(lambda: op(*mixed.values(), **attributes)) == (attributes != {})  # noqa: B023
            assert same(op(*mixed.values(), **attributes), expected)


def test_other_ops_copy_views() -> None:
    x = torch.randn(4, 6)
    assert copies(lambda: ops.double_and_sum(x[:, :3])) == 1
    assert same(ops.double_and_sum(x[:, :3]), ops.double_and_sum(x[:, :3].contiguous()))
    assert copies(lambda: ops.double_and_sum(x[:2])) == 0
    w = torch.randn(12)[::2]
    assert copies(lambda: ops.layer_norm(x, w)) == 1  # a weight is not a row
    assert torch.equal(ops.layer_norm(x, w), ops.layer_norm(x, w.contiguous()))


def test_outputs_have_the_order_of_an_input() -> None:
    """An elementwise output has the order of the first dense input of its shape. Others are contiguous."""
    dense, row = torch.randn(3, 4), torch.randn(4)
    turned, gaps = torch.randn(4, 3).t(), torch.randn(3, 8)[:, ::2]
    cases: list[tuple[tuple[torch.Tensor, torch.Tensor], tuple[int, ...]]] = [
        ((dense, dense), (4, 1)),
        ((turned, turned), (1, 3)),
        ((turned, dense), (1, 3)),
        ((gaps, turned), (1, 3)),
        ((row, turned), (1, 3)),
        ((gaps, gaps), (4, 1)),
        ((gaps.t(), gaps.t()), (1, 4)),
        ((row.expand(3, 4), row), (4, 1)),
        ((row, turned[:, :1]), (4, 1)),
    ]
    for inputs, strides in cases:
        for device in ("cpu", "meta"):
            tensors = [torch.empty_strided(t.shape, t.stride(), device=device) for t in inputs]
            assert ops.add(*tensors).stride() == strides, [t.stride() for t in inputs]
    for device in ("cpu", "meta"):
        assert ops.softmax(turned.to(device)).is_contiguous()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data())
def test_outputs_are_laid_out_as_torch_does(data: st.DataObject) -> None:
    """Outputs have the strides of torch.empty_like for any view."""
    rank = data.draw(st.integers(0, 5))
    sizes = data.draw(st.lists(st.sampled_from([2, 3, 1]), min_size=rank, max_size=rank))
    steps = data.draw(st.lists(st.sampled_from([1, 2, 0]), min_size=rank, max_size=rank))
    strides, extent = [0] * rank, 1
    for dim in data.draw(st.permutations(range(rank))):
        strides[dim] = extent * steps[dim]
        extent *= max(1, steps[dim]) * sizes[dim]
    if rank > 1 and data.draw(st.booleans()):
        strides[0] = strides[1]  # windows that overlap
    view = torch.randn(extent * 3).as_strided(sizes, strides)
    result = ops.relu(view)
    assert result.stride() == torch.empty_like(view).stride()
    fake = ops.relu(torch.empty_strided(sizes, strides, device="meta"))
    # (torch's own fakes differ in the strides of dimensions of size 1, which mean nothing.)
    pairs = [pair for size, *pair in zip(sizes, fake.stride(), result.stride(), strict=True) if size > 1]
    assert all(a == b for a, b in pairs) and torch.equal(result, view.relu())


DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers(dtype: torch.dtype, device: str) -> None:
    """A number acts as a 0-d tensor with the dtype and device of the other operand."""
    x = (torch.randn(3, 4).abs() + 0.5).to(device, dtype)
    for number in (2.0, 3, 1.25, 0.1, float("inf"), True):
        tensor = torch.tensor(number, dtype=dtype, device=device)
        for name in ("add", "mul", "pow"):
            op = getattr(torch_op, name)
            assert torch.equal(op(x, number), op(x, tensor)) and op(x, number).dtype == dtype
            assert torch.equal(op(number, x), op(tensor, x))
            assert torch.equal(op(a=x, b=number), op(x, tensor))
    assert torch_op.add(2, x[0, 0]).shape == ()


def test_numbers_that_are_none() -> None:
    x = torch.randn(3)
    with pytest.raises(RecordError, match="custom_domain::add: none of a, b is a tensor; one must be"):
        torch_op.add(1.0, 2.0)
    with pytest.raises(RuntimeError, match="custom_domain::add: b is None; it must be a tensor"):
        torch_op.add(x, None)
    for wrong in ("2", [1.0], 2j):
        with pytest.raises((RuntimeError, TypeError), match="add"):
            torch_op.add(x, wrong)
    with pytest.raises((RuntimeError, TypeError), match="relu"):  # an op of one shape takes tensors only
        torch_op.relu(2.0)
    with pytest.raises((RuntimeError, TypeError), match="swiglu"):
        torch_op.swiglu(x, 2.0)


def test_numbers_in_compiled_and_transformed_functions() -> None:
    def function(x: torch.Tensor, factor: float) -> torch.Tensor:
        return torch_op.add(torch_op.mul(x, factor), 2).sum()

    x = torch.randn(3, 4)
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for factor in (2.5, 3.0, 4):
        torch.testing.assert_close(compiled(x, factor), function(x, factor))
    assert torch.equal(torch.func.grad(function)(x, 2.5), torch.full((3, 4), 2.5))
    assert torch.equal(torch.func.vmap(lambda row: torch_op.pow(row, 2))(x), torch_op.pow(x, 2))


BATCHES: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int | None, int | None]]] = [
    ((5, 3), (5, 2, 3), (0, 0)),
    ((2, 5, 3), (5,), (1, 0)),
    ((3,), (5, 2, 3), (None, 0)),
    ((5, 1, 3), (2, 1, 5), (0, 2)),
    ((0, 3), (2, 3), (0, None)),
]


@pytest.mark.parametrize(("a", "b", "dims"), BATCHES)
def test_batches_of_operands_broadcast_as_in_torch(a: Any, b: Any, dims: Any) -> None:
    x, y = torch.randn(a), torch.randn(b)
    expected = torch.func.vmap(torch.add, in_dims=dims)(x, y)
    for op in (ops.add, torch_op.add):
        result = torch.func.vmap(op, in_dims=dims)(x, y)
        assert torch.equal(result, expected)
    with pytest.raises(RuntimeError, match="do not broadcast"):
        torch.func.vmap(torch_op.add)(torch.randn(5, 3), torch.randn(5, 4))
