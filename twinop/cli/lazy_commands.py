"""Groups of commands that are imported, with torch or ONNX Runtime, only when they are used."""

import ast
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

from ..errors import TwinopError
from ..installation import is_source_tree
from .console import clear_errors, program

# The extra of twinop that has a package, and that a command needs.
_EXTRA_OF = {"matplotlib": "bench", "triton": "triton", "pytest": "test"}
_EXTRAS = {"serve": "serve", "check": "serve", "pack": "serve"}
_IN_NO_EXTRA = ("torch", "onnxruntime")  # which build of them fits depends on the machine


class LazyGroup(TyperGroup):
    """Lists its commands without importing them: it reads their docstrings from the source.

    Attributes:
        modules: `module:function` by command. If the module has an `app`, that is the command.
    """

    modules: ClassVar[dict[str, str]] = {}

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = {**{name: TyperCommand(name) for name in self.modules}, **self.commands}

    def format_help(self, ctx: Any, formatter: Any) -> None:
        for name, entry in self.modules.items():
            self.commands[name].help = _docstring(entry)
        super().format_help(ctx, formatter)

    def invoke(self, ctx: Any) -> Any:
        with clear_errors(), _packages(ctx):
            return super().invoke(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        ctx.meta[__name__] = name
        return name, _imported(name, self.modules[name]) if name in self.modules else command, rest


@contextmanager
def _packages(ctx: Any) -> Iterator[None]:
    """Raises a TwinopError for a package that is not installed, which says how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "twinop"):
            raise
        extra = _EXTRA_OF.get(package) or _EXTRAS.get(ctx.meta.get(__name__, ""))
        extra = None if package in _IN_NO_EXTRA else extra
        install = f"'twinop[{extra}]'" if extra else package
        command = {"serve": "./build.sh serve", "bench": "./build.sh bench"}.get(extra or "", "./build.sh")
        raise TwinopError(
            f"this command needs the package {package}, which is not installed here: pip install {install}"
            + (f". In a checkout {command} installs it" if is_source_tree() else "")
        ) from error


def _docstring(entry: str) -> str | None:
    module, _, function = entry.partition(":")
    source = Path(__file__).parents[1].joinpath(*module.split(".")[1:]).with_suffix(".py").read_text("utf-8")
    nodes = ast.parse(source).body
    found = next(node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == function)
    return ast.get_docstring(found)


def _imported(name: str, entry: str) -> Any:
    path, _, function = entry.partition(":")
    module = importlib.import_module(path)
    if hasattr(module, "app"):
        group = typer.main.get_command(module.app)
        group.name = name
        return group
    return typer.main.get_command(program(getattr(module, function), name))
