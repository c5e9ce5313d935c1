"""`twinop doctor`: say what is wrong with a machine, a library or a model, and the cure."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from twinop.cli.console import out

from .checks import CHECKS, Finding
from .facts import Environment, collect

_STYLES = {"OK": "green", "warning": "yellow", "error": "bold red"}


def main(
    model: Annotated[Path | None, typer.Argument(help="An .onnx file.")] = None,
    library: Annotated[Path | None, typer.Argument(help="The .so file to check the model with.")] = None,
    allow_model_libraries: Annotated[
        bool, typer.Option("--allow-model-libraries", help="Look at those in the model's own folder too.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Say what is wrong with this machine, a library or a model, and the cure.

    Looks at the NVIDIA driver, the compilers, torch, ONNX Runtime and its
    providers, the custom-op libraries and the installed packages of ops. A
    model's custom nodes are compared with them. Changes nothing, and needs
    neither torch nor ONNX Runtime. The exit code is 1 if there is an error.

    Examples:

        twinop doctor

        twinop doctor net.onnx build/libmish.so

        twinop doctor net.onnx --json
    """
    if library is None and model is not None and model.suffix == ".so":
        model, library = None, model
    findings = check(collect(model, library, allow_model_libraries))
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    elif out.is_terminal:
        _show(findings)
    else:
        for finding in findings:
            cure = f" | {finding.cure}" if finding.cure else ""
            typer.echo(f"{finding.level}: {finding.subject}: {finding.cause}{cure}")
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(1)


def check(environment: Environment) -> list[Finding]:
    return [finding for each in CHECKS for finding in each(environment)]


def _show(findings: list[Finding]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table("", "what", "found", "cure", show_lines=True)
    for finding in findings:
        level = Text(finding.level, style=_STYLES[finding.level])
        table.add_row(level, *map(Text, (finding.subject, finding.cause, finding.cure)))
    out.print(table)
