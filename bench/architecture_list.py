"""The models of `twinop bench architectures`: transformers, timm and torchvision, with random weights."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .encoder_models import Encoder, Size, batch, perturbed
from .model_zoo import Values, normal

_EAGER = {"attn_implementation": "eager"}  # of the other, torch's exporters make views that do not fit
WIDE = Size(layers=4, width=256, heads=4, vocabulary=2000, batch=8, tokens=128)
TINY = Size(layers=2, width=32, heads=4, vocabulary=64, batch=2, tokens=16)


@dataclass(frozen=True)
class Architecture:
    """A model by its name in a library.

    Attributes:
        kind: transformers' class, or timm's or torchvision's name.
        options: of its configuration, or a function of the size that returns them.
        image: takes images instead of token ids and a mask.
    """

    kind: str
    options: Callable[[Size], Mapping[str, Any]] = Size.options
    library: str = "transformers"
    image: bool = False

    def model(self, size: Size) -> nn.Module:
        """Returns the model in float32 and eval mode."""
        torch.manual_seed(0)
        if self.library == "timm":
            body = importlib.import_module("timm").create_model(self.kind, pretrained=False)
        elif self.library == "torchvision":
            body = importlib.import_module("torchvision.models").get_model(self.kind, weights=None)
        else:
            found = getattr(importlib.import_module("transformers"), self.kind)
            body = found(found.config_class(**self.options(size)))
        return perturbed(Values(body) if self.image else Encoder(body)).eval()

    def inputs(self, size: Size) -> dict[str, Tensor]:
        """Returns forward's inputs by name."""
        if self.image:
            return {"values": normal(size.batch, 3, 224, 224)}
        return dict(zip(("ids", "mask"), batch(size, padding=size.tokens // 4), strict=True))


def encoder(**more: Any) -> Callable[[Size], dict[str, Any]]:
    return lambda size: size.options() | more


def decoder(**more: Any) -> Callable[[Size], dict[str, Any]]:
    """Without a cache of keys and values, which is not a tensor."""
    special = {"use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return lambda size: size.options() | special | {"num_key_value_heads": 2} | more


def vision(size: Size) -> dict[str, Any]:
    return size.options() | {"image_size": 224, "patch_size": 16}


def distilbert(size: Size) -> dict[str, Any]:
    return {
        "vocab_size": size.vocabulary, "dim": size.width, "n_layers": size.layers, "n_heads": size.heads,
        "hidden_dim": 4 * size.width,
    }  # fmt: skip


def gpt2(size: Size) -> dict[str, Any]:
    return {
        "vocab_size": size.vocabulary, "n_embd": size.width, "n_layer": size.layers, "n_head": size.heads,
        "use_cache": False,
    }  # fmt: skip


def opt(size: Size) -> dict[str, Any]:
    known = decoder()(size)
    return known | {"ffn_dim": 4 * size.width, "word_embed_proj_dim": size.width}


def t5(size: Size) -> dict[str, Any]:
    return {
        "vocab_size": size.vocabulary, "d_model": size.width, "d_kv": size.width // size.heads,
        "d_ff": 4 * size.width, "num_layers": size.layers, "num_heads": size.heads, **_EAGER,
    }  # fmt: skip


def bart(size: Size) -> dict[str, Any]:
    ends = ("encoder", "decoder")
    return {
        "vocab_size": size.vocabulary, "d_model": size.width, "use_cache": False, **_EAGER,
        **{f"{end}_layers": size.layers for end in ends},
        **{f"{end}_attention_heads": size.heads for end in ends},
        **{f"{end}_ffn_dim": 4 * size.width for end in ends},
    }  # fmt: skip


def nothing(size: Size) -> dict[str, Any]:
    """The configuration's own sizes."""
    return {}


def _images(library: str, *names: str) -> dict[str, Architecture]:
    return {f"{library} {name}": Architecture(name, nothing, library, image=True) for name in names}


ARCHITECTURES = {
    "bert": Architecture("BertModel"),
    "distilbert": Architecture("DistilBertModel", distilbert),
    "roberta": Architecture("RobertaModel", encoder(max_position_embeddings=514)),
    "electra": Architecture("ElectraModel", encoder(embedding_size=128)),
    "albert": Architecture("AlbertModel", encoder(embedding_size=128)),
    "mpnet": Architecture("MPNetModel", encoder(max_position_embeddings=514)),
    "deberta_v2": Architecture(
        "DebertaV2Model", encoder(relative_attention=True, pos_att_type=["p2c", "c2p"])
    ),
    "modernbert": Architecture(
        "ModernBertModel",
        encoder(pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2),
    ),
    "gpt2": Architecture("GPT2Model", gpt2),
    "gpt_neox": Architecture("GPTNeoXModel", encoder(use_cache=False)),
    "opt": Architecture("OPTModel", opt),
    "llama": Architecture("LlamaModel", decoder()),
    "mistral": Architecture("MistralModel", decoder(sliding_window=64)),
    "granite": Architecture("GraniteModel", decoder()),
    "qwen2": Architecture("Qwen2Model", decoder()),
    "qwen3": Architecture("Qwen3Model", decoder(head_dim=64)),
    "olmo2": Architecture("Olmo2Model", decoder()),
    "gemma": Architecture("GemmaModel", decoder(head_dim=64)),
    "gemma2": Architecture("Gemma2Model", decoder(head_dim=64)),
    "phi3": Architecture("Phi3Model", decoder()),
    "t5_encoder": Architecture("T5EncoderModel", t5),
    "bart": Architecture("BartModel", bart),
    "clip_text": Architecture("CLIPTextModel", decoder(num_key_value_heads=None)),
    "clip_vision": Architecture("CLIPVisionModel", vision, image=True),
    "vit": Architecture("ViTModel", vision, image=True),
    "deit": Architecture("DeiTModel", vision, image=True),
    "dinov2": Architecture("Dinov2Model", vision, image=True),
    "swin": Architecture("SwinModel", lambda size: _EAGER, image=True),
    "convnext": Architecture("ConvNextModel", nothing, image=True),
    "segformer": Architecture("SegformerModel", nothing, image=True),
    **_images(
        "timm", "vit_tiny_patch16_224", "deit3_small_patch16_224", "eva02_tiny_patch14_224",
        "mixer_s16_224", "convnext_atto", "efficientnet_b0",
    ),
    **_images("torchvision", "resnet18", "mobilenet_v3_small", "densenet121", "vit_b_16"),
}  # fmt: skip
