"""The decoders of `decoder_graphs.py` in plain torch: a step with a static cache."""

from collections.abc import Callable, Mapping
from pathlib import Path

import onnx
import torch
from onnx.numpy_helper import to_array
from torch import Tensor
from torch.nn import functional as F

from twinop.record.dtypes import to_tensor

Weights = Mapping[str, Tensor]


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def layer(x: Tensor, w: Weights, k_cache: Tensor, v_cache: Tensor, position: Tensor) -> Tensor:
    """Computes a layer for one new token of each sequence, which is the last one of the caches."""
    size, kv_heads = k_cache.shape[3], k_cache.shape[1]
    normed = F.rms_norm(x, x.shape[-1:], w["input_layernorm.weight"], 1e-6)
    qkv = F.linear(normed, w["attn.qkv_proj.MatMul.weight"]).unflatten(-1, (-1, size)).transpose(1, 2)
    q, k, v = qkv.split((qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads), 1)
    if "attn.q_norm" in w:
        q, k = (F.rms_norm(t, (size,), w[f"attn.{n}_norm"], 1e-6) for t, n in ((q, "q"), (k, "k")))
    q, k = (turned(each, w["cos_cache"][position], w["sin_cache"][position]) for each in (q, k))
    k_cache[:, :, position], v_cache[:, :, position] = k, v
    y = F.scaled_dot_product_attention(q, k_cache, v_cache, enable_gqa=True)
    x = x + F.linear(y.transpose(1, 2).flatten(2), w["attn.o_proj.MatMul.weight"])
    normed = F.rms_norm(x, x.shape[-1:], w["post_attention_layernorm.weight"], 1e-6)
    gate, up = (F.linear(normed, w[f"mlp.{each}_proj.MatMul.weight"]) for each in ("gate", "up"))
    return x + F.linear(F.silu(gate) * up, w["mlp.down_proj.MatMul.weight"])


class TorchDecoder:
    """A model of `decoder_graphs`, with weights as nn.Linear has them."""

    def __init__(self, folder: Path, device: str | torch.device = "cpu") -> None:
        self.weights: dict[str, Tensor] = {}
        graph = onnx.load(folder / "model.onnx", load_external_data=False).graph
        for each in graph.initializer:
            tensor = to_tensor(to_array(each, str(folder)).copy()).to(device)
            self.weights[each.name] = tensor.T.contiguous() if "MatMul" in each.name else tensor
        count = sum(node.op_type == "GroupQueryAttention" for node in graph.node)
        self.layers = [self._layer(i) for i in range(count)]

    def _layer(self, i: int) -> Weights:
        """Returns the weights of a layer by what follows its number in their names."""
        start = f"model.layers.{i}."
        own = {name[len(start) :]: each for name, each in self.weights.items() if name.startswith(start)}
        return {name: self.weights[name] for name in ("cos_cache", "sin_cache")} | own

    def step(self, feeds: Weights, compiles: bool = False) -> Callable[[], Tensor]:
        """Returns a step, which returns the logits. One compiled layer serves all of them.

        Args:
            feeds: the inputs of the model. All keys of the caches count, with the new one, which is the last.
        """
        one = layer
        if compiles:
            torch._dynamo.reset()  # it compiles a function for at most 8 shapes
            one = torch.compile(layer, fullgraph=True, dynamic=False)
        head = self.weights["lm_head.MatMul.weight"]
        table = self.weights.get("model.embed_tokens.weight", head)
        norm = next(each for name, each in self.weights.items() if "final_norm" in name)
        last = torch.tensor([feeds["attention_mask"].shape[1] - 1], device=head.device)

        def run() -> Tensor:
            x = table[feeds["input_ids"]]
            for i, weights in enumerate(self.layers):
                k, v = (feeds[f"past_key_values.{i}.{each}"] for each in ("key", "value"))
                x = one(x, weights, k, v, last)
            return F.linear(F.rms_norm(x, x.shape[-1:], norm, 1e-6), head)

        return run
