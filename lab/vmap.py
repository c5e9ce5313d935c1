"""torch.vmap of every op that has a rule beside torch.vmap of torch's own function.

python lab/vmap.py --output lab/results
"""

import ctypes
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from twinop import torch_op
from twinop.bench.cases import relative_error
from twinop.bench.cells import AGAIN, IN_TORCH
from twinop.bench.measurements import Device, Measurements, Output, choose_device, chosen
from twinop.bench.providers import Subject, checked, require
from twinop.bench.timing import host_times, timer_on
from twinop.console import clear_errors

TORCH = "torch"
EXAMPLES = 4096
TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}

SHAPES = {
    "x": (EXAMPLES, 8, 64),
    "y": (EXAMPLES, 8, 64),
    "z": (EXAMPLES, 8, 64),
    "row": (EXAMPLES, 1, 64),  # for each example, which broadcasts
    "weights": (EXAMPLES, 64, 64),
    "w": (64,),
    "matrix": (64, 64),
}
BATCHED = ("x", "y", "z", "row", "weights")

Function = Callable[..., Tensor]


def _norm(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift


def _packed(x: Tensor) -> Tensor:
    gate, value = x.chunk(2, -1)
    return F.silu(gate) * value


def _rms_norm(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], w, 1e-6)


ops = torch_op
PAIRS: dict[str, tuple[str, Function, Function]] = {
    **{
        name: ("x", getattr(ops, name), getattr(torch, name))
        for name in ("exp", "relu", "sigmoid", "tanh", "square")
    },
    **{name: ("x", getattr(ops, name), getattr(F, name)) for name in ("gelu", "silu", "softplus")},
    "log": ("x", lambda x: ops.log(x.abs()), lambda x: torch.log(x.abs())),
    "add": ("x y", ops.add, torch.add),
    "mul, a row": ("x row", ops.mul, torch.mul),
    "pow": ("x y", lambda x, y: ops.pow(x.abs(), y), lambda x, y: torch.pow(x.abs(), y)),
    "addcmul": ("x y z", ops.addcmul, torch.addcmul),
    "swiglu": ("x y", ops.swiglu, lambda x, gate: F.silu(gate) * x),
    "swiglu_packed": ("x", ops.swiglu_packed, _packed),
    "softmax": ("x", ops.softmax, lambda x: F.softmax(x, -1)),
    "rms_norm": ("x w", ops.rms_norm, _rms_norm),
    "layer_norm": ("x w", lambda x, w: ops.layer_norm(x, w, w), lambda x, w: F.layer_norm(x, (64,), w, w)),
    "ada_layer_norm": ("x y z", ops.ada_layer_norm, _norm),
    "add_rms_norm": (
        "x y w",
        lambda x, y, w: ops.add_rms_norm(x, y, w)[0],
        lambda x, y, w: _rms_norm(x + y, w),
    ),
    "add_layer_norm": (
        "x y w",
        lambda x, y, w: ops.add_layer_norm(x, y, w)[0],
        lambda x, y, w: F.layer_norm(x + y, (64,), w),
    ),
    "linear": ("x matrix w", ops.linear, F.linear),
    "linear, a weight each": ("x weights", ops.linear, F.linear),
    "linear_swiglu": (
        "x matrix",
        ops.linear_swiglu,
        lambda x, weight: _packed(F.linear(x, weight)),
    ),
}


def tensors(dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(device, dtype) for name, shape in SHAPES.items()}


def runs_of(cell: str, given: Mapping[str, Tensor]) -> dict[str, Subject]:
    names, ours, theirs = PAIRS[cell]
    arguments = [given[name] for name in names.split()]
    dims = tuple(0 if name in BATCHED else None for name in names.split())
    return {
        name: Subject(lambda function=function: torch.vmap(function, dims)(*arguments))  # type: ignore[misc]
        for name, function in ((IN_TORCH, ours), (TORCH, theirs))
    }


def subjects_of(
    cell: str, given: Mapping[str, Tensor], tolerance: float
) -> tuple[dict[str, Subject], dict[str, str]]:
    """Returns the runs that give what torch gives, and why others are missing."""
    made = runs_of(cell, given)
    expected = made[TORCH].result()[0]

    def check(_: str, subject: Subject) -> None:
        require(relative_error(subject.result()[0], expected), tolerance)

    return checked({name: partial(made.__getitem__, name) for name in made}, check)


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
    with clear_errors(), torch.no_grad(), timer_on(where := choose_device(device)) as timer:
        kinds = chosen("--dtypes", dtypes or ("bfloat16,float32" if timer else "float32"), tuple(TOLERANCE))
        measured = Measurements("vmap", where, output, quick)
        torch.set_num_threads(1)
        for parameter in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD: results reuse memory, on either side
            ctypes.CDLL(None).mallopt(parameter, 1 << 30)
        for kind in kinds:
            given = tensors(getattr(torch, kind), where)
            for cell in PAIRS if not ops else ops.split(";"):
                subjects, missing = subjects_of(cell, given, TOLERANCE[kind])
                runs = {name: subject.run for name, subject in subjects.items()}
                runs[TORCH + AGAIN] = runs[TORCH]
                rounds = 7 if quick else 41
                times = (
                    timer.times(runs, rounds=rounds)
                    if timer
                    else host_times(runs, rounds=rounds, seconds=4.0)
                )
                measured.add({"op": f"vmap {cell}", "dtype": kind, "times": times, "missing": missing})
                measured.say()


if __name__ == "__main__":
    typer.run(main)
