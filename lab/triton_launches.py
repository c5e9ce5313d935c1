"""Kernels in Triton, in ONNX Runtime and by Triton's own launch. It needs a GPU.

python lab/triton_launches.py
"""

import itertools
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from twinop.bench import runtime
from twinop.bench.measure import IN_ORT, IN_TORCH, Subject, require, side_by_side
from twinop.bench.measurements import Output, measuring
from twinop.bench.timing import DeviceTimer, host_times
from twinop.libraries.library import find_library
from twinop.libraries.load_module import load_module
from twinop.record.op_spec import DOMAIN
from twinop.system import python_child
from twinop.torch_op import load

EXAMPLES = Path(__file__).resolve().parents[1] / "examples/triton"
SIZES = tuple(1 << exponent for exponent in (20, 22, 24, 26, 28))
ROWS = ((1024, 1024), (4096, 4096), (32768, 4096), (65536, 4096))
PRODUCTS = ((4096, 4096, 4096), (16384, 768, 3072))  # M, K, N
ATTENTIONS = ((32, 12, 512, 64), (4, 32, 4096, 128))  # batch, heads, tokens, head size
CHAIN, ROUNDS = 50, 51
OWN_LAUNCH = "Triton"
CUDA_OP = "twinop's CUDA op"
TOLERANCE = 2e-2  # bfloat16, relative to the largest value


@dataclass
class Cell:
    """An op on given inputs."""

    op: str
    inputs: dict[str, Tensor]
    reference: Callable[..., Tensor]
    attributes: dict[str, Any] = field(default_factory=dict)

    @property
    def shape(self) -> str:
        return " x ".join("x".join(map(str, each.shape)) for each in self.inputs.values())


def cells(device: torch.device) -> Iterator[Cell]:
    """Draws what is measured, in bfloat16."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=device)

    for size in SIZES:
        yield Cell("gelu", {"x": draw(size)}, F.gelu)
        yield Cell("vector_add", {"x": draw(size), "y": draw(size)}, torch.add)
    for shape in ROWS:
        yield Cell("softmax", {"x": draw(*shape)}, partial(F.softmax, dim=-1))
    for m, k, n in PRODUCTS:
        yield Cell(
            "matmul",
            {"a": draw(m, k), "b": draw(k, n) / k**0.5, "bias": draw(n)},
            lambda a, b, bias: F.gelu(torch.addmm(bias, a, b)),
            {"activation": "gelu"},
        )
    for batch, heads, tokens, size in ATTENTIONS:
        yield Cell(
            "flash_attention",
            {name: draw(batch, heads, tokens, size) for name in "qkv"},
            F.scaled_dot_product_attention,
            {"scale": size**-0.5},
        )


class Machine:
    """Builds, checks and times the providers of cells on one GPU. The libraries lie in `folder`."""

    def __init__(self, timer: DeviceTimer, folder: Path) -> None:
        self.timer, self.folder = timer, folder

    def library(self, op: str) -> Path:
        """Returns the example's library for this GPU. It is built at the first call."""
        path = self.folder / f"lib{op}.so"
        if not path.is_file():
            build = ("twinop", "build", str(EXAMPLES / f"{op}.py"), "-o", str(path))
            subprocess.run(python_child.module(*build), check=True)
        return path

    def cell(self, cell: Cell) -> dict[str, Any]:
        """Measures the device time of a cell's providers; those that fail or are wrong are missing."""
        inputs = list(cell.inputs.values())
        expected = cell.reference(*(each.float() for each in inputs))
        declared = getattr(load_module(EXAMPLES / f"{cell.op}.py"), cell.op)
        defaults = {entry.name: entry.default for entry in declared.record.attributes}
        in_torch = load(self.library(cell.op)).functions[cell.op]
        makers: dict[str, Callable[[], Subject]] = {
            OWN_LAUNCH: partial(Subject, partial(declared.launcher, *inputs, **defaults | cell.attributes)),
            IN_TORCH: partial(Subject, partial(in_torch, *inputs, **cell.attributes)),
            IN_ORT: partial(self._in_ort, cell, expected),
        }

        def check(_: str, subject: Subject) -> None:
            error = (subject.result()[0].float() - expected).abs().max() / expected.abs().max()
            require(float(error), TOLERANCE)

        label = {"time": "device", "op": cell.op, "shape": cell.shape}
        return label | side_by_side(makers, check, self.timer, rounds=ROUNDS, again=())

    def _in_ort(self, cell: Cell, expected: Tensor) -> Subject:
        library = self.library(cell.op)
        node = runtime.custom_node(load(library).records[cell.op], cell.inputs, cell.attributes)
        out = {node.output[0]: torch.empty_like(expected, dtype=torch.bfloat16)}
        run = runtime.run_of([node], cell.inputs, out, self.timer, library=library)
        return Subject(run, tuple(out.values()))

    def chain(self) -> dict[str, Any]:
        """Measures chains of one-element nodes, where the host's work is what counts."""
        x = torch.randn(1, device=self.timer.stream.device)
        y = torch.empty_like(x)
        runs = {}
        names = ["x", *(f"t{i}" for i in range(1, CHAIN)), "y"]
        for provider, op, library in (
            (IN_ORT, "square.CustomSquare", self.library("square")),
            (CUDA_OP, f"{DOMAIN}.CustomRelu", find_library("custom_relu")),
        ):
            nodes = runtime.parse_nodes("; ".join(f"{b} = {op}({a})" for a, b in itertools.pairwise(names)))
            runs[provider] = runtime.run_of(nodes, {"x": x}, {"y": y}, self.timer, library=library)
        times = host_times(runs, rounds=501, seconds=5.0, after=self.timer.stream.synchronize)
        return {"time": "wall", "op": f"{CHAIN} nodes", "shape": "1", "times": times}


def main(output: Output = None) -> None:
    """Measure the kernels of examples/triton in ONNX Runtime, as torch's ops, and as Triton launches them.

    It is device time with an empty L2 cache; a chain of nodes of one element shows the host's work.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        measuring("triton", "cuda", output, quick=False) as (measured, where, timer),
    ):
        assert timer is not None
        machine = Machine(timer, Path(folder))
        measured.say(machine.chain())
        for cell in cells(where):
            measured.say(machine.cell(cell))


if __name__ == "__main__":
    typer.run(main)
