"""The models of `twinop bench models`: transformers with random weights, and a DiT block in plain torch."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .encoder_models import STYLES, TINY, Encoder, Size, Values, batch, from_transformers, normal, perturbed

# A smaller vocabulary than BERT's: embeddings are read by row, and a large table only makes large files.
BASE = Size(vocabulary=2000)
RIGHT, ANY = "right", "any"


@dataclass(frozen=True)
class Model:
    """A model of any size.

    Attributes:
        title: what the documentation calls it.
        make: (size, attention implementation) -> the model in float32.
        inputs: (size, padding) -> inputs of forward by name.
        model_type: what ONNX Runtime's optimizer is told.
        exported: the attention implementation in the dynamo exports.
    """

    title: str
    make: Callable[[Size, str], nn.Module]
    inputs: Callable[[Size, str], dict[str, Tensor]]
    model_type: str
    exported: str = "sdpa"


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        padding: where the mask has zeros, "" for models without a mask.
        autotune: whether there is a column for max-autotune.
        graph: run as a CUDA graph where a column can; then the wall time counts.
        most_ms: the time that twinop's column may take on an H200.
        share: the share of the fastest other column that it may take.
    """

    name: str
    model: Model
    dtype: str
    size: Size
    padding: str = ""
    autotune: bool = False
    graph: bool = False
    most_ms: float | None = None
    share: float = 1.0

    @property
    def title(self) -> str:
        """What the documentation calls it."""
        sides = [_side(self.size)] * 2 if self.model.inputs is pixels else [self.size.tokens]
        shape = " x ".join(map(str, [self.size.batch, *sides]))
        mask = {RIGHT: ", right padding", ANY: ", any mask", "": ""}[self.padding]
        dtype = {"float16": "fp16", "bfloat16": "bf16"}[self.dtype]
        return f"{self.model.title}, {shape}{mask}, {dtype}" + (", as a CUDA graph" if self.graph else "")

    def make(self, small: bool, attention: str = "sdpa") -> nn.Module:
        """Returns the model in float32 and eval mode; always with the same weights."""
        torch.manual_seed(0)
        return perturbed(self.model.make(TINY if small else self.size, attention)).eval()

    def batch(self, small: bool, count: int | None = None) -> dict[str, Tensor]:
        """Returns inputs by name, the same each time, floats in float32.

        Args:
            count: the batch size, if not the row's own.
        """
        size = TINY if small else self.size
        return self.model.inputs(replace(size, batch=count or size.batch), self.padding)


# ------------------------------------------------------------------------------------------- inputs


def text(size: Size, padding: str) -> dict[str, Tensor]:
    """Token ids and a mask: a quarter of the last sentence hidden, or tokens here and there in all."""
    ids, mask = batch(size, padding=size.tokens // 4)
    if padding == ANY:
        generator = torch.Generator().manual_seed(1)
        mask = (torch.rand(mask.shape, generator=generator) > 0.1).long()
    return {"ids": ids, "mask": mask}


def pixels(size: Size, padding: str) -> dict[str, Tensor]:
    return {"values": normal(size.batch, 3, _side(size), _side(size))}


def _side(size: Size) -> int:
    """Returns the height of a square image with a token for each 16 x 16 pixels."""
    return 16 * round(size.tokens**0.5)


def spectra(size: Size, padding: str) -> dict[str, Tensor]:
    return {"values": normal(size.batch, 80, 2 * size.tokens)}


def latents(size: Size, padding: str) -> dict[str, Tensor]:
    return {
        "values": normal(size.batch, size.tokens, size.width),
        "condition": normal(size.batch, size.width, seed=1),
    }


# ------------------------------------------------------------------------------------------- models


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


def _encoder(style: str, size: Size, attention: str, grouped: int = 1) -> nn.Module:
    """`grouped` heads share keys and values."""
    options: dict[str, Any] = {"num_key_value_heads": size.heads // grouped} if grouped > 1 else {}
    return Encoder(STYLES[style](size, attn_implementation=attention, **options))


def _vit(size: Size, attention: str) -> nn.Module:
    options = {"image_size": _side(size), "patch_size": 16, "attn_implementation": attention}
    return Values(from_transformers("ViTModel", size.options() | options, add_pooling_layer=False))


def _whisper(size: Size, attention: str) -> nn.Module:
    options = {"max_source_positions": size.tokens, "attn_implementation": attention}
    return Values(
        from_transformers("models.whisper.modeling_whisper.WhisperEncoder", size.options() | options)
    )


def _t5(size: Size, attention: str) -> nn.Module:
    options = size.options() | {"attn_implementation": attention}
    return Encoder(from_transformers("T5EncoderModel", options))


def _dit(size: Size, attention: str) -> nn.Module:
    return DiTBlock(size.width, size.heads)


# ------------------------------------------------------------------------------------------- rows

BERT = Model("BERT base", partial(_encoder, "bert"), text, "bert")
# ONNX Runtime's optimizer has no type for Llama: its own conversion of Llama passes gpt2.
LLAMA = Model("Llama-like, 12 layers of 768", partial(_encoder, "llama"), text, "gpt2")
_BLOCK = "Llama-like, 4 layers of 2048, 8 heads for k and v"
LLAMA_BLOCK = replace(LLAMA, title=_BLOCK, make=partial(_encoder, "llama", grouped=4))
VIT = Model("ViT-B/16", _vit, pixels, "vit")
WHISPER = Model("Whisper-small encoder", _whisper, spectra, "bart")
# With sdpa, torch's exporter makes views that do not fit.
T5 = Model("T5-base encoder", _t5, text, "t5", exported="eager")
DIT = Model("DiT block", _dit, latents, "mmdit")

_BLOCK_SIZE = Size(layers=4, width=2048, heads=32, vocabulary=2000, batch=8, tokens=1024)
_SENTENCE = replace(BASE, batch=1, tokens=128)
_DIT_SIZE = Size(layers=1, width=1024, heads=16, batch=8, tokens=1024)

ROWS = {
    row.name: row
    for row in (
        Row("bert-fp16", BERT, "float16", BASE, RIGHT, autotune=True, most_ms=6.6, share=0.87),
        Row("bert-bf16", BERT, "bfloat16", BASE, RIGHT, most_ms=6.6),
        Row("bert-any-mask", BERT, "float16", BASE, ANY, most_ms=7.3),
        Row("llama-bf16", LLAMA, "bfloat16", BASE, RIGHT, autotune=True, most_ms=8.4),
        Row("llama-fp16", LLAMA, "float16", BASE, RIGHT, most_ms=8.4),
        Row("llama-block", LLAMA_BLOCK, "bfloat16", _BLOCK_SIZE, RIGHT, autotune=True, share=0.9),
        Row("vit", VIT, "float16", replace(BASE, batch=64, tokens=196)),
        Row("whisper", WHISPER, "float16", replace(BASE, batch=8, tokens=1500)),
        Row("t5", T5, "bfloat16", replace(BASE, batch=16), RIGHT),
        Row("dit", DIT, "float16", _DIT_SIZE),
        # Last, when no export runs beside it any more: its wall time counts.
        Row("bert-1x128", BERT, "float16", _SENTENCE, RIGHT, autotune=True, graph=True),
    )
}
