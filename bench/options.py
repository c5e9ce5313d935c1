"""The options that the benchmarks' commands share."""

from pathlib import Path
from typing import Annotated

import typer

Device = Annotated[str, typer.Option(help="auto (the GPU where there is one), cpu or cuda.")]
JsonFolder = Annotated[
    Path | None, typer.Option(help="Folder for the JSON file; else bench/results/.", show_default=False)
]
PlotFolder = Annotated[
    Path | None, typer.Option(help="Folder for JSON and plots; else bench/results/.", show_default=False)
]
Commit = Annotated[
    str | None,
    typer.Option(help="For the record where git cannot say it; also TWINOP_COMMIT.", show_default=False),
]
