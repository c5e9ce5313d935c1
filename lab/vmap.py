"""torch.vmap of every op that has a rule beside torch.vmap of torch's own function.

python lab/vmap.py --output lab/results
"""

import ctypes
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from twinop.bench.cases import relative_error
from twinop.bench.cells import IN_TORCH
from twinop.bench.measurements import Device, Output, chosen, measuring
from twinop.bench.peers import ENTRIES, Entry
from twinop.bench.providers import Subject, require, side_by_side
from twinop.bench.timing import DeviceTimer
from twinop.torch_op.registry import functions

TORCH = "torch"
EXAMPLES = 4096
TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}
WHOLE = {"weight": (64,), "bias": (64,), "matrix": (64, 64)}
SHAPES = {"row": (EXAMPLES, 1, 64), "matrices": (EXAMPLES, 64, 64)}
"""The inputs that all examples share, and those of which each has other ones than of [8, 64]."""


def _ada_layer_norm(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift


CELLS = ENTRIES | {
    "mul, a row": Entry("mul", "a row", torch.mul),
    "addcmul": Entry("addcmul", "a b c", torch.addcmul),
    "ada_layer_norm": Entry("ada_layer_norm", "x scale shift", _ada_layer_norm),
    "linear": Entry("linear", "x matrix bias", F.linear),
    "linear, a weight each": Entry("linear", "x matrices", F.linear),
    "linear_swiglu": Entry(
        "linear_swiglu", "x matrix", lambda x, weight: ENTRIES["swiglu_packed"].eager(F.linear(x, weight))
    ),
}


def measure(
    entry: Entry, dtype: str, device: torch.device, timer: DeviceTimer | None, rounds: int
) -> dict[str, Any]:
    """Measures the op and torch's function under torch.vmap."""
    generator = torch.Generator().manual_seed(0)
    given = []
    for name in entry.input_names:
        shape = WHOLE.get(name) or SHAPES.get(name) or (EXAMPLES, 8, 64)
        tensor = torch.randn(shape, generator=generator)
        given.append((tensor.abs() if name in entry.positive else tensor).to(device, getattr(torch, dtype)))
    dims = tuple(None if name in WHOLE else 0 for name in entry.input_names)

    def subject(function: Callable[..., Any]) -> Subject:
        return Subject(lambda: torch.vmap(function, dims)(*given))

    expected = subject(entry.eager).result()

    def check(_: str, made: Subject) -> None:
        require(max(map(relative_error, made.result(), expected)), TOLERANCE[dtype])

    ours = partial(functions[entry.op], **entry.attributes)
    makers = {IN_TORCH: partial(subject, ours), TORCH: partial(subject, entry.eager)}
    return side_by_side(makers, check, timer, rounds=rounds, again=[TORCH], seconds=4.0)


def main(
    dtypes: Annotated[str, typer.Option(help="Default: bfloat16,float32 on a GPU, float32 on a CPU.")] = "",
    ops: Annotated[str, typer.Option(help="Cells, with semicolons; default: all.")] = "",
    device: Device = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="A quick look: few runs.")] = False,
    output: Output = None,
) -> None:
    """Measure torch.vmap over 4,096 examples of [8, 64].

    On a GPU it is device time behind an empty L2 cache, on a CPU wall time with one thread.
    """
    with measuring("vmap", device, output, quick) as (measured, where, timer):
        kinds = chosen("--dtypes", dtypes or ("bfloat16,float32" if timer else "float32"), tuple(TOLERANCE))
        for parameter in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD: results reuse memory, on either side
            ctypes.CDLL(None).mallopt(parameter, 1 << 30)
        for kind in kinds:
            for cell in CELLS if not ops else ops.split(";"):
                line = measure(CELLS[cell], kind, where, timer, 7 if quick else 41)
                measured.say({"op": f"vmap {cell}", "dtype": kind} | line)


if __name__ == "__main__":
    typer.run(main)
