"""Small transformers with random weights, BERT's and Llama's, for the report and the tests."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Size:
    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 30522
    batch: int = 32
    tokens: int = 512

    @property
    def inner(self) -> int:
        return 4 * self.width

    @property
    def positions(self) -> int:
        return max(512, self.tokens)


TINY = Size(layers=2, width=64, heads=4, vocabulary=101, batch=2, tokens=16)


class Encoder(nn.Module):
    """(token ids, attention mask: 1 or 0 per token) -> the last hidden state. Tensors in, a tensor out."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        # The mask is an input also where all tokens count: without one transformers looks for packed
        # sequences with torch.diff, which the TorchScript exporter does not have.
        return self.body(input_ids=ids, attention_mask=mask).last_hidden_state


def _bert(size: Size, **options: Any) -> nn.Module:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=size.inner,
        max_position_embeddings=size.positions,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **options,
    )
    return BertModel(config, add_pooling_layer=False)


def _llama(size: Size, **options: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=size.inner,
        max_position_embeddings=size.positions,
        use_cache=False,
        **options,
    )
    return LlamaModel(config)


STYLES: dict[str, Callable[..., nn.Module]] = {"bert": _bert, "llama": _llama}


def encoder(style: str, size: Size, seed: int = 0, attention: str = "eager") -> Encoder:
    """A model in eval mode, float32 (`.to(torch.bfloat16)` makes it another's).

    Args:
        style: "bert" (layer norms after the sum, GELU) or "llama" (RMS norms before, SwiGLU, causal).
        attention: "eager" (MatMul and Softmax in ONNX) or "sdpa" (one Attention node from opset 23 on).
    """
    torch.manual_seed(seed)
    model = Encoder(STYLES[style](size, attn_implementation=attention))
    with torch.no_grad():  # transformers starts norms at 1 and biases at 0, which would hide mistakes
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def batch(size: Size, seed: int = 0, padding: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and their mask; the last `padding` tokens of the last sentence do not count."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, size.vocabulary, (size.batch, size.tokens), generator=generator)
    mask = torch.ones_like(ids)
    mask[-1, size.tokens - padding :] = 0
    return ids, mask
