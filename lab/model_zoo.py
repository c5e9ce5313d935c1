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

    def options(self) -> dict[str, Any]:
        """Returns the sizes by all names that configurations of transformers have for them.

        A configuration passes over the names that only others have.
        """
        names = {
            "intermediate_size hidden_dim ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim": 4 * self.width,
            "hidden_size word_embed_proj_dim": self.width,
            "num_hidden_layers decoder_layers": self.layers,
            "num_attention_heads decoder_attention_heads": self.heads,
            "vocab_size": self.vocabulary,
            "d_kv": self.width // self.heads,
            "max_position_embeddings": max(512, self.tokens),
        }
        return {name: value for several, value in names.items() for name in several.split()}


TINY = Size(layers=2, width=64, heads=4, vocabulary=101, batch=2, tokens=16)


class Encoder(nn.Module):
    """Maps (token ids, attention mask of 1 or 0 per token) to the last hidden state."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        # Without a mask, transformers looks for packed sequences with torch.diff, which the TorchScript
        # exporter does not support.
        return self.body(input_ids=ids, attention_mask=mask).last_hidden_state


class Values(nn.Module):
    """Maps floats to the last hidden state, or to the output of a model that has no other."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, values: Tensor) -> Tensor:
        found = self.body(values)
        return found if isinstance(found, Tensor) else found.last_hidden_state


def from_transformers(name: str, options: Mapping[str, Any], **arguments: Any) -> nn.Module:
    """Returns a model of transformers with random weights.

    Args:
        name: of its class, behind the name of a module that is not the package itself.
        options: of its configuration.
    """
    model = pkgutil.resolve_name(f"transformers.{name}")
    return model(model.config_class(**options), **arguments)


def perturbed(model: nn.Module) -> nn.Module:
    """Changes norms and biases in place; transformers makes them 1 and 0, which would hide errors."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def encoder(style: str, size: Size, attention: str = "eager") -> Encoder:
    """Returns a float32 model in eval mode, always with the same weights.

    Args:
        style: "bert" (layer norms after the sum, GELU) or "llama" (RMS norms before, SwiGLU, causal).
        attention: "eager" (MatMul and Softmax in ONNX) or "sdpa" (one Attention node from opset 23 on).
    """
    torch.manual_seed(0)
    model = _encoder(style, size, attention)
    perturbed(model)
    return model.eval()


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


# ------------------------------------------------------------------------------------------- whole models

# A smaller vocabulary than BERT's: embeddings are read by row, and a large table only makes large files.
BASE = Size(vocabulary=2000)
RIGHT = "right"


@dataclass(frozen=True)
class Model:
    """A model of any size.

    Attributes:
        make: (size, attention implementation) -> the model in float32.
        inputs: size -> inputs of forward by name.
        model_type: what ONNX Runtime's optimizer is told.
        exported: the attention implementation in the dynamo exports.
    """

    make: Callable[[Size, str], nn.Module]
    inputs: Callable[[Size], dict[str, Tensor]]
    model_type: str
    exported: str = "sdpa"


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        padding: "right" where the mask has zeros there, None for models without a mask.
        graph: run as a CUDA graph where a column can; then the wall time counts.
    """

    name: str
    model: Model
    dtype: str
    size: Size
    padding: str | None = None
    graph: bool = False

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
        return self.model.inputs(replace(size, batch=count or size.batch))


# ------------------------------------------------------------------------------------------- inputs


def text(size: Size) -> dict[str, Tensor]:
    """Token ids and a mask: a quarter of the last sentence hidden."""
    ids, mask = batch(size, padding=size.tokens // 4)
    return {"ids": ids, "mask": mask}


def pixels(size: Size) -> dict[str, Tensor]:
    return {"values": normal(size.batch, 3, _side(size), _side(size))}


def _side(size: Size) -> int:
    """Returns the height of a square image with a token for each 16 x 16 pixels."""
    return 16 * round(size.tokens**0.5)


def spectra(size: Size) -> dict[str, Tensor]:
    return {"values": normal(size.batch, 80, 2 * size.tokens)}


def latents(size: Size) -> dict[str, Tensor]:
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


def _encoder(style: str, size: Size, attention: str, grouped: int = 1) -> Encoder:
    """`grouped` heads share keys and values."""
    options = size.options() | {"attn_implementation": attention}
    if style == "bert":
        options |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return Encoder(from_transformers("BertModel", options, add_pooling_layer=False))
    options |= {"use_cache": False, "num_key_value_heads": size.heads // grouped}
    return Encoder(from_transformers("LlamaModel", options))


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

BERT = Model(partial(_encoder, "bert"), text, "bert")
# ONNX Runtime's optimizer has no type for Llama: its own conversion of Llama passes gpt2.
LLAMA = Model(partial(_encoder, "llama"), text, "gpt2")
LLAMA_BLOCK = replace(LLAMA, make=partial(_encoder, "llama", grouped=4))
VIT = Model(_vit, pixels, "vit")
WHISPER = Model(_whisper, spectra, "bart")
# With sdpa, torch's exporter makes views that do not fit.
T5 = Model(_t5, text, "t5", exported="eager")
DIT = Model(_dit, latents, "mmdit")

_BLOCK_SIZE = Size(layers=4, width=2048, heads=32, vocabulary=2000, batch=8, tokens=1024)
_SENTENCE = replace(BASE, batch=1, tokens=128)
_DIT_SIZE = Size(layers=1, width=1024, heads=16, batch=8, tokens=1024)

ROWS = {
    row.name: row
    for row in (
        Row("bert-fp16", BERT, "float16", BASE, RIGHT),
        Row("bert-bf16", BERT, "bfloat16", BASE, RIGHT),
        Row("llama-bf16", LLAMA, "bfloat16", BASE, RIGHT),
        Row("llama-fp16", LLAMA, "float16", BASE, RIGHT),
        Row("llama-block", LLAMA_BLOCK, "bfloat16", _BLOCK_SIZE, RIGHT),
        Row("vit", VIT, "float16", replace(BASE, batch=64, tokens=196)),
        Row("whisper", WHISPER, "float16", replace(BASE, batch=8, tokens=1500)),
        Row("t5", T5, "bfloat16", replace(BASE, batch=16), RIGHT),
        Row("dit", DIT, "float16", _DIT_SIZE),
        # Last, when no export runs beside it any more: its wall time counts.
        Row("bert-1x128", BERT, "float16", _SENTENCE, RIGHT, graph=True),
    )
}
