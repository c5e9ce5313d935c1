"""Elementwise ops broadcast like numpy. The layout of their inputs does not change bits."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from same_bits import assert_same_bits
from samples import DEVICES, values
from torch.autograd import gradcheck, gradgradcheck

from twinop import torch_op
from twinop.record.op_spec import DOMAIN, OpSpec
from twinop.torch_op import records

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
# This includes the backward ops, which have up to three inputs and two outputs.
ELEMENTWISE = [record for record in records().values() if record.is_elementwise]
BROADCASTING = [record for record in ELEMENTWISE if record.broadcasts]
EXACT: dict[str, Callable[..., torch.Tensor]] = {"add": torch.add, "mul": torch.mul}


def call(record: OpSpec, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    results = getattr(getattr(torch.ops, DOMAIN), record.name)(*tensors)
    return results if isinstance(results, tuple) else (results,)


SIZES = st.one_of(st.integers(1, 9), st.sampled_from([0, 16, 17, 32, 64, 65, 127, 256, 300]))
MOST = 1 << 14


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, ...]:
    shape = draw(st.lists(SIZES, max_size=5))
    while math.prod(max(size, 1) for size in shape) > MOST:
        shape[shape.index(max(shape))] = draw(st.integers(1, 4))
    return tuple(shape)


@st.composite
def layout_of(draw: st.DrawFn, shape: tuple[int, ...]) -> dict[str, Any]:
    """Draws a memory layout for this shape: order, steps, gaps and an offset."""
    rank = len(shape)
    return {
        "order": draw(st.permutations(range(rank))) if draw(st.booleans()) else list(range(rank)),
        "steps": [draw(st.sampled_from([1, 1, 1, 2, 3])) for _ in range(rank)],
        "gaps": [draw(st.sampled_from([0, 0, 0, 1, 5, 8])) for _ in range(rank)],
        "expanded": [draw(st.sampled_from([False, False, False, True])) for _ in range(rank)],
        "start": draw(st.sampled_from([0, 0, 1, 3, 8])),
    }


def lay_out(tensor: torch.Tensor, layout: dict[str, Any]) -> torch.Tensor:
    """Returns a view with this layout and the tensor's values. Expanded dimensions repeat one value."""
    strides = [0] * tensor.dim()
    extent = 1
    for d in reversed(layout["order"]):
        roomy = extent * tensor.shape[d] < MOST  # limits the memory that gaps add
        step, gap = (layout["steps"][d], layout["gaps"][d]) if roomy else (1, 0)
        strides[d] = extent * step
        extent *= max(tensor.shape[d], 1) * step + gap
    memory = values((extent + layout["start"] + 1,), tensor.dtype, 99).to(tensor.device)
    view = memory.as_strided(tensor.shape, strides, layout["start"])
    if tensor.numel() > 0:
        view.copy_(tensor)
    for d, expanded in enumerate(layout["expanded"]):
        if expanded and tensor.shape[d] > 0:
            view = view.narrow(d, 0, 1).expand(tensor.shape)
    return view


@st.composite
def broadcast_shapes(draw: st.DrawFn, count: int) -> tuple[tuple[int, ...], ...]:
    shape = draw(shapes())
    drawn = []
    for _ in range(count):
        part = [1 if draw(st.integers(0, 3)) == 0 else size for size in shape]
        drawn.append(tuple(part[draw(st.integers(0, len(part))) if draw(st.integers(0, 2)) == 0 else 0 :]))
    return tuple(drawn)


def check_strides(record: OpSpec, tensors: list[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
    """The fake, which torch.compile relies on, returns the same shapes, dtypes and strides."""
    given = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in tensors]
    fakes = call(record, *given)
    for result, fake in zip(results, fakes, strict=True):
        assert result.shape == fake.shape and result.dtype == fake.dtype
        for size, stride, expected in zip(result.shape, result.stride(), fake.stride(), strict=True):
            same = stride == expected or size == 1 or result.numel() == 0
            assert same, f"{record.name} {[t.stride() for t in tensors]}: {result.stride()}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("record", ELEMENTWISE, ids=lambda record: record.name)
def test_any_layout_gives_the_same_bits(record: OpSpec, device: str) -> None:
    @settings(max_examples=8, deadline=None)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        shape = data.draw(shapes())
        dtype = data.draw(st.sampled_from(DTYPES))
        tensors = [
            lay_out(values(shape, dtype, seed).to(device), data.draw(layout_of(shape)))
            for seed, _ in enumerate(record.inputs)
        ]
        results = call(record, *tensors)
        expected = call(record, *(tensor.contiguous() for tensor in tensors))
        for result, exact in zip(results, expected, strict=True):
            assert_same_bits(result, exact, f"{record.name} {shape} {[t.stride() for t in tensors]}")
        check_strides(record, tensors, results)

    check()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("record", BROADCASTING, ids=lambda record: record.name)
def test_broadcasting(record: OpSpec, device: str) -> None:
    @settings(max_examples=40, deadline=None)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        drawn = data.draw(broadcast_shapes(len(record.inputs)))
        dtype = data.draw(st.sampled_from(DTYPES))
        tensors = [values(shape, dtype, seed).to(device) for seed, shape in enumerate(drawn)]
        tensors = [
            lay_out(tensor, data.draw(layout_of(tuple(tensor.shape)))) if data.draw(st.booleans()) else tensor
            for tensor in tensors
        ]
        (result,) = call(record, *tensors)
        whole = [tensor.contiguous() for tensor in torch.broadcast_tensors(*tensors)]
        (expected,) = call(record, *whole)
        assert_same_bits(result, expected, f"{record.name} {drawn} {[t.stride() for t in tensors]}")
        if record.name in EXACT:
            torch.testing.assert_close(result, EXACT[record.name](*tensors), rtol=0, atol=0, equal_nan=True)
        check_strides(record, tensors, (result,))

    check()


# Each pair takes a separate path in the CUDA kernels: aligned and misaligned rows and columns, a scalar,
# transposes, two broadcast operands, and rows shorter than a vector.
PAIRS = [
    ((64, 128), (128,)),
    ((64, 127), (127,)),
    ((64, 128), (64, 1)),
    ((63, 127), (63, 1)),
    ((1000, 3), (3,)),
    ((1000, 3), (1000, 1)),
    ((70, 1), (1, 90)),
    ((64, 1, 32), (1, 16, 32)),
    ((300_007,), ()),
    ((), (300_007,)),
    ((2, 3, 50, 70), (3, 1, 1)),
    ((5, 1, 7, 1, 9, 1), (1, 6, 1, 8, 1, 10)),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views_of_large_tensors(dtype: torch.dtype, device: str) -> None:
    """They give the bits of contiguous tensors, aligned or not, and so do operands that broadcast."""
    for pair in PAIRS:
        a, b = (values(shape, dtype, seed).to(device) for seed, shape in enumerate(pair))
        whole = [tensor.contiguous() for tensor in torch.broadcast_tensors(a, b)]
        assert_same_bits(torch_op.add(a, b), torch_op.add(*whole).contiguous(), f"{pair}")
    memory = values((520, 1030), dtype, 1).to(device)
    for columns in (slice(0, 1024), slice(1, 1025), slice(3, 1030), slice(None, None, 2)):
        for x in (memory[:, columns], memory[:, columns].t(), memory[::3, columns]):
            y = values(tuple(x.shape), dtype, 2).to(device)
            for a, b in ((x, y), (y, x), (x, x[:1]), (x[:, :1], y), (x.t(), y.t()), (x, x[0, 0])):
                result = torch_op.add(a, b)
                expected = torch_op.add(*(t.contiguous() for t in torch.broadcast_tensors(a, b)))
                assert_same_bits(result, expected, f"{tuple(a.shape)} {a.stride()} {b.stride()}")


@pytest.mark.parametrize("strides", [((2, 2, 0), (1, 8, 2)), ((3, 6, 1), (2, 1, 1))])
def test_the_fake_knows_dense_inputs_with_odd_strides_of_size_1(strides: Any) -> None:
    """A dense second input determines the strides. The stride of its dimension of size 1 does not matter."""
    tensors = [torch.empty_strided((2, 1, 2), each) for each in strides]
    check_strides(torch_op.records()["add"], tensors, [torch_op.add(*tensors)])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["add", "mul", "pow"])
def test_gradients_of_broadcast_inputs(name: str, device: str) -> None:
    op = getattr(torch_op, name)
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> torch.Tensor:
        x = torch.rand(shape, generator=generator, dtype=torch.float64) + 0.5
        return x.to(device).requires_grad_()

    for pair in (((3, 4), (4,)), ((3, 1), (1, 4)), ((2, 1, 3), ()), ((), (2, 3)), ((1, 3), (2, 3))):
        a, b = leaf(*pair[0]), leaf(*pair[1])
        assert gradcheck(op, (a, b)) and gradgradcheck(op, (a, b)), pair
    assert gradcheck(lambda x: op(x.t(), x), (leaf(3, 3),))


@pytest.mark.parametrize("device", DEVICES)
def test_derivatives_of_pow_where_it_has_edges(device: str) -> None:
    numbers = [0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 0.5, -0.5, 3.0, math.inf, -math.inf, math.nan]
    a, b = (x.to(device) for x in torch.meshgrid([torch.tensor(numbers).double()] * 2, indexing="ij"))
    found: list[torch.Tensor] = []
    expected: list[torch.Tensor] = []
    for op, into in ((torch_op.pow, found), (torch.pow, expected)):
        x, y = a.clone().requires_grad_(), b.clone().requires_grad_()
        result = op(x, y)
        into += [result, *torch.autograd.grad(result.sum(), (x, y))]
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, equal_nan=True, rtol=1e-14, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1, 2, 3, 7, 8, 64, 65, 255, 256, 1000])
def test_packed_swiglu_is_swiglu_of_its_halves(columns: int, dtype: torch.dtype, device: str) -> None:
    for rows in ((), (1,), (33,), (2, 5)):
        wide = values((*rows, 2 * columns + 3), dtype, columns).to(device)
        grad = values((*rows, columns), dtype, columns + 1).to(device)
        for x in (wide[..., : 2 * columns].contiguous(), wide[..., : 2 * columns], wide[..., 1:-2]):
            gate, value = x[..., :columns], x[..., columns:]
            assert_same_bits(torch_op.swiglu_packed(x), torch_op.swiglu(value, gate), f"{rows} {columns}")
            grad_x, grad_gate = torch_op.swiglu_backward(grad, value, gate)
            expected, found = torch.cat((grad_gate, grad_x), -1), torch_op.swiglu_packed_backward(grad, x)
            assert_same_bits(found, expected, f"backward {rows} {columns}")


@pytest.mark.cuda
def test_more_elements_than_32_bits_count() -> None:
    rows, columns = (1 << 21) + 3, 1 << 10  # 2^31 + 3072 elements
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of GPU memory")
    x = torch.zeros(rows, columns, dtype=torch.bfloat16, device="cuda")
    row = torch.arange(columns, device="cuda").to(x.dtype)
    column = torch.arange(rows, device="cuda").to(x.dtype)[:, None]
    ends = (slice(0, 2), slice(rows // 2 - 1, rows // 2 + 2), slice(rows - 2, rows))
    for operand in (row, column, row[0] + 3, row.expand(rows, columns)):
        y = torch_op.add(x, operand)
        for part in ends:
            expected = operand[part] if operand.dim() == 2 else operand
            assert torch.equal(y[part], expected.expand(y[part].shape)), tuple(operand.stride())
        del y
    view = torch.zeros(rows, columns + 1, dtype=torch.bfloat16, device="cuda")[:, 1:]  # misaligned rows
    y = torch_op.add(view, row)
    for part in ends:
        assert torch.equal(y[part], row.expand(y[part].shape))
