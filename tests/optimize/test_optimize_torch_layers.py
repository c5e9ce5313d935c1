"""Tests of the optimizer on torch's own layers with attention, as torch's dynamo exporter writes them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from optimizing import optimized, types
from other_sizes import assert_same

from twinop.export import export

pytestmark = pytest.mark.usefixtures("one_thread")


class Cross(torch.nn.Module):
    """Attention to another sequence, whose packed weight is cut in two."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(16, 2)

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.attention(x, other, other)[0]
        return result


def made(model: Any, folder: Path, **sizes: tuple[int, ...]) -> dict[str, int]:
    """Exports a layer of which tokens come first, and returns the nodes of the optimised model.

    The lengths of several inputs may vary, and the batch, which is the same for them, by other names.
    """
    path, options = folder / "old.onnx", dict[str, Any](verify=False, optimize=False)
    if len(sizes) > 1:
        options["dynamic"] = {name: {1: f"batch_of_{name}", 0: f"{name}_length"} for name in sizes}
    args = tuple(torch.randn(size) for size in sizes.values())
    export(model.eval(), args, path, exporter="dynamo", **options)
    report, model_made = optimized(path, folder)
    assert report.skipped == {}
    return types(model_made)


def test_encoder_layer(tmp_path: Path) -> None:
    """One transpose before q, k and v and one behind the attention remain."""
    kinds = made(torch.nn.TransformerEncoderLayer(16, 2, 32), tmp_path, src=(2, 5, 16))
    wanted = {"CustomLinear": 4, "Split": 1}  # of the merged q, k and v
    assert kinds == wanted | {"MultiHeadAttention": 1, "CustomAddLayerNorm": 2, "Transpose": 2}
    assert_same(tmp_path, src=(2, 5, 16))


def test_cross_attention(tmp_path: Path) -> None:
    """The weights that nobody reads are not computed. torch.export may name the batch twice."""
    kinds = made(Cross(), tmp_path, x=(2, 5, 16), other=(7, 5, 16))
    assert kinds == {"CustomLinear": 4, "MultiHeadAttention": 1, "Transpose": 3}
    for a, b in ((1, 3), (4, 2)):
        assert_same(tmp_path, x=(a, b, 16), other=(9, b, 16))


class Masked(torch.nn.Module):
    """nn.MultiheadAttention as it is by default, with its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        causal = torch.nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        result: torch.Tensor = self.attention(x, x, x, mask == 0, attn_mask=causal)[0]
        return result


def test_masks_of_batched_heads(tmp_path: Path) -> None:
    mask = torch.ones(3, 5, dtype=torch.int64)
    mask[1, 3:] = 0
    options = dict[str, Any](dynamic={name: {0: "B", 1: "S"} for name in ("x", "mask")}, optimize=False)
    export(Masked().eval(), (torch.randn(3, 5, 16), mask), tmp_path / "old.onnx", verify=False, **options)
    for device in ("cpu", "cuda"):
        report, _ = optimized(tmp_path / "old.onnx", tmp_path, device=device)
        assert report.fused["attention"] == 1 and not report.skipped, device
        for batch in (1, 4):
            shown = np.ones((batch, 7), np.int64)
            shown[0, 4:] = 0
            assert_same(tmp_path, x=(batch, 7, 16), mask=shown)


class Disentangled(torch.nn.Module):
    """Attention as DeBERTa's: heads in batches, sums of scores; hidden tokens see nothing."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        heads = x.view(*x.shape[:2], 2, 8).permute(0, 2, 1, 3).contiguous().view(-1, x.size(1), 8)
        turned = heads.transpose(-1, -2)
        scores = torch.bmm(heads, turned / 3) + torch.bmm(heads.sin(), turned).sin()
        scores = scores.view(-1, 2, scores.size(-2), scores.size(-1))
        shown = mask[:, None, None] * mask[:, None, :, None]
        weights = scores.masked_fill(shown == 0, torch.finfo(torch.float32).min).softmax(-1)
        y = torch.bmm(weights.view(-1, x.size(1), x.size(1)), heads).view(-1, 2, x.size(1), 8)
        return y.permute(0, 2, 1, 3).contiguous().view(x.shape)


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_hidden_tokens_of_batched_heads(exporter: str, tmp_path: Path) -> None:
    """In 16 bits what hidden tokens see is not what they saw; it is not compared, and attention is fused."""
    options = dict[str, Any](dynamic={name: {0: "B", 1: "S"} for name in ("x", "mask")}, optimize=False)
    args = (torch.randn(3, 5, 16), torch.ones(3, 5, dtype=torch.int64))
    export(Disentangled().eval(), args, tmp_path / "old.onnx", exporter=exporter, verify=False, **options)
    report, _ = optimized(tmp_path / "old.onnx", tmp_path, device="cuda", dtype="float16")
    assert report.fused["attention"] == 1 and not report.skipped
    assert any("compared where mask shows tokens" in note for note in report.notes)
