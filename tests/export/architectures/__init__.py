"""Small models with random weights, of torch, transformers, timm and torchvision.

`ARCHITECTURES` has them by name. timm and torchvision come from requirements/architectures.txt.
"""

from architectures import images, language, plain
from architectures.common import Architecture, missing

ARCHITECTURES = {each.name: each for each in (*plain.MODELS, *language.MODELS, *images.MODELS)}

__all__ = ["ARCHITECTURES", "Architecture", "missing"]
