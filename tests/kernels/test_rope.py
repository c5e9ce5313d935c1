"""rope in place, NaN and errors. The tests of all ops cover the rest."""

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


def given(
    sizes: tuple[int, ...], dtypes: tuple[torch.dtype, ...], device: str, passing: int = 0
) -> list[torch.Tensor]:
    batch, length, *counts, pairs = sizes
    angles = 3 * random(1, length, pairs, dtype=torch.float64)
    q, k = (random(batch, length, heads * (2 * pairs + passing), dtype=dtypes[0]) for heads in counts)
    return [each.to(device) for each in (q, k, angles.cos().to(dtypes[1]), angles.sin().to(dtypes[1]))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_in_place(dtype: str, layout: str, device: str) -> None:
    """ONNX Runtime may give an output the memory of its input. The end of a head may pass as it is."""
    record = RECORDS["rope"]
    dtypes = dict.fromkeys([*(entry.name for entry in record.inputs), *record.outputs], dtype)
    cases = (0, (2, 5, 12, 4, 32)), (0, (1, 3, 2, 1, 129)), (96, (2, 5, 4, 2, 16)), (3, (1, 3, 2, 1, 5))
    for passing, sizes in cases:
        q, k, cos, sin = given(sizes, DTYPES[dtype], device, passing)
        attributes = {"layout": layout, "head_size": 2 * sizes[-1] + passing}
        expected = torch_op.rope(q, k, cos, sin, **attributes)
        model = one_node_model(record, dtypes, [True] * 4, attributes)
        session = make_session(model, library_of(record), device)
        run_bound(session, {"q": q, "k": k, "cos": cos, "sin": sin}, {"turned_q": q, "turned_k": k})
        for found, exact in zip((q, k), expected, strict=True):
            assert_same_bits(found, exact, f"in place, {sizes}")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_nan_is_one(dtype: str, device: str) -> None:
    """Which of two NaNs a sum returns would depend on the instruction set."""
    q, k, cos, sin = given((1, 1, 2, 1, 129), DTYPES[dtype], device)
    integer = bits(q)
    nan = torch.tensor(float("nan"), dtype=q.dtype, device=device)
    integer[..., ::3] = bits(nan) + 1
    integer[..., ::6] = bits(-nan) + 2
    for layout in ("half", "interleaved"):
        found, _ = torch_op.rope(integer.view(q.dtype), k, cos, sin, layout=layout)
        assert bits(found)[found.isnan()].unique().numel() == 1
        assert 0 < int(found.isnan().sum()) < found.numel()


@pytest.mark.parametrize(
    ("q", "cos", "head_size", "message"),
    [
        ((2, 3, 10), (1, 3, 4), 0, "q and k have rows of 10 and 8 numbers; expected whole heads"),
        ((2, 3, 8), (3, 3, 4), 0, "cos is for 3 sequences; expected 1, for all, or 2, as q has"),
        ((2, 3, 8), (1, 3, 0), 0, "cos has rows without numbers; expected one for each pair"),
        ((2, 3, 12), (1, 3, 4), 6, "head_size is 6, and cos has 4 angles; expected a size of at least 8"),
        ((2, 3, 12), (1, 3, 4), 10, "q and k have rows of 12 and 8 numbers; expected whole heads of 10"),
        ((6, 8), (1, 6, 4), 0, "q"),
    ],
)
def test_sizes_that_do_not_fit(
    q: tuple[int, ...], cos: tuple[int, ...], head_size: int, message: str
) -> None:
    angles = random(*cos)
    with pytest.raises((RuntimeError, RecordError), match=message):
        torch_op.rope(random(*q), random(2, 3, 8), angles, angles, head_size=head_size)
