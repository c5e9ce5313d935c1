"""Models with random weights: whole models for lab/models.py, small ones for the tests.

torch and transformers make them.
"""

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Size:
    """The size of a model and of its batch."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 30522
    batch: int = 32
    tokens: int = 512
    inner: int = 0  # of the MLP; 0: four times the width

    def options(self) -> dict[str, Any]:
        """Returns the sizes by all names that configurations of transformers have for them; each has some."""
        names = {
            "intermediate_size hidden_dim ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim": self.inner
            or 4 * self.width,
            "hidden_size word_embed_proj_dim": self.width,
            "num_hidden_layers decoder_layers": self.layers,
            "num_attention_heads decoder_attention_heads": self.heads,
            "vocab_size": self.vocabulary,
            "d_kv": self.width // self.heads,
            "max_position_embeddings": max(512, self.tokens),
            "max_source_positions": self.tokens,
            "image_size": self.side,
            "patch_size": 16,
            "hidden_dropout_prob attention_probs_dropout_prob": 0.0,
            "use_cache": False,
        }
        return {name: value for several, value in names.items() for name in several.split()}

    @property
    def side(self) -> int:
        """Returns the height of a square image with a token for each 16 x 16 pixels."""
        return 16 * round(self.tokens**0.5)


TINY = Size(layers=2, width=64, heads=4, vocabulary=101, batch=2, tokens=16)


class Encoder(nn.Module):
    """Maps (token ids, attention mask of 1 or 0 per token) to the first output: hidden states, or logits."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        # Without a mask, transformers looks for packed sequences with torch.diff, which the TorchScript
        # exporter does not support.
        return self.body(input_ids=ids, attention_mask=mask)[0]


class Values(nn.Module):
    """Maps floats to the last hidden state."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, values: Tensor) -> Tensor:
        return self.body(values).last_hidden_state


def transformer(
    name: str, kind: type[nn.Module], size: Size, attention: str, *, grouped: int = 1, **arguments: Any
) -> nn.Module:
    """Returns a model of transformers, wrapped; `grouped` heads share keys and values."""
    model = pkgutil.resolve_name(f"transformers.{name}")
    options = {"attn_implementation": attention, "num_key_value_heads": size.heads // grouped}
    return kind(model(model.config_class(**size.options() | options), **arguments))


def encoder(style: str, size: Size, attention: str = "eager") -> nn.Module:
    """Returns a "bert" or a "llama"; attention "sdpa" is one Attention node in ONNX, from opset 23 on."""
    return {"bert": BERT, "llama": LLAMA}[style].drawn(size, attention)


def batch(size: Size, seed: int = 0, padding: int = 0) -> tuple[Tensor, Tensor]:
    """Returns token ids and their mask, int64[batch, tokens], without `padding` tokens of the last row."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, size.vocabulary, (size.batch, size.tokens), generator=generator)
    mask = torch.ones_like(ids)
    mask[-1, size.tokens - padding :] = 0
    return ids, mask


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Returns random numbers, the same for each seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def cast(inputs: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns the inputs with their floats in this dtype."""
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}


# A smaller vocabulary than BERT's: embeddings are read by row, and a large table only makes large files.
BASE = Size(vocabulary=2000)


@dataclass(frozen=True)
class Model:
    """A model of any size."""

    make: Callable[[Size, str], nn.Module]  # (size, attention implementation) -> the model in float32
    inputs: Callable[[Size], dict[str, Tensor]]  # size -> inputs of forward by name
    model_type: str  # what ONNX Runtime's optimizer is told
    exported: str = "sdpa"  # the attention implementation in the dynamo exports

    def drawn(self, size: Size, attention: str) -> nn.Module:
        """Returns the model in float32 and eval mode; always with the same weights."""
        torch.manual_seed(0)
        model = self.make(size, attention)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:  # a norm is 1 and a bias 0, which would hide errors
                    parameter.add_(0.1 * torch.randn_like(parameter))
        return model.eval()


@dataclass(frozen=True)
class Row:
    """A row of the table. `graph`: it is a CUDA graph where a column can; then the wall time counts."""

    model: Model
    dtype: str
    size: Size
    graph: bool = False

    def make(self, small: bool, attention: str = "sdpa") -> nn.Module:
        """Returns the model in float32 and eval mode; always with the same weights."""
        return self.model.drawn(TINY if small else self.size, attention)

    def batch(self, small: bool, count: int | None = None) -> dict[str, Tensor]:
        """Returns inputs by name, the same each time, floats in float32; `count`: another batch size."""
        size = TINY if small else self.size
        return self.model.inputs(replace(size, batch=count or size.batch))


def text(size: Size) -> dict[str, Tensor]:
    """Token ids and a mask: a quarter of the last sentence hidden."""
    ids, mask = batch(size, padding=size.tokens // 4)
    return {"ids": ids, "mask": mask}


def pixels(size: Size) -> dict[str, Tensor]:
    return {"values": normal(size.batch, 3, size.side, size.side)}


def spectra(size: Size) -> dict[str, Tensor]:
    return {"values": normal(size.batch, 80, 2 * size.tokens)}


def latents(size: Size) -> dict[str, Tensor]:
    values = normal(size.batch, size.tokens, size.width)
    return {"values": values, "condition": normal(size.batch, size.width, seed=1)}


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


BERT = Model(partial(transformer, "BertModel", Encoder, add_pooling_layer=False), text, "bert")
# ONNX Runtime's optimizer has no type for Llama: its own conversion of Llama passes gpt2.
LLAMA = Model(partial(transformer, "LlamaModel", Encoder), text, "gpt2")
LLAMA_BLOCK = replace(LLAMA, make=partial(transformer, "LlamaModel", Encoder, grouped=4))
VIT = Model(partial(transformer, "ViTModel", Values, add_pooling_layer=False), pixels, "vit")
_WHISPER = "models.whisper.modeling_whisper.WhisperEncoder"
WHISPER = Model(partial(transformer, _WHISPER, Values), spectra, "bart")
# With sdpa, torch's exporter makes views that do not fit.
T5 = Model(partial(transformer, "T5EncoderModel", Encoder), text, "t5", exported="eager")
DIT = Model(lambda size, attention: DiTBlock(size.width, size.heads), latents, "mmdit")

_BLOCK_SIZE = Size(layers=4, width=2048, heads=32, vocabulary=2000, batch=8, tokens=1024)
_SENTENCE = replace(BASE, batch=1, tokens=128)
_DIT_SIZE = Size(layers=1, width=1024, heads=16, batch=8, tokens=1024)

ROWS = {
    "bert-fp16": Row(BERT, "float16", BASE),
    "bert-bf16": Row(BERT, "bfloat16", BASE),
    "llama-bf16": Row(LLAMA, "bfloat16", BASE),
    "llama-fp16": Row(LLAMA, "float16", BASE),
    "llama-block": Row(LLAMA_BLOCK, "bfloat16", _BLOCK_SIZE),
    "vit": Row(VIT, "float16", replace(BASE, batch=64, tokens=196)),
    "whisper": Row(WHISPER, "float16", replace(BASE, batch=8, tokens=1500)),
    "t5": Row(T5, "bfloat16", replace(BASE, batch=16)),
    "dit": Row(DIT, "float16", _DIT_SIZE),
    # Last, when no export runs beside it any more: its wall time counts.
    "bert-1x128": Row(BERT, "float16", _SENTENCE, graph=True),
}
