"""examples/triton: kernels as their users wrote them, built and tested with the matrix of all ops."""

import os
import shutil
from pathlib import Path

import pytest
import torch
import warm_python
from record_driver import ROOT

from twinop.installation import version_numbers
from twinop.libraries.library import read_library

EXAMPLES = sorted((ROOT / "examples/triton").glob("*.py"))


@pytest.mark.slow  # up to four minutes each; tests/journeys has the same way for an op of its own
@pytest.mark.timeout(900)
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_it_is_built_and_passes_the_matrix(example: Path, tmp_path: Path) -> None:
    if example.stem == "helion_softmax":
        pytest.importorskip("helion", exc_type=ImportError)
        if version_numbers(torch.__version__) < (2, 13):
            pytest.skip("this Helion needs a later torch")
    shutil.copy(example, tmp_path)
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = os.environ | {"TWINOP_CACHE": str(tmp_path / "cache"), "PYTHONPATH": path}
    env = {name: value for name, value in env.items() if not name.startswith("PYTEST")}
    for command in ("build", "test"):
        done = warm_python.run(["-m", "twinop", command, example.name], cwd=tmp_path, env=env)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert ("no GPU here: no kernel of " in done.stderr) == (not torch.cuda.is_available())
    library = read_library(tmp_path / f"build/lib{example.stem}.so")
    assert {record.devices for record in library.by_onnx_name.values()} == {("cpu", "cuda")}
