"""linear and linear_swiglu beside torch's and ONNX Runtime's own products: `twinop bench linear`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
import typer
from onnx import NodeProto
from torch import Tensor
from torch.nn import functional as F

from twinop import torch_op
from twinop.console import clear_errors, out

from twinop.bench import report, runtime
from twinop.bench.cases import relative_error
from twinop.bench.cells import AGAIN, IN_ORT, IN_TORCH
from twinop.bench.providers import Subject
from twinop.bench.recording import Commit, Device, Output, Recording
from twinop.bench.timing import DeviceTimer, Run, host_times_apart, timer_on

TORCH, ORT, TWO_KERNELS = "torch", "ORT", f"{IN_TORCH}, two kernels"
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
    layout: str = "nk"
    bias: bool = True
    residual: bool = False

    def __str__(self) -> str:
        fused = [self.op, self.activation, self.layout]
        return " ".join([*fused, *(name for name in ("bias", "residual") if getattr(self, name))])

    @property
    def op(self) -> str:
        return "linear_swiglu" if self.activation == "silu" else "linear"

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
    Cell(16384, 768, 6144, "silu", bias=False),
    Cell(8192, 2048, 3072, bias=False),
    Cell(8192, 2048, 11264, "silu", bias=False),
    Cell(128, 768, 3072, "gelu_tanh", layout="kn"),
    Cell(1, 4096, 4096, bias=False),
)
SMALL = (Cell(128, 768, 768), Cell(64, 768, 3072, "gelu"), Cell(1, 768, 768))


def swiglu(y: Tensor) -> Tensor:
    gate, others = y.chunk(2, -1)
    return F.silu(gate) * others


@dataclass(frozen=True)
class Activation:
    """What follows a product: in torch, as a kernel of ours, and as nodes that compute y of z."""

    in_torch: Callable[[Tensor], Tensor]
    ours: Callable[[Tensor], Tensor]
    nodes: str


ACTIVATIONS = {
    "relu": Activation(F.relu, lambda y: torch_op.relu(y), "y = Relu (z)"),
    "gelu": Activation(F.gelu, lambda y: torch_op.gelu(y), "y = Gelu (z)"),
    "gelu_tanh": Activation(
        partial(F.gelu, approximate="tanh"),
        lambda y: torch_op.gelu(y, approximate="tanh"),
        'y = Gelu <approximate = "tanh"> (z)',
    ),
    "silu": Activation(
        swiglu,
        lambda y: torch_op.swiglu_packed(y),
        "g, u = Split <axis = -1, num_outputs = 2> (z); s = Sigmoid (g); a = Mul (g, s); y = Mul (a, u)",
    ),
}


def reference(cell: Cell, t: Mapping[str, Tensor]) -> Tensor:
    """Computes the call in fp64 with torch's operators."""
    wide = {name: tensor.double() for name, tensor in t.items()}
    y = wide["x"] @ cell.columns(wide["weight"])
    y += sum(wide[name] for name in ("bias", "residual") if name in wide)
    return y if cell.activation == "none" else ACTIVATIONS[cell.activation].in_torch(y)


def in_torch(cell: Cell, t: Mapping[str, Tensor]) -> Callable[[], Tensor]:
    """Returns the call with the fewest kernels that torch has."""
    x, bias = t["x"], t.get("bias")
    columns = cell.columns(t["weight"])
    if cell.activation in ("relu", "gelu_tanh"):
        use_gelu = cell.activation == "gelu_tanh"
        return partial(torch.ops.aten._addmm_activation, bias, x, columns, use_gelu=use_gelu)
    if cell.activation != "none":
        behind = ACTIVATIONS[cell.activation].in_torch
        return lambda: behind(F.linear(x, columns.mT, bias))
    added = t.get("residual", bias)
    return partial(torch.mm, x, columns) if added is None else partial(torch.addmm, added, x, columns)


def two_kernels(cell: Cell, t: Mapping[str, Tensor]) -> Tensor:
    """Computes the product with its bias, then our kernel of the activation."""
    return ACTIVATIONS[cell.activation].ours(torch_op.linear(**t, layout=cell.layout))


def stock_nodes(cell: Cell) -> list[NodeProto]:
    """Returns the nodes that a model has without ours; ONNX Runtime fuses what it can."""
    added = ", bias" if cell.bias else ", residual" if cell.residual else ""
    product = f"Gemm <transB = {int(cell.layout == 'nk')}> (x, weight{added})"
    if cell.activation == "none":
        return runtime.parse_nodes(f"y = {product}")
    return runtime.parse_nodes(f"z = {product}; {ACTIVATIONS[cell.activation].nodes}")


def in_ort(
    nodes: list[NodeProto], tensors: Mapping[str, Tensor], like: Tensor, timer: DeviceTimer | None
) -> Subject:
    """Opens a session in which weight and bias are constants, as in a model."""
    inputs = {name: tensor for name, tensor in tensors.items() if name in ("x", "residual")}
    constants = {name: tensor for name, tensor in tensors.items() if name not in inputs}
    y = torch.empty_like(like)
    session = runtime.open_session(
        runtime.one_op(nodes, inputs, {"y": y}, constants=constants),
        y.device,
        cpu_threads=1,
        stream=timer.stream if timer is not None else None,
        optimize=True,
    )
    return Subject(runtime.bind(session, inputs, {"y": y}, synchronize=timer is None), (y,))


def measure(
    cell: Cell, dtype: torch.dtype, timer: DeviceTimer | None, rounds: int, missing: dict[str, str]
) -> list[dict[str, Any]]:
    """Measures a cell. A provider that fails or computes something else is reported and skipped."""
    tensors = cell.tensors(dtype, timer.stream.device if timer is not None else torch.device("cpu"))
    expected = reference(cell, tensors)
    ours = partial(getattr(torch_op, cell.op), **tensors, **cell.attributes)
    our_node = runtime.custom_node(torch_op.records()[cell.op], tensors, cell.attributes)
    like = expected.to(dtype)
    makers: dict[str, Callable[[], Subject]] = {
        IN_TORCH: partial(Subject, ours),
        TORCH: partial(Subject, in_torch(cell, tensors)),
        IN_ORT: partial(in_ort, [our_node], tensors, like, timer),
        ORT: partial(in_ort, stock_nodes(cell), tensors, like, timer),
    }
    if cell.activation != "none":
        makers[TWO_KERNELS] = partial(Subject, partial(two_kernels, cell, tensors))
    runs: dict[str, Run] = {}
    for name, make in makers.items():
        try:
            subject = make()
            error = relative_error(subject.result()[0], expected)
            if error > TOLERANCE[dtype]:
                raise report.BenchError(f"wrong, relative error {error:.1e}")
        except Exception as failure:  # a node without a kernel
            where = f"{cell} {cell.shape}, {dtype}, {name}"
            missing[where] = report.reason_of(failure)
            report.show_missing({where: str(failure)})
            continue
        runs[name] = subject.run
    runs |= {name + AGAIN: runs[name] for name in (TORCH, ORT) if name in runs}
    if timer is not None:
        times = timer.times(runs, rounds=rounds)
    else:
        times = host_times_apart(runs, rounds=rounds, seconds=1.0)
    label = {"op": str(cell), "dtype": str(dtype).removeprefix("torch."), "shape": cell.shape}
    return [label | {"provider": name} | each.row() for name, each in times.items()]


def bars(rows: list[dict[str, Any]], on_cuda: bool) -> list[dict[str, Any]]:
    """Returns the verdicts on each cell.

    On CUDA, against torch's product, and against two kernels where something is fused. On a CPU, against
    ONNX Runtime's product.
    """
    ours, theirs, most = (IN_TORCH, TORCH, ON_CUDA) if on_cuda else (IN_ORT, ORT, ON_CPU)
    found = []
    for key, us in report.medians(rows, "op", "shape", "dtype").items():
        cell = ", ".join(key)
        if ours in us and theirs in us:
            noise = abs(us[theirs + AGAIN] / us[theirs] - 1)
            what = f"{cell}: {ours} / {theirs}, time"
            found.append(report.bar(what, us[ours] / us[theirs], most, tolerance=noise))
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
        recording = Recording("linear", where, output, commit)
        rows: list[dict[str, Any]] = []
        missing: dict[str, str] = {}
        torch.set_num_threads(1)
        with (
            torch.no_grad(),
            timer_on(where) as timer,
            report.progress("cells", len(cells) * len(kinds)) as step,
        ):
            for kind in kinds:
                for cell in cells:
                    step(f"{cell} {cell.shape}")
                    rows += measure(cell, getattr(torch, kind), timer, 7 if quick else 41, missing)
        report.show_rows("Products", rows, ("op", "shape", "dtype", "provider", "median_us"))
        verdicts = bars(rows, on_cuda)
        report.show_bars(verdicts)
        settings = {"seconds": recording.seconds}
        recording.write(settings=settings, not_measured=missing, bars=verdicts, rows=rows)
        if quick:
            out.print("This was a quick look: do not record it.", highlight=False)
