"""Defines the command `twinop test`."""

from functools import partial
from pathlib import Path

import typer

from twinop.cli.console import print_note

from . import child

MATRIX = Path(__file__).resolve().parent / "matrix"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")


@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": ["--help"],
    }
)
def main(context: typer.Context) -> None:
    """Test every op of a library.

    The first argument is the library, the Python file of its ops, or the folder of a project; without one,
    the project in this folder. Other arguments go to pytest. All tests follow from the ops' records and
    function bodies. For every dtype, on the CPU and on a GPU if there is one:

    * torch and ONNX Runtime give the same bits, for all sizes, alignments, layouts, NaN and infinities;

    * the kernel computes what the function body means in float64;

    * gradients, also of second order; torch.compile, opcheck and vmap;

    * both exporters, with the library and without it;

    * refusals of wrong dtypes, devices, shapes and attributes; on a GPU streams and CUDA graphs.

    Then the project's own tests run (test_*.py). Each cause of a failure is shown once, at the end; --verbose
    shows every failure where it happens, with its trace.

    Examples:

        twinop test

        twinop test build/libmish.so -k bits

        twinop test path/to/project -x
    """
    raise typer.Exit(child.run(partial(_run_here, list(context.args))))


def _run_here(arguments: list[str]) -> int:
    """Runs the tests of a target; returns pytest's exit code. TwinopError: it is no target."""
    import pytest

    from . import plugin
    from .target import TARGET, find_target, load
    from .under_test import without_kernels

    given, options = ".", arguments
    if arguments and not arguments[0].startswith("-"):
        given, *options = arguments
    _, tests = find_target(Path(given))
    load(given)  # so that an error is one message
    files = [str(MATRIX), *map(str, tests)]
    own = ["-p", "twinop.testing.plugin", f"{TARGET}={Path(given).resolve()}", "-p", "no:cacheprovider"]
    # A crash is one message of ours; libraries log much at the level DEBUG.
    own += ["-p", "no:faulthandler", "--log-level=WARNING", "-W", "ignore:`torch.jit.script"]  # -W takes text
    shown = ["-q", "--no-header", f"--rootdir={Path.cwd()}"]
    if {"-v", "-vv", "--verbose"} & {*options}:
        return int(pytest.main([*own, *shown, "-rfE", *files, *options]))
    causes = plugin.Causes()
    shown += ["--tb=short", "--show-capture=no", "--no-summary"]
    code = int(pytest.main([*own, *shown, *files, *options], [causes]))
    causes.show()
    if untested := without_kernels():
        print_note(f"no GPU here: no kernel of {', '.join(untested)} ran. Their function bodies did")
    return code
