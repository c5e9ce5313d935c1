"""linear and linear_swiglu beside torch's and ONNX Runtime's own products.

python lab/linear.py --dtypes bfloat16
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from onnx import NodeProto
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from twinop import torch_op
from twinop.bench import runtime
from twinop.bench.cases import relative_error
from twinop.bench.entries import ENTRIES
from twinop.bench.measure import IN_ORT, IN_TORCH, Subject, require, side_by_side
from twinop.bench.measurements import Device, Output, chosen, measuring
from twinop.bench.timing import DeviceTimer

TORCH, ORT, TWO_KERNELS = "torch", "ORT", f"{IN_TORCH}, two kernels"
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


@dataclass(frozen=True)
class Cell:
    """A call: the sizes of the product, and what is fused with it."""

    m: int
    k: int
    n: int
    activation: str = "none"
    layout: str = "nk"
    bias: bool = True
    residual: bool = False

    def __str__(self) -> str:
        added = (name for name in ("bias", "residual") if getattr(self, name))
        return " ".join([self.op, self.activation, self.layout, *added])

    @property
    def op(self) -> str:
        return "linear_swiglu" if self.activation == "silu" else "linear"

    @property
    def attributes(self) -> dict[str, str]:
        return {"activation": self.activation, "layout": self.layout}

    def columns(self, weight: Tensor) -> Tensor:
        """Returns the weight as [K, N]."""
        return weight.mT if self.layout == "nk" else weight

    def tensors(self, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.m + self.n)
        shapes: dict[str, tuple[int, ...]] = {"x": (self.m, self.k)}
        shapes["weight"] = (self.n, self.k) if self.layout == "nk" else (self.k, self.n)
        if self.bias:
            shapes["bias"] = (self.n,)
        if self.residual:
            shapes["residual"] = (self.m, self.n)
        found = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        found["weight"] /= self.k**0.5
        return {name: tensor.to(device, dtype) for name, tensor in found.items()}


CELLS = (
    Cell(16384, 768, 2304),
    Cell(16384, 768, 768),
    Cell(16384, 768, 3072, "relu"),
    Cell(16384, 768, 3072, "gelu_tanh"),
    Cell(16384, 768, 3072, "gelu"),
    Cell(16384, 3072, 768, layout="kn"),
    Cell(16384, 768, 768, bias=False, residual=True),
    Cell(16384, 768, 6144, "silu", bias=False),
    Cell(8192, 2048, 3072, bias=False),
    Cell(8192, 2048, 11264, "silu", bias=False),
    Cell(128, 768, 3072, "gelu_tanh", layout="kn"),
    Cell(1, 4096, 4096, bias=False),
)
SMALL = (Cell(128, 768, 768), Cell(64, 768, 3072, "gelu"), Cell(1, 768, 768))


# The entries of `twinop bench` have each activation in torch, as an op of ours, and as nodes.
ACTIVATIONS = {name: ENTRIES[name] for name in ("relu", "gelu", "gelu_tanh")}
ACTIVATIONS["silu"] = ENTRIES["swiglu_packed"]


def reference(cell: Cell, t: Mapping[str, Tensor]) -> Tensor:
    """Computes the call in fp64 with torch's operators."""
    wide = {name: tensor.double() for name, tensor in t.items()}
    y = wide["x"] @ cell.columns(wide["weight"])
    y += sum(wide[name] for name in ("bias", "residual") if name in wide)
    return y if cell.activation == "none" else ACTIVATIONS[cell.activation].eager(y)


def in_torch(cell: Cell, t: Mapping[str, Tensor]) -> Callable[[], Tensor]:
    """Returns the call with the fewest kernels that torch has."""
    x, bias = t["x"], t.get("bias")
    columns = cell.columns(t["weight"])
    if cell.activation in ("relu", "gelu_tanh"):
        use_gelu = cell.activation == "gelu_tanh"
        return partial(torch.ops.aten._addmm_activation, bias, x, columns, use_gelu=use_gelu)
    if cell.activation != "none":
        behind = ACTIVATIONS[cell.activation].eager
        return lambda: behind(F.linear(x, columns.mT, bias))
    added = t.get("residual", bias)
    return partial(torch.mm, x, columns) if added is None else partial(torch.addmm, added, x, columns)


def two_kernels(cell: Cell, t: Mapping[str, Tensor]) -> Tensor:
    """Computes the product with its bias, then our kernel of the activation."""
    entry = ACTIVATIONS[cell.activation]
    return getattr(torch_op, entry.op)(torch_op.linear(**t, layout=cell.layout), **entry.attributes)


def stock_nodes(cell: Cell) -> list[NodeProto]:
    """Returns the nodes that a model has without ours; ONNX Runtime fuses what it can."""
    added = ", bias" if cell.bias else ", residual" if cell.residual else ""
    product = f"Gemm <transB = {int(cell.layout == 'nk')}> (x, weight{added})"
    if cell.activation == "none":
        return runtime.parse_nodes(f"y = {product}")
    activation = ACTIVATIONS[cell.activation].ort.replace("(x)", "(z)")
    return runtime.parse_nodes(f"z = {product}; {activation}")


def in_ort(
    nodes: list[NodeProto], tensors: Mapping[str, Tensor], like: Tensor, timer: DeviceTimer | None
) -> Subject:
    """Opens a session in which weight and bias are constants, as in a model."""
    inputs = {name: tensor for name, tensor in tensors.items() if name in ("x", "residual")}
    constants = {name: tensor for name, tensor in tensors.items() if name not in inputs}
    y = torch.empty_like(like)
    run = runtime.run_of(nodes, inputs, {"y": y}, timer, constants=constants, optimize=True)
    return Subject(run, (y,))


def measure(cell: Cell, dtype: torch.dtype, timer: DeviceTimer | None, rounds: int) -> dict[str, Any]:
    """Measures a cell. Returns the times, and why a provider failed or computed something else."""
    tensors = cell.tensors(dtype, timer.stream.device if timer is not None else torch.device("cpu"))
    expected = reference(cell, tensors)
    like = expected.to(dtype)
    our_node = runtime.custom_node(torch_op.records()[cell.op], tensors, cell.attributes)
    makers: dict[str, Callable[[], Subject]] = {
        IN_TORCH: partial(Subject, partial(getattr(torch_op, cell.op), **tensors, **cell.attributes)),
        TORCH: partial(Subject, in_torch(cell, tensors)),
        IN_ORT: partial(in_ort, [our_node], tensors, like, timer),
        ORT: partial(in_ort, stock_nodes(cell), tensors, like, timer),
    }
    if cell.activation != "none":
        makers[TWO_KERNELS] = partial(Subject, partial(two_kernels, cell, tensors))

    def check(_: str, subject: Subject) -> None:
        require(relative_error(subject.result()[0], expected), TOLERANCE[dtype])

    return side_by_side(makers, check, timer, rounds=rounds, again=(TORCH, ORT))


def main(
    dtypes: Annotated[str, typer.Option(help="Default: bfloat16,float16 on a GPU, float32 on a CPU.")] = "",
    device: Device = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="A quick look: small products, few runs.")] = False,
    output: Output = None,
) -> None:
    """Measure linear and linear_swiglu beside torch's addmm, ONNX Runtime's Gemm, and two kernels.

    On a GPU it is device time behind an empty L2 cache, on a CPU wall time with one thread.
    """
    with measuring("linear", device, output, quick) as (measured, _, timer):
        default = "bfloat16,float16" if timer is not None else "float32"
        kinds = chosen("--dtypes", dtypes or default, ("bfloat16", "float16", "float32"))
        for kind in kinds:
            for cell in CELLS if timer is not None and not quick else SMALL:
                label = {"op": str(cell), "dtype": kind, "shape": f"{cell.m}x{cell.k}x{cell.n}"}
                measured.say(label | measure(cell, getattr(torch, kind), timer, 7 if quick else 41))


if __name__ == "__main__":
    typer.run(main)
