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


class Defaults(Classifier):
    """A number and a flag with defaults, which a caller may give by name."""

    def forward(
        self, x: torch.Tensor, scale: float = 2.0, keep: int = 0, probabilities: bool = False
    ) -> torch.Tensor:
        y = super().forward(x)[:, -keep:] * scale
        return y.softmax(-1) if probabilities else y


class Hooked(nn.Module):
    """One layer runs a forward of its own, as the hooks of some libraries leave it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU())
        before = self.layers[2].forward
        self.layers[2].forward = lambda x: before(x) * 0.5 + x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


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


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH, 2, batch_first=True, bidirectional=True)
        self.head = nn.Sequential(nn.LayerNorm(2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.gru(x)[0])


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
    Architecture("defaults", Defaults, features, constants={"probabilities": True}),
    Architecture("hooked_forward", Hooked, features),
    Architecture("multihead_attention", Attention, padded, BOTH),
    Architecture("transformer_encoder", Encoder, padded),
    Architecture("transformer_encoder_norm_first", lambda: Encoder(norm_first=True), padded),
    Architecture("transformer", Translator, sentences),
    Architecture("gru", Recurrent, sequence, BOTH),
    Architecture("unet", UNet, lambda batch, length: {"x": torch.randn(batch, 3, 16, 16)}),
)
