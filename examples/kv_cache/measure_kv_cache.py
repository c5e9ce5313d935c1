"""append_kv beside a kernel written by hand with the same accesses.

python examples/kv_cache/measure_kv_cache.py --output lab/results
"""

import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from attention import turned  # type: ignore[import-not-found]
from kv_cache import tables  # type: ignore[import-not-found]

from twinop import torch_op
from twinop.bench import runtime
from twinop.bench.measure import IN_ORT, IN_TORCH, Subject, captured, device_work, side_by_side
from twinop.bench.measurements import BenchError, Device, Output, measuring
from twinop.bench.timing import DeviceTimer, Run
from twinop.libraries.library import find_library

BY_HAND, GRAPH, COPIED = "kernel by hand", f"{IN_ORT}, CUDA graph", f"{IN_ORT}, other memory"
SHAPES = ((8, 1, 8, 128, 4096), (8, 512, 8, 128, 4096), (1, 1, 8, 128, 4096))
"""Sequences, new tokens of each, heads, their size, rows of the cache."""

SOURCE = """
__device__ float widen(unsigned short x) { return __uint_as_float((unsigned)x << 16); }
__device__ unsigned short rounded(float x) {
  unsigned bits = __float_as_uint(x);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
extern "C" __global__ void append(const unsigned short* k, const unsigned short* v, const float* cos,
    const float* sin, const long long* position, unsigned short* k_cache, unsigned short* v_cache,
    int heads, int pairs, int tokens, int rows, int count) {
  long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  long long pair = i % pairs, head = i / pairs % heads, token = i / (pairs * heads);
  long long batch = token / tokens, row = position[batch] + token % tokens;
  if (row < 0 || row >= rows) return;
  long long from = (token * heads + head) * 2 * pairs + pair;
  long long to = ((batch * rows + row) * heads + head) * 2 * pairs + pair;
  float c = cos[row * pairs + pair], s = sin[row * pairs + pair];
  float a = widen(k[from]), b = widen(k[from + pairs]);
  k_cache[to] = rounded(a * c - b * s);
  k_cache[to + pairs] = rounded(b * c + a * s);
  v_cache[to] = v[from];
  v_cache[to + pairs] = v[from + pairs];
}
"""


def draw(shape: tuple[int, ...], device: torch.device) -> dict[str, Tensor]:
    """Draws the inputs by name, in bfloat16. The caches are empty."""
    batch, new, heads, size, rows = shape
    k, v = torch.randn(2, batch, new, heads, size, device=device).bfloat16()
    cos, sin = (table.to(device) for table in tables(rows, size))
    position = torch.randint(0, rows - new + 1, (batch,), device=device)
    caches = (torch.zeros(batch, rows, heads, size, dtype=k.dtype, device=device) for _ in "kv")
    names = ("k_cache", "v_cache", "k", "v", "cos", "sin", "position")
    return dict(zip(names, (*caches, k, v, cos, sin, position), strict=True))


def in_torch(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, position: Tensor
) -> None:
    """Computes the op with torch's operators, each of which is a kernel."""
    rows = position[:, None] + torch.arange(k.shape[1], device=k.device)
    batch = torch.arange(k.shape[0], device=k.device)[:, None]
    k_cache.index_put_((batch, rows), turned(k.float(), cos[rows], sin[rows]).to(k.dtype))
    v_cache.index_put_((batch, rows), v)


def by_hand(t: dict[str, Tensor]) -> None:
    count, (_, tokens, heads, size) = t["k"].numel() // 2, t["k"].shape
    tensors = (t[name] for name in ("k", "v", "cos", "sin", "position", "k_cache", "v_cache"))
    sizes = (heads, size // 2, tokens, t["k_cache"].shape[1], count)
    _kernel()(grid=((count + 127) // 128, 1, 1), block=(128, 1, 1), args=(*tensors, *sizes))


@cache
def _kernel() -> Any:
    return torch.cuda._compile_kernel(SOURCE, "append")


def in_ort(
    t: dict[str, Tensor], library: Path, timer: DeviceTimer | None, copied: bool = False, graph: bool = False
) -> Subject:
    """A node whose outputs are the caches themselves, or with `copied` other memory."""
    record = torch_op.load(library).records["append_kv"]
    outputs = {
        f"{name}_out": torch.zeros_like(t[name]) if copied else t[name] for name in ("k_cache", "v_cache")
    }
    node = runtime.custom_node(record, t, {})
    run = runtime.run_of([node], t, outputs, timer, library=library, cuda_graph=graph)
    return Subject(run, facts={"caches": tuple(outputs.values())})


def measure(
    shape: tuple[int, ...], device: torch.device, library: Path, timer: DeviceTimer | None, rounds: int
) -> dict[str, Any]:
    torch.manual_seed(0)
    given = draw(shape, device)
    expected = {name: tensor.clone() for name, tensor in given.items()}
    in_torch(**expected)
    append = torch_op.load(library).append_kv

    def own() -> dict[str, Tensor]:
        """The same inputs, with caches of their own."""
        return given | {name: torch.zeros_like(given[name]) for name in ("k_cache", "v_cache")}

    def subject(function: Callable[[dict[str, Tensor]], object], graph: bool = False) -> Subject:
        tensors = own()
        run: Run = partial(function, tensors)
        run = captured(run, timer.stream).run if graph and timer is not None else run
        return Subject(run, facts={"caches": (tensors["k_cache"], tensors["v_cache"])})

    makers: dict[str, Callable[[], Subject]] = {
        IN_TORCH: lambda: subject(lambda t: append(*t.values())),
        IN_ORT: lambda: in_ort(own(), library, timer),
        COPIED: lambda: in_ort(own(), library, timer, copied=True),
        "torch": lambda: subject(lambda t: in_torch(**t)),
    }
    if timer is not None:
        makers |= {
            BY_HAND: lambda: subject(by_hand),
            GRAPH: lambda: in_ort(own(), library, timer, graph=True),
            f"{BY_HAND}, CUDA graph": lambda: subject(by_hand, graph=True),
        }

    right = {}

    def check(name: str, made: Subject) -> None:
        made.run()
        for found, which in zip(made.facts["caches"], ("k_cache", "v_cache"), strict=True):
            if not torch.allclose(found.float(), expected[which].float(), rtol=1e-2, atol=1e-2):
                raise BenchError(f"wrong result: another {which}")
        right[name] = made.run

    line = side_by_side(makers, check, timer, rounds=rounds, again=(BY_HAND, "torch"))
    return line | {"work": {name: device_work(run) for name, run in right.items()} if timer else {}}


def main(
    device: Device = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="A quick look: a small cache, few runs.")] = False,
    output: Output = None,
) -> None:
    """Measure an append to a cache of keys and values: the time of the device, wall time on a CPU."""
    with measuring("kv-cache", device, output, quick) as (measured, where, timer):
        for shape in ((2, 1, 2, 16, 64),) if quick else SHAPES:
            line = measure(shape, where, find_library("kv_cache"), timer, 7 if quick else 101)
            measured.say({"op": "append_kv", "shape": "x".join(map(str, shape)), "dtype": "bfloat16"} | line)


if __name__ == "__main__":
    typer.run(main)
