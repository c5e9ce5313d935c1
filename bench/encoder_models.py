"""Small transformers with random weights in the style of BERT and Llama, for the reports and the tests."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


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
        """Returns the arguments that the configurations of transformers share."""
        return {
            "vocab_size": self.vocabulary,
            "hidden_size": self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "intermediate_size": 4 * self.width,
            "max_position_embeddings": max(512, self.tokens),
        }


TINY = Size(layers=2, width=64, heads=4, vocabulary=101, batch=2, tokens=16)


class Encoder(nn.Module):
    """Maps (token ids, attention mask of 1 or 0 per token) to the last hidden state."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        # Without a mask, transformers looks for packed sequences with torch.diff, which the TorchScript
        # exporter does not support.
        return self.body(input_ids=ids, attention_mask=mask).last_hidden_state


def _bert(size: Size, **options: Any) -> nn.Module:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        **size.options(), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **options
    )
    return BertModel(config, add_pooling_layer=False)


def _llama(size: Size, **options: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaModel

    return LlamaModel(LlamaConfig(**size.options(), use_cache=False, **options))


STYLES: dict[str, Callable[..., nn.Module]] = {"bert": _bert, "llama": _llama}


def perturbed(model: nn.Module) -> nn.Module:
    """Changes norms and biases in place; transformers makes them 1 and 0, which would hide errors."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def encoder(style: str, size: Size, seed: int = 0, attention: str = "eager", **options: Any) -> Encoder:
    """Returns a float32 model in eval mode.

    Args:
        style: "bert" (layer norms after the sum, GELU) or "llama" (RMS norms before, SwiGLU, causal).
        attention: "eager" (MatMul and Softmax in ONNX) or "sdpa" (one Attention node from opset 23 on).
        options: more of the configuration.
    """
    torch.manual_seed(seed)
    model = Encoder(STYLES[style](size, attn_implementation=attention, **options))
    perturbed(model)
    return model.eval()


def batch(size: Size, seed: int = 0, padding: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns token ids and their mask, int64[batch, tokens].

    Args:
        padding: the number of tokens at the end of the last sentence that the mask excludes.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, size.vocabulary, (size.batch, size.tokens), generator=generator)
    mask = torch.ones_like(ids)
    mask[-1, size.tokens - padding :] = 0
    return ids, mask
