"""The speed of ops beside torch's, ONNX Runtime's and a plain copy: tables, plots, files of measurements.

Everything that is compared is measured in one process, in turn, because only such numbers are comparable.
`bench/entries.py` lists the ops. `lab/` has the maintainers' other measurements.
"""

from pathlib import Path
from typing import Annotated

import typer

if __name__ != "twinop.bench":
    raise ImportError(
        f"import twinop.bench, not {__name__}: put the repository root on PYTHONPATH, not a folder inside it"
    )

Device = Annotated[str, typer.Option(help="auto (the GPU if there is one), cpu or cuda.")]
Output = Annotated[Path | None, typer.Option(help="Folder for the files. Default: bench-results/.")]
