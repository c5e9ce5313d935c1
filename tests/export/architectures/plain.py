"""torch's own modules, put together as people do."""

from typing import Any

import torch
from torch import nn

from architectures.common import Architecture, Tensors, padding

WIDTH = 32


def features(batch: int, length: int) -> Tensors:
    return {"x": torch.randn(batch, WIDTH)}


def sequence(batch: int, length: int) -> Tensors:
    return {"x": torch.randn(batch, length, WIDTH)}


def padded(batch: int, length: int) -> Tensors:
    return sequence(batch, length) | {"padding": padding(batch, length)}


class Classifier(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Linear(WIDTH, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(0.5),
            nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU(inplace=True), nn.Linear(64, 5),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        y, _ = self.attention(x, x, x, key_padding_mask=padding, need_weights=False)
        return self.norm(x + y)


class Encoder(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True, **options)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        return self.encoder(x, src_key_padding_mask=padding)


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(WIDTH, 4, 1, 1, 64, batch_first=True)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.transformer(source, target, tgt_mask=mask, tgt_is_causal=True)


def sentences(batch: int, length: int) -> Tensors:
    return {"source": torch.randn(batch, 7, WIDTH), "target": torch.randn(batch, 5, WIDTH)}


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.GroupNorm(4, 16), nn.SiLU())
        self.up = nn.Sequential(
            nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(16, 3, 3, 1, 1), nn.Sigmoid()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, self.up(self.down(x))], 1)


BOTH = {0: "batch", 1: "length"}
MODELS = (
    Architecture("classifier", Classifier, features),
    Architecture("multihead_attention", Attention, padded, BOTH),
    Architecture("transformer_encoder", Encoder, padded),
    Architecture("transformer_encoder_norm_first", lambda: Encoder(norm_first=True), padded),
    Architecture("transformer", Translator, sentences),
    Architecture("unet", UNet, lambda batch, length: {"x": torch.randn(batch, 3, 16, 16)}),
)
