"""Runs `twinop run` in this process."""

from pathlib import Path

import onnx
from typer.testing import CliRunner, Result

from twinop.cli.console import program
from twinop.deploy import run_onnx

APP = program(run_onnx.main)


def run_command(graph: onnx.ModelProto | Path, folder: Path, *arguments: str) -> Result:
    """Runs a model, which is written into the folder if it is not a file."""
    path = graph
    if isinstance(graph, onnx.ModelProto):
        path = folder / "model.onnx"
        path.write_bytes(graph.SerializeToString())
    result = CliRunner().invoke(APP, [str(path), *arguments], env={"COLUMNS": "160", "TERM": "dumb"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result
