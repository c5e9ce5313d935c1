"""Small decoders with a KV cache that other tools exported: their graphs, with random weights.

`tests/optimize/decoders/` has what `strip` made of exports. dynamo_qwen2 is from torch 2.13.0 and
transformers 5.23.0: `export_with_cache("Qwen2", path)`. dynamo_llama, with `num_key_value_heads=4`, has no
heads to repeat: one name of the keys' number says past + new, another new + past. The others are from
optimum-onnx 0.1.0 and transformers 4.57.6, as optimum does not import beside transformers 5: optimum_gpt2 is
`onnx_export_from_model(model, folder, task="text-generation-with-past")`, and optimum_llama_merged is
`merge_decoders(without_past, with_past)`.
"""

import lzma
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch

FILES = Path(__file__).resolve().parents[1] / "optimize/decoders"
_SMALL = 16  # elements; larger floats are weights
SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def strip(source: Path, name: str) -> None:
    """Stores a model without its weights."""
    proto = onnx.load(source)
    for part in (proto, proto.graph):
        part.ClearField("metadata_props")
    del proto.graph.value_info[:]
    for node in proto.graph.node:
        node.ClearField("metadata_props")
    for tensor in _weights(proto):
        for field in ("raw_data", "float_data", "external_data", "data_location"):
            tensor.ClearField(field)
    FILES.mkdir(exist_ok=True)
    (FILES / f"{name}.onnx.xz").write_bytes(lzma.compress(proto.SerializeToString(), preset=9))


def write(name: str, folder: Path) -> Path:
    """Writes a stored model with weights of a seed."""
    proto = onnx.load_model_from_string(lzma.decompress((FILES / f"{name}.onnx.xz").read_bytes()))
    rng = np.random.default_rng(0)
    for tensor in _weights(proto):
        mean = 1.0 if len(tensor.dims) == 1 and "bias" not in tensor.name else 0.0  # of a norm
        array = rng.normal(mean, 0.3 if len(tensor.dims) > 1 else 0.1, tensor.dims).astype(np.float32)
        tensor.raw_data = array.tobytes()
    onnx.save(proto, folder / f"{name}.onnx")
    return folder / f"{name}.onnx"


def _weights(proto: onnx.ModelProto) -> list[onnx.TensorProto]:
    floats = [tensor for tensor in proto.graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT]
    return [tensor for tensor in floats if np.prod(tensor.dims) > _SMALL]


class _Flat(torch.nn.Module):
    """A decoder whose caches are tensors."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, *past: torch.Tensor) -> Any:
        import transformers

        cache = transformers.DynamicCache(list(zip(past[::2], past[1::2], strict=True)))
        found = self.model(input_ids, attention_mask, past_key_values=cache, use_cache=True)
        return found.logits, *(each for layer in cache.layers for each in (layer.keys, layer.values))


def export_with_cache(family: str, path: Path, **sizes: Any) -> None:
    """Exports a small decoder of transformers with past and present, by torch's dynamo exporter."""
    import transformers

    config = getattr(transformers, f"{family}Config")(**SIZES | sizes)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        std = 0.3 if parameter.ndim == 2 else 0.1
        torch.nn.init.normal_(parameter, mean=0.0 if parameter.ndim == 2 or "bias" in name else 1.0, std=std)
    heads, size = config.num_key_value_heads, getattr(config, "head_dim", None) or 8
    names = [f"{index}.{part}" for index in range(config.num_hidden_layers) for part in ("key", "value")]
    past = [torch.randn(2, heads, 6, size) for _ in names]
    inputs = (torch.randint(3, 97, (2, 3)), torch.ones(2, 9, dtype=torch.long), *past)
    rows = tuple({0: "batch", 2: "past"} for _ in names)
    torch.onnx.export(
        _Flat(model),
        inputs,
        path,
        input_names=["input_ids", "attention_mask", *(f"past_key_values.{name}" for name in names)],
        output_names=["logits", *(f"present.{name}" for name in names)],
        dynamic_shapes=({0: "batch", 1: "new"}, {0: "batch", 1: "total"}, rows),
        dynamo=True,
    )
