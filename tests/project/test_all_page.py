"""docs/guide/all.md: its op builds, passes its tests, and the exceptions of its table are there."""

import os
import re
from pathlib import Path

import pytest
import warm_python
from build_files import twinop as run_twinop
from test_docs import ROOT, blocks_of

PAGE = "docs/guide/all.md"


@pytest.mark.slow
def test_the_op_of_the_page(tmp_path: Path) -> None:
    text = {block.language: block.text for block in blocks_of(PAGE)}
    (tmp_path / "scaled.h").write_text(text["cpp"])
    (tmp_path / "scaled.py").write_text(text["python"])
    built = run_twinop("build", "scaled.h", "--cpu", cwd=tmp_path)
    assert built.returncode == 0, built.stderr
    calls = "import torch\nfrom scaled import first_of, scaled\n"
    for call in ("scaled(torch.ones(3), scale=-1.0)", "first_of(torch.ones(0))"):
        calls += f"try:\n    {call}\nexcept RuntimeError as error:\n    print(error)\n"
    (tmp_path / "calls.py").write_text(calls)
    said = warm_python.run(["calls.py"], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}).stdout
    assert "attribute scale is -1, expected a finite number > 0" in said and "x has no elements" in said
    chosen = "float32 and (bits or body or gradient or exporter) or first_of"
    env = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    done = warm_python.run(["-m", "twinop", "test", "-k", chosen], cwd=tmp_path, env=env)
    assert done.returncode == 0 and re.search(r"\d+ passed", done.stdout), done.stdout + done.stderr
