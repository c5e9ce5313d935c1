"""8 bits beside 16: matrix products, the ops that quantise their results, and whole models.

python lab/float8.py --tables products,rows,models
python lab/float8.py --plot lab/results/float8-nvidia-h200.jsonl

The models have outliers: one channel in 64 of the norms' weights is 3 to 6 times as large. torchao's float8
has a scale for each row and column, too, and leaves the same layers in 16 bits. torch runs in a CUDA graph:
without one the host decides how long a ViT takes. torch.compile takes cuBLAS for the products: of Triton's,
which it would time for minutes, the best took 1.2 to 2.2 times as long.
"""

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch._inductor.config
import typer
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lab.model_zoo import BERT, LLAMA, VIT, Model, Size, cast
from lab.models import FEW, in_ort, in_torch, torch_export
from twinop import torch_op
from twinop.bench import runtime
from twinop.bench.cases import relative_error
from twinop.bench.measure import COPY, IN_ORT, Subject, checked, require, side_by_side
from twinop.bench.measurements import Output, chosen, machine_title, measuring, read
from twinop.bench.timing import DeviceTimer
from twinop.optimize import optimize

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
TORCH, EACH_ROW, ONE_SCALE = "torch bf16", "torch scaled_mm, a scale a row", "torch scaled_mm, one scale"
LAYERS = ((768, 3072, 1), (1024, 4096, 1), (2048, 8192, 2), (4096, 14336, 2))
"""Hidden size, inner size, and 2 where a gate doubles the first product of the MLP."""
NORMS = {"rms_norm": (2048, 4096), "layer_norm": (768, 1024)}


def products(timer: DeviceTimer, say: Callable[[dict[str, Any]], None]) -> None:
    """Measures the four products of a layer, with bias."""
    for hidden, inner, gates in LAYERS:
        shapes = ((hidden, 3 * hidden), (hidden, hidden), (hidden, gates * inner), (inner, hidden))
        for rows in (512, 2048, 16384):
            for k, n in shapes:
                label = {"op": f"layer {hidden} / {inner}", "dtype": "bfloat16", "shape": f"{rows}x{k}x{n}"}
                say(label | product(rows, k, n, timer))


def product(rows: int, k: int, n: int, timer: DeviceTimer) -> dict[str, Any]:
    device = timer.stream.device
    x, weight = (torch.randn(size, k, device=device).to(BF16) for size in (rows, n))
    bias = torch.randn(n, device=device).to(BF16)
    expected = x.double() @ weight.double().mT + bias.double()
    (x8, x_scale), (w8, w_scale) = torch_op.quantize_rows(x), torch_op.quantize_rows(weight)
    one = torch.ones((), device=device)
    whole = [(each.float() / (each.abs().max().float() / 448)).to(E4M3) for each in (x, weight)]
    scales = [each.abs().max().float() / 448 for each in (x, weight)]
    scaled = partial(torch._scaled_mm, bias=bias, out_dtype=BF16, use_fast_accum=True)
    makers: dict[str, Callable[[], Subject]] = {
        "twinop": lambda: Subject(partial(torch_op.linear_fp8, x8, x_scale, w8, w_scale, bias)),
        EACH_ROW: lambda: Subject(partial(scaled, x8, w8.mT, x_scale.unsqueeze(-1), w_scale.unsqueeze(0))),
        ONE_SCALE: lambda: Subject(partial(scaled, whole[0], whole[1].mT, scales[0] * one, scales[1] * one)),
        TORCH: lambda: Subject(partial(torch.addmm, bias, x, weight.mT)),
    }

    def check(_: str, subject: Subject) -> None:
        require(relative_error(subject.result()[0], expected), 0.06)

    return side_by_side(makers, check, timer, rounds=21, again=(TORCH,))


def rows(timer: DeviceTimer, say: Callable[[dict[str, Any]], None]) -> None:
    """Measures the ops that quantise their results beside those that do not, in ONNX Runtime."""
    norms = {f"{added}{norm}": sizes for added in ("", "add_") for norm, sizes in NORMS.items()}
    for name, widths in (norms | {"gelu": (3072, 4096), "swiglu_packed": (8192, 14336)}).items():
        for width in widths:
            label = {"op": name, "dtype": "bfloat16", "shape": f"16384x{width}"}
            say(label | row_op(name, 16384, width, timer))


def row_op(name: str, count: int, width: int, timer: DeviceTimer) -> dict[str, Any]:
    wide, narrow = torch_op.records()[name], torch_op.records()[f"{name}_fp8"]
    device = timer.stream.device
    shapes = {"x": (count, width * (2 if name == "swiglu_packed" else 1)), "residual": (count, width)}
    given = [entry.name for entry in wide.inputs]
    tensors = {each: torch.randn(shapes.get(each, (width,)), device=device).to(BF16) for each in given}
    y = torch.empty(count, width, dtype=BF16, device=device)
    q, scale = torch.empty_like(y, dtype=E4M3), torch.empty(count, device=device)
    others = {"sum": torch.empty_like(y)} if "sum" in wide.outputs else {}
    exact = getattr(torch_op, name)(**tensors)
    expected = (exact[0] if others else exact).double()

    def of(record: Any, outputs: Mapping[str, Tensor]) -> Subject:
        node = runtime.custom_node(record, tensors, {})
        names = [each if each in outputs else "" for each in record.outputs]
        while names[-1] == "":
            names.pop()
        node.output[:] = names
        return Subject(runtime.run_of([node], tensors, outputs, timer), tuple(outputs.values()))

    source = torch.randn_like(y)
    makers: dict[str, Callable[[], Subject]] = {
        f"{IN_ORT}, 16 bits": lambda: of(wide, {"y": y, **others}),
        f"{IN_ORT}, 8 bits": lambda: of(narrow, {"q": q, "scale": scale, **others}),
        f"{IN_ORT}, both": lambda: of(narrow, {"q": q, "scale": scale, "y": y, **others}),
        COPY: lambda: Subject(lambda: y.copy_(source)),
    }

    def check(column: str, subject: Subject) -> None:
        first = subject.result()[0] if column != COPY else None
        if first is not None:
            found = q.double() * scale.double().unsqueeze(-1) if first.dtype == E4M3 else first
            require(relative_error(found, expected), 0.04)

    return side_by_side(makers, check, timer, rounds=21, again=())


_LARGE = Size(layers=24, width=1024, heads=16, vocabulary=2000)
_PROMPT = Size(layers=16, width=2048, heads=16, vocabulary=2000, batch=1, tokens=4096)
MODELS = {
    "bert-large": (BERT, _LARGE),
    "vit-large": (VIT, replace(_LARGE, batch=64, tokens=196)),
    "llama-2048": (LLAMA, _PROMPT),
    "llama-4096": (LLAMA, replace(_PROMPT, layers=4, width=4096, heads=32, inner=14336)),
}


def drawn(model: Model, size: Size) -> nn.Module:
    made = model.drawn(size, "sdpa")
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.dim() == 1 and name.endswith("weight"):
                parameter[::64] *= 3 + 3 * torch.rand_like(parameter[::64])
    return made


def by_torchao(model: nn.Module) -> nn.Module:
    """Returns the model with the linear layers in float8 that `optimize` turns, in place."""
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quantize_

    modules = dict(model.named_modules())
    names = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
    # All but the first and the last one: the patches' convolution, or q, k and v, which `optimize` joins.
    has_patches = any(isinstance(module, nn.Conv2d) for module in modules.values())
    chosen = set(names[0 if has_patches else 3 : -1])
    quantize_(
        model, Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()), lambda _, name: name in chosen
    )
    return model


FILES = {"twinop, 32 bits": "float32", "twinop, 16 bits": "float16", "twinop, 8 bits": "float8"}
MODE = "max-autotune-no-cudagraphs"


def export_model(name: str, folder: Path) -> dict[str, str]:
    """Writes a model's files; returns what `optimize` said of each."""
    kind, size = MODELS[name]
    dynamic = ("batch", "tokens") if kind is LLAMA else ("batch",)
    few, reports = kind.inputs(replace(size, batch=FEW, tokens=16 if kind is LLAMA else size.tokens)), {}
    torch_export(drawn(kind, size), few, source := folder / "source.onnx", dynamic=dynamic)
    options: dict[str, Any] = {"device": "cuda", "padding": "right" if "mask" in few else None}
    for column, dtype in FILES.items():
        reports[column] = str(optimize(source, folder / f"{dtype}.onnx", dtype=dtype, **options))
    return reports


def whole(name: str, timer: DeviceTimer, folder: Path, with_torch: bool) -> dict[str, Any]:
    """Measures a model in torch with and without torchao, and in both forms of twinop's."""
    reports = export_model(name, folder)
    (kind, size), device = MODELS[name], timer.stream.device
    inputs = {key: each.to(device) for key, each in kind.inputs(size).items()}
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=False):
        model = drawn(kind, size).to(device)
        expected = model(*inputs.values()).double()
        half, bf16 = cast(inputs, torch.float16), tuple(cast(inputs, BF16).values())  # all that torchao takes
        for parameter in model.parameters():  # not buffers: transformers has frequencies of positions in fp32
            parameter.data = parameter.data.to(BF16)
        makers: dict[str, Callable[[], Subject]] = {}
        for column, dtype in FILES.items():
            given = inputs if dtype == "float32" else half
            makers[column] = partial(in_ort, folder / f"{dtype}.onnx", given, expected, False)
        if with_torch:
            makers["torch.compile bf16"] = partial(in_torch, deepcopy(model), MODE, bf16, True)
            makers["torch.compile torchao"] = lambda: in_torch(by_torchao(deepcopy(model)), MODE, bf16, True)
        shown = inputs["mask"][..., None] if "mask" in inputs else 1

        def check(_: str, subject: Subject) -> None:
            subject.facts["error"] = relative_error(subject.result()[0] * shown, expected * shown)

        subjects, missing = checked(makers, check)
        times = timer.times({column: subject.run for column, subject in subjects.items()}, rounds=15)
    shape = "x".join(map(str, next(iter(inputs.values())).shape))
    found = {column: times[column] | subject.facts for column, subject in subjects.items()}
    return {
        "op": name, "dtype": "16 bits", "shape": f"{size.layers} layers, {shape}", "times": found,
        "missing": missing, "reports": reports,
    }  # fmt: skip


def draw(lines: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws time against error: a panel for each model of a report."""
    from matplotlib.figure import Figure

    cells = [line for line in lines if line["op"] in MODELS]
    figure = Figure(figsize=(1 + 3.3 * len(cells), 3.9), layout="constrained")
    for panel, line in zip(figure.subplots(1, len(cells), squeeze=False)[0], cells, strict=True):
        for name, columns, color in (
            ("twinop in ONNX Runtime", ("twinop, 16 bits", "twinop, 8 bits"), "#0b8a5f"),
            ("torch.compile, torchao", ("torch.compile bf16", "torch.compile torchao"), "#e8a33d"),
        ):
            times = [line["times"][column] for column in columns if column in line["times"]]
            if not times:
                continue
            x, y = [each["error"] for each in times], [each["median_us"] * 1e-3 for each in times]
            panel.plot(x, y, "-o", label=name, color=color)
            for place, label in zip(zip(x, y, strict=True), ("16 bits", "8 bits"), strict=False):
                panel.annotate(label, place, (4, 4), textcoords="offset points", color=color)
        panel.set(xscale="log", xlabel="relative error of the output", ylabel="milliseconds")
        title = f"{line['op']}, {line['shape']}"
        if wide := line["times"].get("twinop, 32 bits"):  # far above the others
            title += f"\ntwinop, 32 bits: {wide['median_us'] * 1e-3:.0f} ms, error {wide['error']:.0e}"
        panel.set_title(title, fontsize=9)
        panel.set_ylim(0, panel.get_ylim()[1] * 1.1)
        panel.margins(x=0.25)
        panel.grid(alpha=0.25)
        panel.legend(fontsize=8, loc="lower left")
    figure.suptitle(f"Device time of models, and error against torch in fp32: {machine_title(cells[0])}")
    figure.savefig(path, dpi=110)


def main(
    tables: Annotated[str, typer.Option(help="Of products, rows and models.")] = "products,rows,models",
    models: Annotated[str, typer.Option(help="Models to measure.")] = ",".join(MODELS),
    with_torch: Annotated[bool, typer.Option(help="Measure torch.compile, too, which takes minutes.")] = True,
    plot: Annotated[Path | None, typer.Option(help="Only draw a report, as a PNG beside it.")] = None,
    output: Output = None,
) -> None:
    """Measure products, ops and models in 8 bits beside 16, torch and torchao, on a GPU.

    It is device time behind an empty L2 cache, in one run.
    """
    if plot is not None:
        return draw(read(plot, "float8"), plot.with_suffix(".png"))
    wanted = chosen("--tables", tables, ("products", "rows", "models"))
    torch._inductor.config.max_autotune_gemm_backends = "ATEN"
    with measuring("float8", "cuda", output, False) as (measured, _, timer):
        assert timer is not None
        if "products" in wanted:
            products(timer, measured.say)
        if "rows" in wanted:
            rows(timer, measured.say)
        for name in chosen("--models", models, list(MODELS)) if "models" in wanted else ():
            with tempfile.TemporaryDirectory() as folder:
                measured.say(whole(name, timer, Path(folder), with_torch))


if __name__ == "__main__":
    typer.run(main)
