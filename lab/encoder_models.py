"""Small transformers with random weights in the style of BERT and Llama, for the reports and the tests."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
        inner = ("intermediate_size", "hidden_dim", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim")
        return dict.fromkeys(inner, 4 * self.width) | {
            "vocab_size": self.vocabulary,
            "hidden_size": self.width,
            "word_embed_proj_dim": self.width,
            "num_hidden_layers": self.layers,
            "decoder_layers": self.layers,
            "num_attention_heads": self.heads,
            "decoder_attention_heads": self.heads,
            "d_kv": self.width // self.heads,
            "max_position_embeddings": max(512, self.tokens),
        }


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
    module, _, kind = f"transformers.{name}".rpartition(".")
    model = getattr(importlib.import_module(module), kind)
    return model(model.config_class(**options), **arguments)


def _bert(size: Size, **options: Any) -> nn.Module:
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return from_transformers("BertModel", size.options() | dropout | options, add_pooling_layer=False)


def _llama(size: Size, **options: Any) -> nn.Module:
    return from_transformers("LlamaModel", size.options() | {"use_cache": False} | options)


STYLES: dict[str, Callable[..., nn.Module]] = {"bert": _bert, "llama": _llama}


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
    model = Encoder(STYLES[style](size, attn_implementation=attention))
    perturbed(model)
    return model.eval()


def batch(size: Size, seed: int = 0, padding: int = 0) -> tuple[Tensor, Tensor]:
    """Returns token ids and their mask, int64[batch, tokens].

    Args:
        padding: the number of tokens at the end of the last sentence that the mask excludes.
    """
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
