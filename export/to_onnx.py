"""Implements the command `twinop export`, which is also `python export/to_onnx.py`.

Heavy imports wait until the options have been read.
"""

import inspect
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

if __name__ == "__main__":
    # As a script: import from the repository, and nothing from this folder by accident.
    _here = Path(__file__).resolve().parent
    sys.path[:] = [str(_here.parent), *(entry for entry in sys.path if Path(entry).resolve() != _here)]

    from twinop.script import require

    require("onnx", "onnxruntime", "onnxscript", "torch", "typer")

import typer
from rich.box import ROUNDED
from rich.filesize import decimal
from rich.table import Column, Table
from rich.text import Text

from twinop.cli.console import Timeout, out, program, progress_bar
from twinop.errors import ExportError

if TYPE_CHECKING:
    import torch

    from twinop.export.report import ExportReport
    from twinop.system.progress import Progress


def _option(help: str, *names: str) -> Any:
    return typer.Option(*names, help=help)


@dataclass(frozen=True)
class Options:
    """What to export, and how: the signature of the command."""

    source: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Your own model, as [bold]file.py:name[/] or [bold]package.module:name[/]: a function "
            "without arguments that returns (module, example inputs), the inputs as a tensor, a tuple, or a "
            "dict by name; or a Module class with a method example_inputs(). Without it: one CustomReLU.",
        ),
    ] = None
    output: Annotated[
        Path | None,
        _option(
            "The file to write. Default: the name in MODEL in lower case, else custom_relu.onnx.",
            "--output",
            "-o",
        ),
    ] = None
    model: Annotated[str | None, _option("The same as MODEL, as an option.")] = None
    exporter: Annotated[str, _option("[bold]dynamo[/] (torch.export) or [bold]torchscript[/] (tracing).")] = (
        "dynamo"
    )
    dynamic: Annotated[
        list[str] | None,
        _option(
            "Dynamic axes: [bold]x:0[/], [bold]x:0,2[/], or with names [bold]x:0=batch[/]; repeat it for "
            "further inputs; [bold]none[/] fixes all. Default: x:0=batch for CustomReLU, none for a MODEL."
        ),
    ] = None
    dtype: Annotated[
        str | None,
        _option(
            "float32, float16, bfloat16 or float64: the model and its floating inputs are converted. "
            "Default: float32 for CustomReLU, no conversion for a MODEL."
        ),
    ] = None
    opset: Annotated[int, _option("Version of the standard operators, 20 to 25.")] = 20
    library: Annotated[
        list[Path] | None,
        _option(
            "A custom-op library, once for each domain: loaded into torch, and used for the comparison. "
            "Default: those that the model loads, and the smallest one found with twinop's ops."
        ),
    ] = None
    bodies: Annotated[bool, _option("Attach function bodies, for runtimes without the library.")] = True
    verify: Annotated[bool, _option("Run the file and compare it with torch.")] = True
    allow_uncompared: Annotated[
        bool,
        _option("Keep the file although an output is empty or NaN for the inputs.", "--allow-uncompared"),
    ] = False
    optimize: Annotated[
        bool | None,
        _option(
            "Optimise a MODEL for ONNX Runtime: fewer nodes, same outputs. [bold]--no-optimize[/] is "
            "for other runtimes. Default: on, but for --no-bodies.",
            "--optimize/--no-optimize",
        ),
    ] = None
    device: Annotated[
        str | None,
        _option(
            "Optimise for cuda or cpu. The file runs on both. Default: cuda where a GPU is visible, else cpu."
        ),
    ] = None
    timeout: Timeout = 600


def main(**given: Any) -> None:
    """Export a torch model with twinop's ops to ONNX.

    The file is checked, run in ONNX Runtime and compared with torch before it is
    kept. The table at the end shows the results, and what was not compared: the
    CPU may have no kernel for a node.

    Examples:

      twinop export

      twinop export --dtype float16 --dynamic x:0,1 -o relu16.onnx

      twinop export model.py:Net

      twinop export my_models:make --dynamic input:0 -o model.onnx
    """
    asked = Options(**given)
    with progress_bar("loading torch") as progress:
        if asked.source is not None and asked.model is not None:
            raise ExportError(f"MODEL {asked.source} and --model {asked.model}: give one of them")
        name = asked.source or asked.model
        stem = asked.source.rpartition(":")[2].lower() if asked.source else "custom_relu"
        output = asked.output or Path(f"{stem}.onnx")
        from twinop.export import export
        from twinop.export.inputs import check_opset, floating_dtype, leaves, parse_dynamic, replace_leaves

        check_opset(asked.opset)
        dtype = floating_dtype(asked.dtype) if asked.dtype is not None else None
        axes = asked.dynamic or ([] if name else ["x:0=batch"])
        dynamic = {} if axes == ["none"] else parse_dynamic(axes)
        module, args = _loaded(asked, output, progress)
        if dtype is not None:
            tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in leaves(args, "x")}
            module, args = module.to(dtype), replace_leaves(args, tensors, "x")
        passed = ("exporter", "opset", "bodies", "verify", "allow_uncompared", "device", "library", "timeout")
        report = export(
            module,
            () if isinstance(args, dict) else args,
            output,
            kwargs=args if isinstance(args, dict) else None,
            dynamic=dynamic,
            optimize=False if name is None and asked.optimize is None else asked.optimize,
            progress=progress,
            **{each: getattr(asked, each) for each in passed},
        )
    out.print(str(report.path), style="bold", soft_wrap=True)
    out.print(_table(report))


main.__signature__ = inspect.signature(Options)  # type: ignore[attr-defined]


def _loaded(asked: Options, output: Path, progress: "Progress") -> "tuple[torch.nn.Module, Any]":
    """Returns the model and its example inputs."""
    import torch

    from twinop import torch_op
    from twinop.export.model_source import load_model
    from twinop.model.files import check_target

    if (name := asked.source or asked.model) is None:
        torch.manual_seed(0)
        return torch_op.CustomReLU(), (torch.randn(8, 1024),)
    check_target(output, [Path(name.rpartition(":")[0])])
    progress(f"loading {name}")
    for path in asked.library or ():
        torch_op.load(path)
    return load_model(name, f"--model {name}" if asked.source is None else f"MODEL {name}")


def _table(report: "ExportReport") -> Table:
    names, texts = Column(style="cyan", no_wrap=True), Column(overflow="fold")
    table = Table(names, texts, show_header=False, box=ROUNDED)

    def row(name: str, text: str, style: str = "") -> None:
        table.add_row(name, Text(text, style))

    for name, values in (("inputs", report.inputs), ("outputs", report.outputs)):
        row(name, "\n".join(f"{key}: {value}" for key, value in values.items()))
    row("nodes", ", ".join(f"{name} x {count}" for name, count in report.nodes.items()))
    if report.optimized is not None:
        headline, *lines, _ = str(report.optimized).splitlines()  # the last one is the table's
        row("optimised", "\n".join([headline.partition(": ")[2], *(line.strip() for line in lines)]))
    row("opsets", ", ".join(f"{domain} {version}" for domain, version in report.opsets.items()))
    row("exporter", f"{report.exporter}; onnx.checker passed")
    row("size", decimal(report.size) + (f", weights in {report.data_path.name}" if report.data_path else ""))
    if report.parity is not None:
        sizes = ", also at other sizes" if report.resized else ""
        used = ", ".join(path.name for path in report.libraries) or "no library needed"
        row("torch = ONNX Runtime", f"{report.parity}{sizes} ({used})", "green")
    else:
        row("torch = ONNX Runtime", f"not compared: {report.parity_reason or '--no-verify'}", "yellow")
    if not report.custom_ops:
        hint = "none: the model needs no library. torch_op.replace_modules(model) puts them in"
        row("custom ops", hint, "yellow")
    elif report.without_library is not None:
        row("without the library", f"yes, {report.without_library}", "green")
    elif report.without_reason:
        reasons = report.unsupported or [report.without_reason]
        row("without the library", "\n".join(["no", *reasons]), "yellow")
    else:
        row("without the library", "not tried (--no-verify)", "yellow")
    for note in report.notes:
        row("note", note, "yellow")
    if report.device:
        from twinop.optimize.report import prepared_for

        row("device", prepared_for(report.device))
    return table


if __name__ == "__main__":
    program(main)()
