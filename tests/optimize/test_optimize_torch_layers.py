"""Tests of the optimizer on torch's own layers with attention, as torch's dynamo exporter writes them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from optimizing import optimized, types
from other_sizes import assert_same

from twinop.export import export

pytestmark = pytest.mark.usefixtures("one_thread")


class Cross(torch.nn.Module):
    """Attention to another sequence, whose packed weight is cut in two."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.attention = torch.nn.MultiheadAttention(16, 2, batch_first=batch_first)

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.attention(x, other, other, need_weights=False)[0]
        return result


def made(model: torch.nn.Module, folder: Path, is_open: bool, **sizes: tuple[int, ...]) -> dict[str, int]:
    """Exports a layer and returns the nodes of the optimised model.

    Args:
        is_open: the lengths may vary, and the batch, which is the same for all inputs.
    """
    options: dict[str, Any] = {"verify": False}
    if is_open:
        batch = 0 if getattr(model, "batch_first", True) else 1
        options["dynamic"] = {name: {batch: "batch", 1 - batch: f"{name}_length"} for name in sizes}
    args = tuple(torch.randn(size) for size in sizes.values())
    export(model.eval(), args, folder / "old.onnx", exporter="dynamo", **options, optimize=False)
    report, model_made = optimized(folder / "old.onnx", folder)
    assert report.skipped == {}
    return types(model_made)


@pytest.mark.parametrize(
    ("batch_first", "is_open"),
    [
        pytest.param(False, False, id="tokens first, fixed"),
        pytest.param(True, True, id="batch first, open"),
        pytest.param(False, True, id="tokens first, open", marks=pytest.mark.slow),
        pytest.param(True, False, id="batch first, fixed", marks=pytest.mark.slow),
    ],
)
def test_encoder_layer(batch_first: bool, is_open: bool, tmp_path: Path) -> None:
    """If tokens are first, one transpose before q, k and v and one behind the attention remain."""
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=batch_first)
    kinds = made(layer, tmp_path, is_open, src=(2, 5, 16))
    wanted = {"CustomLinear": 6 if is_open else 4, "MultiHeadAttention": 1, "CustomAddLayerNorm": 2}
    wanted |= {} if is_open else {"Split": 1}  # of the merged q, k and v
    wanted |= {} if batch_first else {"Transpose": 2}
    assert kinds == wanted
    for size in ((1, 7, 16), (3, 4, 16)) if is_open else [(2, 5, 16)]:
        assert_same(tmp_path, src=size)


@pytest.mark.parametrize(
    "batch_first",
    [
        pytest.param(False, id="tokens first"),
        pytest.param(True, id="batch first", marks=pytest.mark.slow),
    ],
)
def test_cross_attention(batch_first: bool, tmp_path: Path) -> None:
    other = (2, 7, 16) if batch_first else (7, 5, 16)
    kinds = made(Cross(batch_first), tmp_path, True, x=(2, 5, 16), other=other)
    assert kinds == {"CustomLinear": 4, "MultiHeadAttention": 1} | ({} if batch_first else {"Transpose": 3})
    for a, b in ((1, 3), (4, 2)):
        other = (a, 9, 16) if batch_first else (9, b, 16)
        assert_same(tmp_path, x=(a, b, 16), other=other)
