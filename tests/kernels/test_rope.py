"""rope: both layouts, tables of one or of all sequences, errors. The tests of all ops cover the rest."""

from typing import Any

import pytest
import torch
from linear_calls import random
from same_bits import assert_same_bits
from samples import DEVICES, RECORDS, library_of

from twinop import torch_op
from twinop.errors import RecordError
from twinop.testing.one_node import bits, make_session, one_node_model, run_bound

DTYPES = {
    "float32": (torch.float32, torch.float32),
    "float16": (torch.float16, torch.float16),
    "float16, tables in float32": (torch.float16, torch.float32),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "bfloat16, tables in float32": (torch.bfloat16, torch.float32),
    "float64": (torch.float64, torch.float64),
}


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: str) -> torch.Tensor:
    """x * cos + rotate(x) * sin in fp64, as transformers writes it."""
    heads = x.double().unflatten(-1, (-1, 2 * cos.shape[-1]))
    if layout == "half":
        a, b = heads.chunk(2, -1)
        other = torch.cat([-b, a], -1)
        tables = [torch.cat([t, t], -1) for t in (cos, sin)]
    else:
        other = torch.stack([-heads[..., 1::2], heads[..., ::2]], -1).flatten(-2)
        tables = [t.repeat_interleave(2, -1) for t in (cos, sin)]
    c, s = (table.double().unsqueeze(2) for table in tables)
    return (heads * c + other * s).flatten(2)


def given(
    sizes: tuple[int, ...], tables: int, dtypes: tuple[torch.dtype, ...], device: str
) -> list[torch.Tensor]:
    batch, length, q_heads, k_heads, pairs = sizes
    angles = 3 * random(tables, length, pairs, dtype=torch.float64)
    q, k = (random(batch, length, heads * 2 * pairs, dtype=dtypes[0]) for heads in (q_heads, k_heads))
    return [each.to(device) for each in (q, k, angles.cos().to(dtypes[1]), angles.sin().to(dtypes[1]))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=list(DTYPES))
def test_values(dtypes: tuple[torch.dtype, ...], layout: str, device: str) -> None:
    """Heads that vectors divide and others, one sequence and several, aligned and not."""
    for sizes in ((2, 5, 12, 12, 32), (3, 4, 8, 2, 64), (1, 1, 1, 1, 1), (2, 3, 3, 1, 5), (1, 70, 2, 5, 129)):
        for tables in {1, sizes[0]}:
            tensors = given(sizes, tables, dtypes, device)
            shifted = [torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape) for t in tensors]
            expected = [turned(x, tensors[2], tensors[3], layout) for x in tensors[:2]]
            for q, k, cos, sin in (tensors, shifted):
                for found, exact in zip(torch_op.rope(q, k, cos, sin, layout=layout), expected, strict=True):
                    bound = 1.5 * torch.finfo(q.dtype).eps * float(exact.abs().max())
                    assert float((found.double() - exact).abs().max()) <= bound, sizes


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_the_end_of_a_head_passes(dtype: str, layout: str, device: str) -> None:
    """It keeps its bits; the numbers before it turn as in heads of their own. In place, too."""
    for passing, sizes in ((96, (2, 5, 4, 2, 16)), (3, (1, 3, 2, 1, 5)), (1, (2, 2, 1, 3, 129))):
        q, k, cos, sin = given(sizes, 1, DTYPES[dtype], device)
        turning = 2 * sizes[-1]
        rest = [
            random(*x.shape[:2], heads, passing, dtype=x.dtype).to(device)
            for x, heads in zip((q, k), sizes[2:4], strict=True)
        ]
        alone = torch_op.rope(q, k, cos, sin, layout=layout)
        whole, expected = (
            [
                torch.cat([x.unflatten(-1, (-1, turning)), y], -1).flatten(2)
                for x, y in zip(each, rest, strict=True)
            ]
            for each in ((q, k), alone)
        )
        size = turning + passing
        for found, exact in zip(
            torch_op.rope(*whole, cos, sin, layout=layout, head_size=size), expected, strict=True
        ):
            assert_same_bits(found, exact, f"{sizes}")
        turn_in_place(whole, cos, sin, expected, in_onnxruntime(device, layout, dtype, head_size=size))


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (6, "head_size is 6, and cos has 4 angles; expected a size of at least 8, or 0"),
        (10, "q and k have rows of 12 and 12 numbers; expected whole heads of 10"),
    ],
)
def test_a_head_size_that_does_not_fit(size: int, message: str) -> None:
    q, k, cos = random(2, 3, 12), random(2, 3, 12), random(1, 3, 4)
    with pytest.raises((RuntimeError, RecordError), match=message):
        torch_op.rope(q, k, cos, cos, head_size=size)


def in_onnxruntime(
    device: str, layout: str, dtype: str = "float32", head_size: int = 0, **options: Any
) -> Any:
    record = RECORDS["rope"]
    dtypes = dict.fromkeys([*(entry.name for entry in record.inputs), *record.outputs], dtype)
    model = one_node_model(record, dtypes, [True] * 4, {"layout": layout, "head_size": head_size})
    return make_session(model, library_of(record), device, **options)


def turn_in_place(whole: Any, cos: torch.Tensor, sin: torch.Tensor, expected: Any, session: Any) -> None:
    """ONNX Runtime may give an output the memory of its input."""
    given = {"q": whole[0], "k": whole[1], "cos": cos, "sin": sin}
    run_bound(session, given, {"turned_q": whole[0], "turned_k": whole[1]})
    for found, exact in zip(whole, expected, strict=True):
        assert_same_bits(found, exact, f"in place, {tuple(found.shape)}")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_in_place(dtype: str, layout: str, device: str) -> None:
    session = in_onnxruntime(device, layout, dtype)
    for sizes in ((2, 5, 12, 4, 32), (1, 3, 2, 1, 129)):
        q, k, cos, sin = given(sizes, 1, DTYPES[dtype], device)
        expected = torch_op.rope(q, k, cos, sin, layout=layout)
        turn_in_place((q, k), cos, sin, expected, session)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_nan_is_one(dtype: str, device: str) -> None:
    """Which of two NaNs a sum returns would depend on the instruction set."""
    q, k, cos, sin = given((1, 1, 2, 1, 129), 1, DTYPES[dtype], device)
    integer = bits(q)
    nan = torch.tensor(float("nan"), dtype=q.dtype, device=device)
    integer[..., ::3] = bits(nan) + 1
    integer[..., ::6] = bits(-nan) + 2
    for layout in ("half", "interleaved"):
        found, _ = torch_op.rope(integer.view(q.dtype), k, cos, sin, layout=layout)
        assert bits(found)[found.isnan()].unique().numel() == 1
        assert 0 < int(found.isnan().sum()) < found.numel()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (((2, 3, 10), (2, 3, 8), (1, 3, 4)), "q and k have rows of 10 and 8 numbers; expected whole heads"),
        (((2, 3, 8), (2, 3, 8), (3, 3, 4)), "cos is for 3 sequences; expected 1, for all, or 2, as q has"),
        (((2, 3, 8), (2, 3, 8), (1, 3, 0)), "cos has rows without numbers; expected one for each pair"),
        (((2, 3, 8), (2, 4, 8), (1, 3, 4)), r"k has shape \[2, 4, 8\]"),
        (((2, 3, 8), (2, 3, 8), (1, 5, 4)), r"cos has shape \[1, 5, 4\]"),
        (((6, 8), (6, 8), (1, 6, 4)), "q"),
    ],
)
def test_sizes_that_do_not_fit(sizes: tuple[tuple[int, ...], ...], message: str) -> None:
    q, k, cos = (random(*each) for each in sizes)
    with pytest.raises((RuntimeError, RecordError), match=message):
        torch_op.rope(q, k, cos, cos)
