"""attention_cached for one new token of each sequence, beside torch's attention and GroupQueryAttention.

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
from onnx import helper
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from twinop import torch_op
from twinop.bench import runtime
from twinop.bench.cases import relative_error
from twinop.bench.cells import AGAIN, IN_ORT, IN_TORCH
from twinop.bench.measurements import Device, Measurements, Output, choose_device, chosen
from twinop.bench.providers import Subject, checked, require
from twinop.bench.timing import DeviceTimer, host_times_apart, timer_on
from twinop.console import clear_errors

ORT, TORCH = "ORT GroupQueryAttention, CUDA graph", "torch SDPA"
BATCHES, CONTEXTS, HEADS = (1, 8, 64), (128, 1024, 8192), ((32, 8, 64), (32, 8, 128))
"""Sequences; keys with the new one; heads, those of k and v, and their size."""
MOST_BYTES = 8 << 30  # of the caches


def draw(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Draws the inputs by name. The cache ends with the new token."""
    batch, context, heads, kv_heads, size = shape
    angles = torch.rand(context, size // 2, device=device) * 6
    return {
        "qkv": torch.randn(batch, 1, (heads + 2 * kv_heads) * size, device=device).to(dtype),
        **{
            name: torch.randn(batch, kv_heads, context, size, device=device, dtype=dtype)
            for name in ("k_cache", "v_cache")
        },
        "position": torch.full((batch,), context - 1, dtype=torch.int32, device=device),
        "total": torch.tensor([context], dtype=torch.int32),
        "cos_sin": torch.cat([angles.cos(), angles.sin()], -1).to(dtype),
    }


def reference(t: dict[str, Tensor]) -> Tensor:
    """Computes y in fp32, one sequence at a time, and the caches stay."""
    kv_heads, size = t["k_cache"].shape[1], t["k_cache"].shape[3]
    c, s = t["cos_sin"][-1].float().chunk(2, -1)
    rows = []
    for qkv, k_cache, v_cache in zip(t["qkv"][:, 0], t["k_cache"], t["v_cache"], strict=True):
        parts = qkv.view(-1, size).float()
        q, k, v = parts.split((len(parts) - 2 * kv_heads, kv_heads, kv_heads))
        q, k = (
            torch.cat([a * c - b * s, b * c + a * s], -1) for a, b in (each.chunk(2, -1) for each in (q, k))
        )
        keys, values = (
            torch.cat([cache[:, :-1].float(), new[:, None]], 1).repeat_interleave(len(q) // kv_heads, 0)
            for cache, new in ((k_cache, k), (v_cache, v))
        )
        rows.append(F.scaled_dot_product_attention(q[:, None], keys, values).flatten())
    return torch.stack(rows)[:, None]


def in_torch(t: dict[str, Tensor]) -> Tensor:
    """Computes the attention alone, of a q that is turned already: a lower bound of what torch needs."""
    size, heads = t["k_cache"].shape[3], t["qkv"].shape[2] // t["k_cache"].shape[3]
    q = t["qkv"].view(len(t["qkv"]), heads, 1, size)[:, : heads - 2 * t["k_cache"].shape[1]]
    return F.scaled_dot_product_attention(q, t["k_cache"], t["v_cache"], enable_gqa=True)


def in_ort(t: dict[str, Tensor], timer: DeviceTimer, ours: bool) -> Subject:
    """A session whose presents are the pasts, captured as a CUDA graph."""
    kv_heads, size = t["k_cache"].shape[1], t["k_cache"].shape[3]
    heads = t["qkv"].shape[2] // size - 2 * kv_heads
    outputs = {
        "y": torch.empty(len(t["qkv"]), 1, heads * size, dtype=t["qkv"].dtype, device=t["qkv"].device),
        "k_cache_out": t["k_cache"],
        "v_cache_out": t["v_cache"],
    }
    given, constants = (
        {name: each for name, each in t.items() if name != "cos_sin"},
        {"cos_sin": t["cos_sin"]},
    )
    if ours:
        node = runtime.custom_node(torch_op.records()["attention_cached"], t, {})
    else:
        constants = dict(
            zip(("cos", "sin"), (each.contiguous() for each in t["cos_sin"].chunk(2, -1)), strict=True)
        )
        names = ["qkv", "", "", "k_cache", "v_cache", "position", "total", "cos", "sin"]
        attributes: dict[str, Any] = {"num_heads": heads, "kv_num_heads": kv_heads, "do_rotary": 1}
        node = helper.make_node(
            "GroupQueryAttention", names, list(outputs), domain="com.microsoft", **attributes
        )
    session = runtime.open_session(
        runtime.one_op([node], given, outputs, constants=constants),
        t["qkv"].device,
        cpu_threads=1,
        stream=timer.stream,
        cuda_graph=True,
    )
    return Subject(runtime.bind(session, given, outputs, synchronize=False), (outputs["y"],))


def graph_of(run: Callable[[], Any]) -> Subject:
    """Captures a call as a CUDA graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run()
    return Subject(graph.replay, (y,))


def measure(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, timer: DeviceTimer | None, rounds: int
) -> dict[str, Any]:
    torch.manual_seed(0)
    t = draw(shape, dtype, device)
    expected = reference(t)
    ours = partial(torch_op.attention_cached, **t)
    makers: dict[str, Callable[[], Subject]] = {IN_TORCH: partial(Subject, ours)}
    if timer is not None:
        makers = {
            IN_TORCH: partial(graph_of, ours),
            TORCH: partial(graph_of, partial(in_torch, t)),
            IN_ORT: partial(in_ort, t, timer, True),
            ORT: partial(in_ort, t, timer, False),
        }

    def check(name: str, subject: Subject) -> None:
        if name != TORCH:
            require(relative_error(subject.result()[0], expected), 2e-2)

    subjects, missing = checked(makers, check)
    runs = {name: subject.run for name, subject in subjects.items()}
    runs |= {name + AGAIN: runs[name] for name in (TORCH, ORT) if name in runs}
    bytes_read = sum(t[name].numel() * t[name].element_size() for name in ("k_cache", "v_cache"))
    if timer is not None:
        times = timer.times(runs, rounds=rounds)
    else:
        times = host_times_apart(runs, rounds=rounds, seconds=1.0)
    return {"times": times, "missing": missing, "bytes": bytes_read}


def main(
    dtypes: Annotated[str, typer.Option(help="Default: bfloat16,float16 on a GPU, float32 on a CPU.")] = "",
    device: Device = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="A quick look: short contexts, few runs.")] = False,
    output: Output = None,
) -> None:
    """Measure attention of one new token: device time behind an empty L2 cache, wall time on a CPU."""
    with clear_errors(), torch.no_grad(), timer_on(where := choose_device(device)) as timer:
        default = "bfloat16,float16" if timer is not None else "float32"
        kinds = chosen("--dtypes", dtypes or default, ("bfloat16", "float16", "float32"))
        measured = Measurements("decode-attention", where, output, quick)
        contexts = CONTEXTS[:2] if quick or timer is None else CONTEXTS
        for kind, heads, batch, context in itertools.product(kinds, HEADS, BATCHES, contexts):
            dtype = getattr(torch, kind)
            if batch * context * heads[1] * heads[2] * 2 * dtype.itemsize > MOST_BYTES:
                continue
            line = measure((batch, context, *heads), dtype, where, timer, 5 if quick else 21)
            shape = f"{batch}x{context}, {heads[0]}/{heads[1]} x {heads[2]}"
            measured.add({"op": "attention_cached", "shape": shape, "dtype": kind} | line)
            measured.say()


if __name__ == "__main__":
    typer.run(main)
