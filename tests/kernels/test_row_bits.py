"""A row has the same bits at every alignment, and among any number of other rows (rowwise/choose.h)."""

from collections.abc import Callable

import pytest
import torch
from same_bits import assert_same_bits
from samples import moved
from torch import Tensor

from twinop import torch_op
from twinop.torch_op.rules import as_tuple

pytestmark = pytest.mark.cuda

# Both sides of every limit in choices.h, for 16 bits and for float32, and odd widths.
WIDTHS = (1, 7, 8, 31, 32, 33, 64, 100, 128, 132, 197, 255, 256, 260, 264, 384, 512, 516, 520, 577, 768, 1000)
WIDER = (1023, 1024, 1032, 1280, 1500, 2048, 2056, 3072, 4095, 4096, 4100, 4104, 5120, 7168, 8192, 8200)
WIDEST = (11008, 14336, 16380, 16384, 16392, 20001, 32000, 50257, 65536)
COUNTS = (1, 100, 300)  # few, up to 512 or 132, and, of `most`, many

DTYPES = {
    "float16": (torch.float16, torch.float16),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "float32": (torch.float32, torch.float32),
    "float64": (torch.float64, torch.float64),
    "float16, weights in float32": (torch.float16, torch.float32),
    "bfloat16, weights in float32": (torch.bfloat16, torch.float32),
}


def most(columns: int) -> int:
    return 700 if columns < 20000 else 301


def rows_of(count: int, columns: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Rows of which some have a mean that is large beside their deviations: they take other phases."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(count, columns, device="cuda", generator=generator)
    x[::3] += 30
    return x.to(dtype)


def weights_of(columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    weight, bias = rows_of(2, columns, dtype, columns)
    return weight, bias


ROWS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], object]] = {
    "softmax": lambda x, r, w, b: torch_op.softmax(x, -1),
    "softmax_backward": lambda x, r, w, b: torch_op.softmax_backward(r, x, -1),
    "layer_norm": lambda x, r, w, b: torch_op.layer_norm(x, w, b),
    "layer_norm without weights": lambda x, r, w, b: torch_op.layer_norm(x),
    "rms_norm": lambda x, r, w, b: torch_op.rms_norm(x, w),
    "add_layer_norm": lambda x, r, w, b: torch_op.add_layer_norm(x, r, w, b),
    "add_rms_norm": lambda x, r, w, b: torch_op.add_rms_norm(x, r, w, b),
    "ada_layer_norm": lambda x, r, w, b: torch_op.ada_layer_norm(x[None], w[None], b[None])[0],
    "embed_layer_norm": lambda x, r, w, b: tuple(
        y[0] for y in torch_op.embed_layer_norm(x, torch.arange(len(x), device=x.device)[None], r[None], w, b)
    ),
}
BACKWARD: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], object]] = {
    "layer_norm": lambda x, g, w, b: torch_op.layer_norm_backward(g, x, w, b, None, -1, 1e-5),
    "rms_norm": lambda x, g, w, b: torch_op.rms_norm_backward(g, x, w, b, None, -1, 1e-6, 0),
}


def has_weights_of(name: str, dtypes: tuple[torch.dtype, ...]) -> bool:
    """Whether the op has weights of another type than its rows, if such are asked for."""
    return dtypes[0] == dtypes[1] or (
        "norm" in name and name not in ("layer_norm without weights", "embed_layer_norm")
    )


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=list(DTYPES))
@pytest.mark.parametrize("name", ROWS)
def test_rows(name: str, dtypes: tuple[torch.dtype, ...]) -> None:
    if not has_weights_of(name, dtypes):
        pytest.skip("the op has no such weights")
    for columns in (*WIDTHS, *WIDER, *WIDEST):
        count = most(columns)
        x, r = (rows_of(count, columns, dtypes[0], columns + i) for i in range(2))
        weight, bias = weights_of(columns, dtypes[1])
        expected = as_tuple(ROWS[name](x, r, weight, bias))
        for by in (0, 1, 4):
            given = [moved(each, by) for each in (weight, bias)]
            for few in (*COUNTS, count):
                here = [moved(each[count - few :], by) for each in (x, r)]
                for a, e in zip(as_tuple(ROWS[name](*here, *given)), expected, strict=True):
                    what = f"{few} of {count} rows of {columns}, {by} elements behind an aligned address"
                    assert_same_bits(a, e[count - few :], what)


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=list(DTYPES))
@pytest.mark.parametrize("name", BACKWARD)
def test_backward_and_column_sums(name: str, dtypes: tuple[torch.dtype, ...]) -> None:
    """The sums over rows have the same bits at every alignment; those of a row among any others, too."""
    for columns in (*WIDTHS, *WIDER, *WIDEST):
        count = most(columns)
        x, grad = (rows_of(count, columns, dtypes[0], columns + i) for i in range(2))
        weight, bias = weights_of(columns, dtypes[1])
        all_rows = as_tuple(BACKWARD[name](x, grad, weight, bias))[0]
        for few in (*COUNTS, count):
            tensors = [x[count - few :], grad[count - few :], weight, bias]
            aligned = as_tuple(BACKWARD[name](*tensors))
            what = f"{few} of {count} rows of {columns}"
            assert_same_bits(aligned[0], all_rows[count - few :], what)
            for by in (1, 4):
                given = [moved(each, by) for each in tensors]
                for a, e in zip(as_tuple(BACKWARD[name](*given)), aligned, strict=True):
                    assert_same_bits(a, e, f"{what}, {by} elements behind an aligned address")
