"""timm's and torchvision's image models."""

import importlib
from typing import Any

from torch import nn

from architectures.common import Architecture, image


def timm(name: str, size: int = 32, **options: Any) -> Architecture:
    def make() -> nn.Module:
        return importlib.import_module("timm").create_model(name, pretrained=False, num_classes=7, **options)

    return Architecture(f"timm.{name}", make, image(size), library="timm")


def torchvision(name: str, size: int = 32, **options: Any) -> Architecture:
    def make() -> nn.Module:
        models = importlib.import_module("torchvision.models")
        return models.get_model(name, weights=None, num_classes=7, **options)

    return Architecture(f"torchvision.{name}", make, image(size), library="torchvision")


def mixer() -> nn.Module:
    made = importlib.import_module("timm.models.mlp_mixer").MlpMixer
    return made(img_size=32, patch_size=8, embed_dim=32, num_blocks=2, num_classes=7)


SMALL = {"embed_dim": 32, "depth": 2, "num_heads": 2}
STAGES: dict[str, Any] = {"depths": (2, 2), "num_heads": (2, 4)}

MODELS = (
    timm("vit_tiny_patch16_224", img_size=32, patch_size=8, **SMALL),
    timm("deit3_small_patch16_224", img_size=32, patch_size=8, **SMALL),
    timm("eva02_tiny_patch14_224", img_size=32, patch_size=8, **SMALL),
    Architecture("timm.mixer", mixer, image(32), library="timm"),
    timm("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 16, 16, 32)),
    timm("efficientnet_b0"),
    timm("mobilenetv3_small_050"),
    timm("regnety_002"),
    timm("swin_tiny_patch4_window7_224", img_size=32, window_size=4, embed_dim=16, **STAGES),
    torchvision("resnet18"),
    torchvision("mobilenet_v2", width_mult=0.25),
    torchvision("mobilenet_v3_small", width_mult=0.5),
    torchvision("shufflenet_v2_x0_5"),
    torchvision("squeezenet1_1"),
    torchvision("googlenet", size=64, aux_logits=False, init_weights=False),
)
