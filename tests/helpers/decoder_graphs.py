"""Decoders of any size with the nodes that onnxruntime-genai's builder writes, without the builder.

The weights are random, other ones in each layer. Machines without the network need it.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx
import torch
from onnx import NodeProto, TensorProto, helper, numpy_helper
from torch import Tensor

from twinop.record.dtypes import ELEMENT_TYPES

DATA, BLOCK = "model.onnx.data", 32
_MICROSOFT = "com.microsoft"


@dataclass(frozen=True)
class Sizes:
    """Sizes of a Llama, or with `norms` of q and k those of a Qwen3.

    Attributes:
        context: rows of the tables of cosines and sines.
        table: rows of the table of tokens; 0: it is the last product's weight.
    """

    width: int = 128
    inner: int = 256
    heads: int = 2
    kv_heads: int = 1
    head: int = 64
    vocab: int = 504
    context: int = 256
    norms: bool = False
    table: int = 0


class _Writer:
    """Collects nodes, and writes weights to a file as soon as they are drawn."""

    def __init__(self, sizes: Sizes, precision: str, data: BinaryIO) -> None:
        self.sizes, self.precision, self.data = sizes, precision, data
        self.dtype: torch.dtype = getattr(torch, "float16" if precision == "int4" else precision)
        self.nodes: list[NodeProto] = []
        self.weights: list[TensorProto] = []
        self.random = torch.Generator().manual_seed(0)

    def weight(self, name: str, tensor: Tensor) -> str:
        if tensor.is_floating_point():
            tensor = tensor.to(self.dtype)
        kind = ELEMENT_TYPES[str(tensor.dtype).removeprefix("torch.")]
        made = TensorProto(name=name, dims=tensor.shape, data_type=kind, data_location=TensorProto.EXTERNAL)
        self.data.write(bytes(-self.data.tell() % 4096))
        place = {"location": DATA, "offset": self.data.tell(), "length": tensor.nbytes}
        for key, value in place.items():
            made.external_data.add(key=key, value=str(value))
        self.data.write(tensor.contiguous().view(torch.uint8).numpy().data)
        self.weights.append(made)
        return name

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random)

    def node(self, op: str, inputs: list[str], output: str, others: Any = (), **more: Any) -> str:
        fused = ("Skip", "Group", "MatMulNBits", "GatherBlock")
        domain = _MICROSOFT if op.startswith(fused) else ""
        self.nodes.append(helper.make_node(op, inputs, [output, *others], output, domain=domain, **more))
        return output

    def integers(self, name: str, values: int | list[int]) -> str:
        return self.node("Constant", [], name, value=numpy_helper.from_array(np.array(values), name[1:]))

    def product(self, x: str, name: str, k: int, n: int) -> str:
        if self.precision != "int4":
            weight = self.weight(f"{name}.weight", self.normal(k, n) / k**0.5)
            return self.node("MatMul", [x, weight], f"/{name}")
        # 1 to 15, so that their mean is that of zero: else all tokens would soon have the same logits.
        low, high = torch.randint(1, 16, (2, n, k // BLOCK, BLOCK // 2), generator=self.random).byte()
        codes = low | high << 4
        scales = (torch.rand(n, k // BLOCK, generator=self.random) + 0.5) * 0.2 / k**0.5
        names = [self.weight(f"{name}.weight_Q4", codes), self.weight(f"{name}.weight_scales", scales)]
        return self.node("MatMulNBits", [x, *names], f"/{name}", K=k, N=n, bits=4, block_size=BLOCK)

    def norm(self, x: str, skip: str, name: str, is_last: bool = False) -> tuple[str, str]:
        """Returns the norm of x + skip, and the sum."""
        weight = self.weight(f"{name}.weight", 1 + 0.1 * self.normal(self.sizes.width))
        if not skip:
            given: dict[str, Any] = {"epsilon": 1e-6, "axis": -1, "stash_type": 1}
            return self.node("SimplifiedLayerNormalization", [x, weight], f"/{name}", **given), x
        others = [] if is_last else ["", "", f"/{name}/sum"]
        op = "SkipSimplifiedLayerNormalization"
        return self.node(op, [x, skip, weight], f"/{name}", others, epsilon=1e-6), f"/{name}/sum"

    def lengths(self) -> tuple[str, str]:
        ones, one = self.integers("/ones", [1]), self.integers("/one", 1)
        count = self.node("ReduceSum", ["attention_mask", ones], "/count", keepdims=0)
        last = self.node("Sub", [count, ones], "/last")
        shape = self.node("Shape", ["attention_mask"], "/shape")
        total = self.node("Gather", [shape, one], "/length", axis=0)
        kind = TensorProto.INT32
        return self.node("Cast", [last], "/position", to=kind), self.node("Cast", [total], "/total", to=kind)

    def attention(self, x: str, i: int, lengths: tuple[str, str]) -> str:
        s, name = self.sizes, f"model.layers.{i}.attn"
        widths = [s.heads * s.head, s.kv_heads * s.head, s.kv_heads * s.head]
        qkv = [self.product(x, f"{name}.qkv_proj.MatMul", s.width, sum(widths)), "", ""]
        norms: list[str] = []
        attributes: dict[str, Any] = {"num_heads": s.heads, "kv_num_heads": s.kv_heads, "do_rotary": 1}
        attributes |= {"scale": s.head**-0.5, "local_window_size": -1}
        attributes |= {"softcap": 0.0, "rotary_interleaved": 0}
        if s.norms:
            parts = [f"{qkv[0]}/{part}" for part in "qkv"]
            if not i:
                self.integers("/widths", widths)
            self.node("Split", [qkv[0], "/widths"], parts[0], parts[1:], axis=-1)
            qkv, attributes["qk_norm_epsilon"] = parts, 1e-6
            norms = [self.weight(f"{name}.{part}_norm", 1 + 0.1 * self.normal(s.head)) for part in "qk"]
            norms = ["", "", *norms]
        names = ("past_key_values", "present")
        past, present = ([f"{each}.{i}.key", f"{each}.{i}.value"] for each in names)
        given = [*qkv, *past, *lengths, "cos_cache", "sin_cache", *[""] * 3, *norms]
        y = self.node("GroupQueryAttention", given, f"/{name}", present, **attributes)
        return self.product(y, f"{name}.o_proj.MatMul", widths[0], s.width)

    def layer(self, x: str, skip: str, i: int, lengths: tuple[str, str]) -> tuple[str, str]:
        s, name = self.sizes, f"model.layers.{i}"
        normed, total = self.norm(x, skip, f"{name}.input_layernorm")
        y = self.attention(normed, i, lengths)
        normed, total = self.norm(total, y, f"{name}.post_attention_layernorm")
        matmuls = (f"{name}.mlp.{each}_proj.MatMul" for each in ("gate", "up"))
        gate, up = (self.product(normed, each, s.width, s.inner) for each in matmuls)
        sigmoid = self.node("Sigmoid", [gate], f"/{name}.mlp/Sigmoid")
        silu = self.node("Mul", [gate, sigmoid], f"/{name}.mlp/silu")
        y = self.node("Mul", [silu, up], f"/{name}.mlp/Mul")
        return total, self.product(y, f"{name}.mlp.down_proj.MatMul", s.inner, s.width)

    def embedding(self) -> str:
        s, head = self.sizes, "lm_head.MatMul.weight"
        if s.table:
            table = self.weight("model.embed_tokens.weight", self.normal(s.table, s.width))
        elif self.precision == "int4":
            shape = self.integers("/shape_of_table", [s.vocab, s.width // 2])
            table = self.node("Reshape", [f"{head}_Q4", shape], "/table")
            given = [table, "input_ids", f"{head}_scales"]
            sizes: dict[str, Any] = {"bits": 4, "block_size": BLOCK, "gather_axis": 0, "quantize_axis": 1}
            return self.node("GatherBlockQuantized", given, "/embedded", **sizes)
        else:
            table = self.node("Transpose", [head], "/table", perm=[1, 0])
        return self.node("Gather", [table, "input_ids"], "/embedded")


def write(folder: Path, sizes: Sizes, precision: str, layers: int = 2, graph: bool = False) -> Path:
    """Writes a folder as the builder does: the model, its data and genai_config.json, without a tokenizer.

    Args:
        precision: float32, float16, bfloat16, or int4 in blocks of 32 with the rest in float16.
        graph: lets genai capture a CUDA graph.
    """
    folder.mkdir(parents=True)
    with (folder / DATA).open("wb") as data:
        made = _Writer(sizes, precision, data)
        lengths, x, skip = made.lengths(), made.embedding(), ""
        turns = torch.arange(sizes.context)[:, None] * 10000.0 ** -torch.arange(0, 1, 2 / sizes.head)
        made.weight("cos_cache", turns.cos())
        made.weight("sin_cache", turns.sin())
        for i in range(layers):
            x, skip = made.layer(x, skip, i, lengths)
        normed, _ = made.norm(x, skip, f"model.layers.{layers}.final_norm_layernorm", is_last=True)
        made.product(normed, "lm_head.MatMul", sizes.width, sizes.vocab)
    kind = of_logits = ELEMENT_TYPES[str(made.dtype).removeprefix("torch.")]
    if kind == TensorProto.BFLOAT16:
        of_logits = TensorProto.FLOAT
        made.node("Cast", [made.nodes[-1].output[0]], "/wide", to=of_logits)
    made.nodes[-1].output[0] = "logits"
    cache: list[str | int] = ["batch_size", sizes.kv_heads, "past_sequence_length", "kv_cache_dim"]
    value = helper.make_tensor_value_info
    inputs = [
        value("input_ids", TensorProto.INT64, ["batch_size", "sequence_length"]),
        value("attention_mask", TensorProto.INT64, ["batch_size", "total_sequence_length"]),
    ]
    outputs = [value("logits", of_logits, [*cache[:1], "sequence_length", sizes.vocab])]
    for i in range(layers):
        for part in ("key", "value"):
            inputs.append(value(f"past_key_values.{i}.{part}", kind, cache))
            present = [*cache[:2], "total_sequence_length", cache[3]]
            outputs.append(value(f"present.{i}.{part}", kind, present))
    opsets = [helper.make_opsetid("", 22), helper.make_opsetid(_MICROSOFT, 1)]
    body = helper.make_graph(made.nodes, "main_graph", inputs, outputs, made.weights)
    onnx.save(helper.make_model(body, opset_imports=opsets, ir_version=10), folder / "model.onnx")
    config = json.dumps(_config(sizes, layers, graph), indent=4)
    (folder / "genai_config.json").write_text(config)
    return folder


def _config(s: Sizes, layers: int, graph: bool) -> dict[str, Any]:
    provider = {"cuda": {"enable_cuda_graph": str(int(graph))}}
    given = {f"past_{each}_names": f"past_key_values.%d.{each}" for each in ("key", "value")}
    made = {f"present_{each}_names": f"present.%d.{each}" for each in ("key", "value")}
    decoder = {
        "session_options": {"log_id": "onnxruntime-genai", "provider_options": [provider]},
        "filename": "model.onnx",
        "head_size": s.head,
        "hidden_size": s.width,
        "inputs": {"input_ids": "input_ids", "attention_mask": "attention_mask"} | given,
        "outputs": {"logits": "logits"} | made,
        "num_attention_heads": s.heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": s.kv_heads,
    }
    model: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "decoder": decoder}
    model |= {"type": "qwen3" if s.norms else "llama", "context_length": s.context, "vocab_size": s.vocab}
    search = {"max_length": s.context, "do_sample": False, "past_present_share_buffer": True}
    return {"model": model, "search": search}
