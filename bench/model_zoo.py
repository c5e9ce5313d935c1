"""The models of `twinop bench models`: transformers with random weights, and a DiT block in plain torch."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .encoder_models import TINY, Encoder, Size, batch, encoder, perturbed

Make = Callable[[Size, str], nn.Module]
"""(size, attention implementation) -> a model in float32."""

# A smaller vocabulary than BERT's: embeddings are read by row, and a large table only makes large files.
BASE = Size(vocabulary=2000)
RIGHT, ANY = "right", "any"


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        make: the model.
        inputs: of forward by name, for a size.
        small: the size that `--small` takes instead.
        padding: where the mask has zeros, "" for models without a mask.
        model_type: what ONNX Runtime's optimizer is told.
        autotune: whether there is a column for max-autotune.
        graph: run as a CUDA graph where a column can; then the wall time counts.
        exported: the attention implementation in the dynamo exports.
        shares: the row of the same model whose other exports this row takes; the mask is only an input.
        most_ms: the time that twinop's column may take on an H200.
        share: the share of the fastest other column that it may take.
    """

    name: str
    dtype: str
    make: Make
    inputs: Callable[[Size, str], dict[str, Tensor]]
    size: Size
    small: Size
    model_type: str
    padding: str = ""
    autotune: bool = False
    graph: bool = False
    shares: str = ""
    exported: str = "sdpa"
    most_ms: float | None = None
    share: float = 1.0

    @property
    def title(self) -> str:
        """What the documentation calls it."""
        where = ", as a CUDA graph" if self.graph else ""
        mask = {RIGHT: ", right padding", ANY: ", any mask", "": ""}[self.padding]
        shape = "64 x 224 x 224" if self.make is _vit else f"{self.size.batch} x {self.size.tokens}"
        kinds = {"float16": "fp16", "bfloat16": "bf16"}
        return f"{NAMES[self.make]}, {shape}{mask}, {kinds[self.dtype]}{where}"

    def model(self, small: bool, attention: str = "sdpa") -> nn.Module:
        """Returns the model in float32 and eval mode; always with the same weights."""
        torch.manual_seed(0)
        return perturbed(self.make(self.small if small else self.size, attention)).eval()

    def batch(self, small: bool, count: int | None = None) -> dict[str, Tensor]:
        """Returns inputs by name, the same each time, floats in float32.

        Args:
            count: the batch size, if not the row's own.
        """
        size = self.small if small else self.size
        return self.inputs(replace(size, batch=count or size.batch), self.padding)

    def stored(self, column: str) -> str:
        """Returns the name of a column's file."""
        owner = self.name if column == "twinop" else self.shares or self.name
        return f"{owner}-{column}"


# ------------------------------------------------------------------------------------------- inputs


def text(size: Size, padding: str) -> dict[str, Tensor]:
    """Token ids and a mask: a quarter of the last sentence hidden, or tokens here and there in all."""
    ids, mask = batch(size, padding=size.tokens // 4)
    if padding == ANY:
        generator = torch.Generator().manual_seed(1)
        mask = (torch.rand(mask.shape, generator=generator) > 0.1).long()
    return {"ids": ids, "mask": mask}


def pixels(size: Size, padding: str) -> dict[str, Tensor]:
    side = 16 * round(size.tokens**0.5)
    return {"values": normal(size.batch, 3, side, side)}


def spectra(size: Size, padding: str) -> dict[str, Tensor]:
    return {"values": normal(size.batch, 80, 2 * size.tokens)}


def latents(size: Size, padding: str) -> dict[str, Tensor]:
    return {
        "values": normal(size.batch, size.tokens, size.width),
        "condition": normal(size.batch, size.width, seed=1),
    }


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Returns random numbers, the same for each seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------------------------------- models


class Values(nn.Module):
    """Maps floats to the last hidden state of a model of transformers."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, values: Tensor) -> Tensor:
        found = self.body(values)
        return found if isinstance(found, Tensor) else found.last_hidden_state


class DiTBlock(nn.Module):
    """A block of a diffusion transformer, whose norms take scale and shift from the condition (adaLN)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, values: Tensor, condition: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition)[:, None].chunk(6, dim=-1)
        x = self.norm1(values) * (1 + scale1) + shift1
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        attended = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        values = values + gate1 * self.out(attended)
        x = self.norm2(values) * (1 + scale2) + shift2
        return values + gate2 * self.mlp(x)


def _bert(size: Size, attention: str) -> nn.Module:
    return encoder("bert", size, attention=attention)


def _llama(size: Size, attention: str) -> nn.Module:
    return encoder("llama", size, attention=attention)


def _llama_block(size: Size, attention: str) -> nn.Module:
    return encoder("llama", size, attention=attention, num_key_value_heads=size.heads // 4)


def _vit(size: Size, attention: str) -> nn.Module:
    from transformers import ViTConfig, ViTModel

    side = 16 * round(size.tokens**0.5)
    config = ViTConfig(
        hidden_size=size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=4 * size.width,
        image_size=side,
        patch_size=16,
        hidden_dropout_prob=0.0,
        attn_implementation=attention,
    )
    return Values(ViTModel(config, add_pooling_layer=False))


def _whisper(size: Size, attention: str) -> nn.Module:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = WhisperConfig(
        d_model=size.width,
        encoder_layers=size.layers,
        encoder_attention_heads=size.heads,
        encoder_ffn_dim=4 * size.width,
        max_source_positions=size.tokens,
        attn_implementation=attention,
    )
    return Values(WhisperEncoder(config))


def _t5(size: Size, attention: str) -> nn.Module:
    from transformers import T5Config, T5EncoderModel

    config = T5Config(
        vocab_size=size.vocabulary,
        d_model=size.width,
        d_kv=size.width // size.heads,
        d_ff=4 * size.width,
        num_layers=size.layers,
        num_heads=size.heads,
        **({"attn_implementation": attention} if attention != "sdpa" else {}),  # where there is no other
    )
    return Encoder(T5EncoderModel(config))


def _dit(size: Size, attention: str) -> nn.Module:
    return DiTBlock(size.width, size.heads)


# ------------------------------------------------------------------------------------------- rows

NAMES: dict[Make, str] = {
    _bert: "BERT base",
    _llama: "Llama-like, 12 layers of 768",
    _llama_block: "Llama-like, 4 layers of 2048, 8 heads for k and v",
    _vit: "ViT-B/16",
    _whisper: "Whisper-small encoder",
    _t5: "T5-base encoder",
    _dit: "DiT block",
}
_BERT: dict[str, Any] = {
    "make": _bert,
    "inputs": text,
    "small": TINY,
    "model_type": "bert",
}
# ONNX Runtime's optimizer has no type for Llama: its own conversion of Llama passes gpt2.
_LLAMA: dict[str, Any] = _BERT | {"make": _llama, "padding": RIGHT, "model_type": "gpt2"}

ROWS = {
    row.name: row
    for row in (
        Row(
            "bert-fp16", "float16", size=BASE, padding=RIGHT, autotune=True, most_ms=6.6, share=0.87, **_BERT
        ),
        Row("bert-bf16", "bfloat16", size=BASE, padding=RIGHT, most_ms=6.6, **_BERT),
        Row("bert-any-mask", "float16", size=BASE, padding=ANY, shares="bert-fp16", most_ms=7.3, **_BERT),
        Row("llama-bf16", "bfloat16", size=BASE, autotune=True, most_ms=8.4, **_LLAMA),
        Row("llama-fp16", "float16", size=BASE, most_ms=8.4, **_LLAMA),
        Row(
            "llama-block",
            "bfloat16",
            size=Size(layers=4, width=2048, heads=32, vocabulary=2000, batch=8, tokens=1024),
            share=0.9,
            autotune=True,
            **(_LLAMA | {"make": _llama_block}),
        ),
        Row(
            "vit",
            "float16",
            make=_vit,
            inputs=pixels,
            size=replace(BASE, batch=64, tokens=196),
            small=replace(TINY, tokens=4),
            model_type="vit",
        ),
        Row(
            "whisper",
            "float16",
            make=_whisper,
            inputs=spectra,
            size=replace(BASE, batch=8, tokens=1500),
            small=TINY,
            model_type="bart",
        ),
        Row(
            "t5",
            "bfloat16",
            make=_t5,
            inputs=text,
            size=replace(BASE, batch=16),
            small=TINY,
            model_type="t5",
            exported="eager",  # of the other, the exporter makes views that do not fit
            padding=RIGHT,
        ),
        Row(
            "dit",
            "float16",
            make=_dit,
            inputs=latents,
            size=Size(layers=1, width=1024, heads=16, batch=8, tokens=1024),
            small=TINY,
            model_type="mmdit",
        ),
        # Last, when no export runs beside it any more: its wall time counts.
        Row(
            "bert-1x128",
            "float16",
            size=replace(BASE, batch=1, tokens=128),
            padding=RIGHT,
            graph=True,
            autotune=True,
            **_BERT,
        ),
    )
}
