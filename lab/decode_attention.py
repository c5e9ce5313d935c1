"""attention_cached for one new token of each sequence, beside GroupQueryAttention and torch's attention.

python lab/decode_attention.py --output lab/results
"""

import itertools
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from onnx import NodeProto, helper
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from twinop import torch_op
from twinop.bench import runtime
from twinop.bench.cases import relative_error
from twinop.bench.cells import IN_ORT, IN_TORCH
from twinop.bench.measurements import Device, Output, chosen, measuring
from twinop.bench.providers import Subject, require, side_by_side
from twinop.bench.timing import DeviceTimer

ORT, TORCH = "ORT GroupQueryAttention", "torch SDPA"
HEADS, BATCHES, CONTEXTS = ((32, 8, 64), (32, 8, 128)), (1, 8, 64), (128, 1024, 8192)
"""Heads, those of k and v, and their size; sequences; keys of each, with the new one."""


def draw(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Draws the inputs by name. The new token takes the last row of the caches."""
    heads, kv_heads, size, batch, context = shape
    angles = torch.rand(context, size // 2, device=device) * 6
    return {
        "qkv": torch.randn(batch, 1, (heads + 2 * kv_heads) * size, device=device).to(dtype),
        "k_cache": torch.randn(batch, kv_heads, context, size, device=device, dtype=dtype),
        "v_cache": torch.randn(batch, kv_heads, context, size, device=device, dtype=dtype),
        "position": torch.full((batch,), context - 1, dtype=torch.int32, device=device),
        "total": torch.tensor([context], dtype=torch.int32),
        "cos_sin": torch.cat([angles.cos(), angles.sin()], -1).to(dtype),
    }


def in_torch(t: dict[str, Tensor], heads: int) -> Tensor:
    """Computes the attention alone, of a q that is not turned: less than torch needs."""
    q = t["qkv"].unflatten(-1, (-1, t["k_cache"].shape[3]))[:, :, :heads].transpose(1, 2)
    return F.scaled_dot_product_attention(q, t["k_cache"], t["v_cache"], enable_gqa=True)


def in_ort(node: NodeProto, t: dict[str, Tensor], y: Tensor, timer: DeviceTimer | None) -> Subject:
    """A session whose presents are the pasts."""
    tables = dict(zip(("cos", "sin"), (each.contiguous() for each in t["cos_sin"].chunk(2, -1)), strict=True))
    constants = {name: each for name, each in (t | tables).items() if name in ("cos_sin", *tables)}
    constants = {name: each for name, each in constants.items() if name in node.input}
    given = {name: t[name] for name in node.input if name and name not in constants}
    outputs = {"y": torch.empty_like(y), "k_cache_out": t["k_cache"], "v_cache_out": t["v_cache"]}
    run = runtime.run_of([node], given, outputs, timer, constants=constants)
    return Subject(run, (outputs["y"],))


def measure(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, timer: DeviceTimer | None, rounds: int
) -> dict[str, Any]:
    torch.manual_seed(0)
    t, (heads, kv_heads, *_) = draw(shape, dtype, device), shape
    wide = {name: each.float() if each.is_floating_point() else each for name, each in t.items()}
    expected = torch_op.attention_cached(**wide)  # another kernel
    attributes: dict[str, Any] = {"num_heads": heads, "kv_num_heads": kv_heads, "do_rotary": 1}
    inputs = ["qkv", "", "", "k_cache", "v_cache", "position", "total", "cos", "sin"]
    outputs = ["y", "k_cache_out", "v_cache_out"]
    stock = helper.make_node("GroupQueryAttention", inputs, outputs, domain="com.microsoft", **attributes)
    ours = runtime.custom_node(torch_op.records()["attention_cached"], t, {})
    y = expected.to(dtype)
    makers: dict[str, Callable[[], Subject]] = {
        IN_TORCH: lambda: Subject(partial(torch_op.attention_cached, **t)),
        IN_ORT: lambda: in_ort(ours, t, y, timer),
        ORT: lambda: in_ort(stock, t, y, timer),
        TORCH: lambda: Subject(partial(in_torch, t, heads)),
    }

    def check(name: str, subject: Subject) -> None:
        if name != TORCH:
            require(relative_error(subject.result()[0], expected), 2e-2)

    line = side_by_side(makers, check, timer, rounds=rounds, again=(TORCH, ORT))
    return line | {"bytes": 2 * t["k_cache"].numel() * dtype.itemsize}


def main(
    dtypes: Annotated[str, typer.Option(help="Default: bfloat16,float16 on a GPU, float32 on a CPU.")] = "",
    device: Device = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="A quick look: short contexts, few runs.")] = False,
    output: Output = None,
) -> None:
    """Measure attention of one new token: device time behind an empty L2 cache, wall time on a CPU."""
    with measuring("decode-attention", device, output, quick) as (measured, where, timer):
        default = "bfloat16,float16" if timer is not None else "float32"
        kinds = chosen("--dtypes", dtypes or default, ("bfloat16", "float16", "float32"))
        contexts = CONTEXTS[:2] if quick or timer is None else CONTEXTS
        for kind, heads, batch, context in itertools.product(kinds, HEADS, BATCHES, contexts):
            line = measure((*heads, batch, context), getattr(torch, kind), where, timer, 5 if quick else 21)
            shape = f"{batch}x{context}, {heads[0]}/{heads[1]} x {heads[2]}"
            measured.say({"op": "attention_cached", "shape": shape, "dtype": kind} | line)


if __name__ == "__main__":
    typer.run(main)
