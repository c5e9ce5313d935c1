"""Small models with random weights, of torch and transformers, by name."""

from architectures import language, plain
from architectures.common import Architecture

ARCHITECTURES = {each.name: each for each in (*plain.MODELS, *language.MODELS)}

__all__ = ["ARCHITECTURES", "Architecture"]
