"""linear and linear_swiglu beside torch's and ONNX Runtime's own products: `twinop bench linear`."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import onnx
import torch
import typer
from onnx import helper
from torch import Tensor
from torch.nn import functional as F

from twinop import torch_op
from twinop.console import clear_errors, err, out
from twinop.record import DOMAIN

from . import report, runtime
from .cases import relative_error
from .providers import reason_of
from .recording import Commit, Device, Output, Recording
from .timing import DeviceTimer, Run, host_times

IN_ORT, IN_TORCH, TWO_KERNELS = "twinop in ORT", "twinop in torch", "twinop in torch, two kernels"
TORCH, ORT, TORCH_AGAIN, ORT_AGAIN = "torch", "ORT", "torch again", "ORT again"
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
ON_CUDA = 1 / 0.98  # the bars of our time against theirs
ON_CPU = 1.05
FUSED = 0.98  # against two kernels: faster by more than the noise


@dataclass(frozen=True)
class Cell:
    """A call: the sizes of the product, and what is fused with it."""

    m: int
    k: int
    n: int
    activation: str = "none"
    op: str = "linear"
    layout: str = "nk"
    bias: bool = True
    residual: bool = False

    def __str__(self) -> str:
        fused = [self.op, self.activation, self.layout]
        return " ".join([*fused, *(name for name in ("bias", "residual") if getattr(self, name))])

    @property
    def shape(self) -> str:
        return f"{self.m}x{self.k}x{self.n}"

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
    Cell(16384, 768, 6144, "silu", "linear_swiglu", bias=False),
    Cell(8192, 2048, 3072, bias=False),
    Cell(8192, 2048, 11264, "silu", "linear_swiglu", bias=False),
    Cell(128, 768, 3072, "gelu_tanh", layout="kn"),
    Cell(1, 4096, 4096, bias=False),
)
SMALL = (Cell(128, 768, 768), Cell(64, 768, 3072, "gelu"), Cell(1, 768, 768))
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}


def reference(cell: Cell, t: Mapping[str, Tensor]) -> Tensor:
    """Computes the call in fp64 with torch's operators."""
    wide = {name: tensor.double() for name, tensor in t.items()}
    y = wide["x"] @ cell.columns(wide["weight"])
    y += sum(wide[name] for name in ("bias", "residual") if name in wide)
    if cell.op == "linear":
        return ACTIVATIONS[cell.activation](y)
    gate, others = y.chunk(2, -1)
    return F.silu(gate) * others


def in_torch(cell: Cell, t: Mapping[str, Tensor]) -> Callable[[], Tensor]:
    """Returns the call with the fewest kernels that torch has."""
    x, bias = t["x"], t.get("bias")
    columns = cell.columns(t["weight"])
    if cell.residual:
        return partial(torch.addmm, t["residual"], x, columns)
    if cell.op == "linear_swiglu":

        def swiglu() -> Tensor:
            gate, others = F.linear(x, columns.mT, bias).chunk(2, -1)
            return F.silu(gate) * others

        return swiglu
    if cell.activation in ("relu", "gelu_tanh") and bias is not None:
        use_gelu = cell.activation != "relu"
        return partial(torch.ops.aten._addmm_activation, bias, x, columns, use_gelu=use_gelu)
    if cell.activation == "gelu":
        return lambda: F.gelu(F.linear(x, columns.mT, bias))
    return partial(torch.mm, x, columns) if bias is None else partial(torch.addmm, bias, x, columns)


def two_kernels(cell: Cell, t: Mapping[str, Tensor]) -> Callable[[], Tensor]:
    """Returns the product with its bias, then our kernel of the activation."""
    behind: dict[str, Callable[[Tensor], Tensor]] = {
        "relu": torch_op.relu,
        "gelu": torch_op.gelu,
        "gelu_tanh": partial(torch_op.gelu, approximate="tanh"),
        "silu": torch_op.swiglu_packed,
    }
    return lambda: behind[cell.activation](torch_op.linear(**t, layout=cell.layout))


def our_node(cell: Cell, names: Mapping[str, Any]) -> list[onnx.NodeProto]:
    inputs = [name if name in names else "" for name in ("x", "weight", "bias", "residual")]
    while not inputs[-1]:
        inputs.pop()
    op = "CustomLinear" if cell.op == "linear" else "CustomLinearSwiglu"
    return [helper.make_node(op, inputs, ["y"], "node", domain=DOMAIN, **cell.attributes)]


def stock_nodes(cell: Cell, names: Mapping[str, Any]) -> list[onnx.NodeProto]:
    """Returns the nodes that a model has without ours; ONNX Runtime fuses what it can."""
    added = "bias" if cell.bias else "residual"
    inputs = ["x", "weight", *([added] if added in names else [])]
    behind = {
        "none": [],
        "relu": ["y = Relu (z)"],
        "gelu": ["y = Gelu (z)"],
        "gelu_tanh": ['y = Gelu <approximate = "tanh"> (z)'],
        "silu": [
            "g, u = Split <axis = -1, num_outputs = 2> (z)",
            "s = Sigmoid (g)",
            "a = Mul (g, s)",
            "y = Mul (a, u)",
        ],
    }[cell.activation]
    product = helper.make_node(
        "Gemm", inputs, ["z" if behind else "y"], "product", transB=int(cell.layout == "nk")
    )
    nodes = [product, *map(onnx.parser.parse_node, behind)]
    for number, node in enumerate(nodes):
        node.name = f"node{number}"
    return nodes


class Machine:
    """Builds, checks and times the providers of cells on one device."""

    def __init__(self, device: torch.device, rounds: int) -> None:
        self.device, self.rounds = device, rounds
        self.timer = DeviceTimer(torch.cuda.Stream(device)) if device.type == "cuda" else None

    def rows(self, cell: Cell, dtype: torch.dtype, missing: dict[str, str]) -> list[dict[str, Any]]:
        """Measures a cell. A provider that fails or computes something else is told and left out."""
        tensors = cell.tensors(dtype, self.device)
        expected = reference(cell, tensors)
        ours = partial(getattr(torch_op, cell.op), **tensors, **cell.attributes)
        makers: dict[str, Callable[[], tuple[Run, Callable[[], Tensor]]]] = {
            IN_TORCH: lambda: self._plain(ours),
            TORCH: lambda: self._plain(in_torch(cell, tensors)),
            IN_ORT: lambda: self._session(our_node(cell, tensors), tensors, expected.to(dtype)),
            ORT: lambda: self._session(stock_nodes(cell, tensors), tensors, expected.to(dtype)),
        }
        if cell.activation != "none":
            makers[TWO_KERNELS] = lambda: self._plain(two_kernels(cell, tensors))
        runs: dict[str, Run] = {}
        for name, make in makers.items():
            try:
                run, result = make()
                error = relative_error(result(), expected)
                if error > TOLERANCE[dtype]:
                    raise report.BenchError(f"wrong, relative error {error:.1e}")
            except Exception as failure:  # a node without a kernel
                where = f"{cell} {cell.shape}, {dtype}, {name}"
                missing[where] = reason_of(failure)
                err.print(f"not measured: {where}: {failure}", markup=False, soft_wrap=True)
                continue
            runs[name] = run
        again = {TORCH_AGAIN: TORCH, ORT_AGAIN: ORT}
        runs |= {name: runs[first] for name, first in again.items() if first in runs}
        if self.timer is not None:
            times = self.timer.times(runs, rounds=self.rounds)
        else:  # threads of either pool spin for a while after a run
            parts = ({n: r for n, r in runs.items() if ("torch" in n) == here} for here in (True, False))
            times = {}
            for part in filter(None, parts):
                times |= host_times(part, rounds=self.rounds, seconds=1.0)
        label = {"op": str(cell), "dtype": str(dtype).removeprefix("torch."), "shape": cell.shape}
        return [label | {"provider": name} | each.row() for name, each in times.items()]

    def _plain(self, call: Callable[[], Tensor]) -> tuple[Run, Callable[[], Tensor]]:
        return call, call

    def _session(
        self, nodes: list[onnx.NodeProto], tensors: Mapping[str, Tensor], y: Tensor
    ) -> tuple[Run, Callable[[], Tensor]]:
        """Opens a session in which weight and bias are constants, as in a model."""
        inputs = {name: tensor for name, tensor in tensors.items() if name in ("x", "residual")}
        outputs = {"y": torch.empty_like(y)}
        model = runtime.one_op(nodes, inputs, outputs)
        for name in tensors.keys() - inputs.keys():
            bits = tensors[name].cpu().contiguous().view(torch.uint8).numpy().tobytes()
            kind = runtime.ONNX_TYPES[tensors[name].dtype]
            model.graph.initializer.append(
                helper.make_tensor(name, kind, tensors[name].shape, bits, raw=True)
            )
        session = runtime.open_session(
            model,
            self.device,
            cpu_threads=1,
            stream=self.timer.stream if self.timer is not None else None,
            optimize=True,
        )
        run = runtime.bind(session, inputs, outputs, synchronize=self.timer is None)

        def result() -> Tensor:
            run()
            if self.timer is not None:
                self.timer.stream.synchronize()
            return outputs["y"]

        return run, result


def bars(rows: list[dict[str, Any]], on_cuda: bool) -> list[dict[str, Any]]:
    """Returns the verdicts on each cell.

    On CUDA, against torch's product, and against two kernels where something is fused. On a CPU, against
    ONNX Runtime's product.
    """
    ours, theirs, again = (IN_TORCH, TORCH, TORCH_AGAIN) if on_cuda else (IN_ORT, ORT, ORT_AGAIN)
    found = []
    for key in dict.fromkeys((row["op"], row["shape"], row["dtype"]) for row in rows):
        us = {r["provider"]: r["median_us"] for r in rows if (r["op"], r["shape"], r["dtype"]) == key}
        cell = ", ".join(key)
        if ours in us and theirs in us:
            noise = abs(us[again] / us[theirs] - 1)
            what, bound = f"{cell}: {ours} / {theirs}, time", ON_CUDA if on_cuda else ON_CPU
            found.append(report.bar(what, us[ours] / us[theirs], bound, tolerance=noise))
        if on_cuda and ours in us and TWO_KERNELS in us:
            what = f"{cell}: {ours} / two kernels, time"
            found.append(report.bar(what, us[ours] / us[TWO_KERNELS], FUSED))
    return found


def main(
    dtypes: Annotated[
        str | None,
        typer.Option(help="Default: bfloat16,float16 on a GPU, float32 on a CPU.", show_default=False),
    ] = None,
    device: Device = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="A quick look: small products, few runs.")] = False,
    output: Output = None,
    commit: Commit = None,
) -> None:
    """Measure linear and linear_swiglu beside torch's addmm and ONNX Runtime's Gemm.

    Both runtimes have what each fuses by itself. A fused activation is also beside the product and our kernel
    of the activation behind it. On a GPU: device time behind an empty L2 cache. On a CPU: wall time with one
    thread.

    Example:

        twinop bench linear --dtypes bfloat16
    """
    with clear_errors():
        where = report.choose_device(device)
        on_cuda = where.type == "cuda"
        kinds = report.chosen(
            "--dtypes",
            dtypes or ("bfloat16,float16" if on_cuda else "float32"),
            ("bfloat16", "float16", "float32"),
        )
        cells = CELLS if on_cuda and not quick else SMALL
        recording, started = Recording("linear", where, output, commit), time.perf_counter()
        machine = Machine(where, 7 if quick else 41)
        rows: list[dict[str, Any]] = []
        missing: dict[str, str] = {}
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        with report.progress("cells", len(cells) * len(kinds)) as step, torch.no_grad():
            for kind in kinds:
                for cell in cells:
                    step(f"{cell} {cell.shape}")
                    rows += machine.rows(cell, getattr(torch, kind), missing)
        torch.set_num_threads(threads)
        report.show_rows("Products", rows, ("op", "shape", "dtype", "provider", "median_us"))
        verdicts = bars(rows, on_cuda)
        report.show_bars(verdicts)
        settings = {"seconds": time.perf_counter() - started}
        recording.write(settings=settings, not_measured=missing, bars=verdicts, rows=rows)
        if quick:
            out.print("This was a quick look: do not record it.", highlight=False)
