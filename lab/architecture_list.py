"""The models of `twinop bench architectures`: transformers, timm and torchvision, with random weights."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .encoder_models import Encoder, Size, Values, from_transformers, normal, perturbed
from .model_zoo import RIGHT, text

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

    def model(self, size: Size) -> nn.Module:
        """Returns the model in float32 and eval mode."""
        torch.manual_seed(0)
        if self.library == "timm":
            body = importlib.import_module("timm").create_model(self.kind, pretrained=False)
        elif self.library == "torchvision":
            body = importlib.import_module("torchvision.models").get_model(self.kind, weights=None)
        else:
            sizes = size.options() if self.sized else {}
            body = from_transformers(self.kind, {**sizes, **self.options})
        return perturbed(Values(body) if self.image else Encoder(body)).eval()

    def inputs(self, size: Size) -> dict[str, Tensor]:
        """Returns forward's inputs by name."""
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
