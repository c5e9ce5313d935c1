"""Models with random weights: whole models for lab/models.py, small ones for the tests.

torch and transformers make most of them; timm and torchvision have some of the architectures.
"""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
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
    """

    name: str
    model: Model
    dtype: str
    size: Size
    padding: str = ""
    autotune: bool = False
    graph: bool = False

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
        Row("bert-fp16", BERT, "float16", BASE, RIGHT, autotune=True),
        Row("bert-bf16", BERT, "bfloat16", BASE, RIGHT),
        Row("bert-any-mask", BERT, "float16", BASE, ANY),
        Row("llama-bf16", LLAMA, "bfloat16", BASE, RIGHT, autotune=True),
        Row("llama-fp16", LLAMA, "float16", BASE, RIGHT),
        Row("llama-block", LLAMA_BLOCK, "bfloat16", _BLOCK_SIZE, RIGHT, autotune=True),
        Row("vit", VIT, "float16", replace(BASE, batch=64, tokens=196)),
        Row("whisper", WHISPER, "float16", replace(BASE, batch=8, tokens=1500)),
        Row("t5", T5, "bfloat16", replace(BASE, batch=16), RIGHT),
        Row("dit", DIT, "float16", _DIT_SIZE),
        # Last, when no export runs beside it any more: its wall time counts.
        Row("bert-1x128", BERT, "float16", _SENTENCE, RIGHT, autotune=True, graph=True),
    )
}


# ------------------------------------------------------------------------------------------- architectures

WIDE = Size(layers=4, width=256, heads=4, vocabulary=2000, batch=8, tokens=128)


@dataclass(frozen=True)
class Architecture:
    """A model by its name in a library.

    Attributes:
        kind: transformers' class, or timm's or torchvision's name.
        options: of its configuration, beside the size.
        image: takes images instead of token ids and a mask.
        sized: has the sizes of the report; else it keeps its configuration's own.
    """

    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)
    library: str = "transformers"
    image: bool = False
    sized: bool = True

    def make(self, small: bool) -> nn.Module:
        """Returns the model in float32 and eval mode; always with the same weights."""
        torch.manual_seed(0)
        if self.library == "timm":
            body = importlib.import_module("timm").create_model(self.kind, pretrained=False)
        elif self.library == "torchvision":
            body = importlib.import_module("torchvision.models").get_model(self.kind, weights=None)
        else:
            sizes = (TINY if small else WIDE).options() if self.sized else {}
            body = from_transformers(self.kind, {**sizes, **self.options})
        return perturbed(Values(body) if self.image else Encoder(body)).eval()

    def batch(self, small: bool, count: int | None = None) -> dict[str, Tensor]:
        """Returns inputs by name, for `count` images or sentences if it is given."""
        size = TINY if small else WIDE
        size = replace(size, batch=count or size.batch)
        return {"values": normal(size.batch, 3, 224, 224)} if self.image else text(size, RIGHT)


# Without a cache of keys and values, which is not a tensor.
_DECODER = {
    "use_cache": False, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_VISION = {"image_size": 224, "patch_size": 16}
_EAGER = {"attn_implementation": "eager"}  # with sdpa, torch's exporters make views that do not fit


def _images(library: str, *names: str) -> dict[str, Architecture]:
    return {f"{library} {name}": Architecture(name, library=library, image=True) for name in names}


ARCHITECTURES = {
    "bert": Architecture("BertModel"),
    "distilbert": Architecture("DistilBertModel"),
    "roberta": Architecture("RobertaModel", {"max_position_embeddings": 514}),
    "electra": Architecture("ElectraModel", {"embedding_size": 128}),
    "albert": Architecture("AlbertModel", {"embedding_size": 128}),
    "mpnet": Architecture("MPNetModel", {"max_position_embeddings": 514}),
    "deberta_v2": Architecture(
        "DebertaV2Model", {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
    ),
    "modernbert": Architecture(
        "ModernBertModel",
        {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
    ),
    "gpt2": Architecture("GPT2Model", {"use_cache": False}),
    "gpt_neox": Architecture("GPTNeoXModel", {"use_cache": False}),
    "opt": Architecture("OPTModel", _DECODER),
    "llama": Architecture("LlamaModel", _DECODER),
    "mistral": Architecture("MistralModel", _DECODER | {"sliding_window": 64}),
    "granite": Architecture("GraniteModel", _DECODER),
    "qwen2": Architecture("Qwen2Model", _DECODER),
    "qwen3": Architecture("Qwen3Model", _DECODER | {"head_dim": 64}),
    "olmo2": Architecture("Olmo2Model", _DECODER),
    "gemma": Architecture("GemmaModel", _DECODER | {"head_dim": 64}),
    "gemma2": Architecture("Gemma2Model", _DECODER | {"head_dim": 64}),
    "phi3": Architecture("Phi3Model", _DECODER),
    "t5_encoder": Architecture("T5EncoderModel", _EAGER),
    "bart": Architecture("BartModel", {"use_cache": False} | _EAGER),
    "clip_text": Architecture("CLIPTextModel", _DECODER | {"num_key_value_heads": None}),
    "clip_vision": Architecture("CLIPVisionModel", _VISION, image=True),
    "vit": Architecture("ViTModel", _VISION, image=True),
    "deit": Architecture("DeiTModel", _VISION, image=True),
    "dinov2": Architecture("Dinov2Model", _VISION, image=True),
    "swin": Architecture("SwinModel", _EAGER, image=True, sized=False),
    "convnext": Architecture("ConvNextModel", image=True, sized=False),
    "segformer": Architecture("SegformerModel", image=True, sized=False),
    **_images(
        "timm", "vit_tiny_patch16_224", "deit3_small_patch16_224", "eva02_tiny_patch14_224",
        "mixer_s16_224", "convnext_atto", "efficientnet_b0",
    ),
    **_images("torchvision", "resnet18", "mobilenet_v3_small", "densenet121", "vit_b_16"),
}  # fmt: skip
