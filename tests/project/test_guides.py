"""The guides docs/adding-*.md are true: their blocks are applied to a copy of the tree, built, and tested.

A block behind the line "`file`:" is a new file; one behind "`file`, at the end:" is added to a file. The test
builds all pages at once, for the CPU, without the other ops. Blocks of `python` run in the result.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from record_driver import ROOT

PAGES = sorted((ROOT / "docs").glob("adding-*.md"))
STEP = re.compile(
    r"^`(?P<file>[\w/.]+)`(?P<end>, at the end)?:\n\n```\w+\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
PROGRAM = re.compile(r"^```python\n(import .*?)^```$", re.MULTILINE | re.DOTALL)
FOLDERS = [f"tests/{name}" for name in ("matrix", "kernels", "record", "torch_op", "export", "bench")]
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "build", "build-*", "__pycache__", ".*_cache", "results")
# An editable installation of the checkout would take its modules from there.
NOT_EDITABLE = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "Redirecting" not in type(finder).__name__]
"""


def op_of(page: Path) -> str:
    """The name of the op that a page adds: that of its header."""
    (header,) = (step["file"] for step in STEP.finditer(page.read_text()) if not step["end"])
    return Path(header).stem


def apply(page: Path, folder: Path) -> None:
    """Does what the page's steps say, in `folder`."""
    for step in STEP.finditer(page.read_text()):
        path = folder / step["file"]
        assert path.exists() == bool(step["end"]), f"{page.name}: {step['file']}"
        before = f"{path.read_text()}\n\n" if step["end"] else ""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(before + step["text"])


def build(folder: Path) -> dict[str, str]:
    """Builds a copy of the tree with all pages applied. Returns the environment to use it in."""
    shutil.copytree(ROOT, folder, symlinks=True, ignore=LEFT_OUT)
    for page in PAGES:
        apply(page, folder)
    options = {"TWINOP_WITH_CUDA": "OFF", "TWINOP_OPS": ";".join(map(op_of, PAGES))}
    options["Python_EXECUTABLE"] = sys.executable
    configure = ["cmake", "--preset", "default", *(f"-D{name}={value}" for name, value in options.items())]
    for command in (configure, ["cmake", "--build", "--preset", "test"]):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    hook = folder / "not_editable"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(NOT_EDITABLE)
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    paths = {"PYTHONPATH": f"{hook}{os.pathsep}{folder}", "TWINOP_LIBRARY_DIR": str(folder / "build")}
    return env | paths


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_ops_of_all_pages_work(tmp_path: Path) -> None:
    """The tests of every op pass for them, the pages' programs run, and the benchmarks measure them."""
    folder = tmp_path / "twinop"
    env = build(folder)

    def run(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
        return done.stdout

    ops = [op_of(page) for page in PAGES]
    said = run("-m", "pytest", "-v", "-p", "no:cacheprovider", *FOLDERS, "-k", " or ".join(ops))
    for op in ops:
        passed = re.findall(rf"^(tests/\w+)/\S*{op}.* PASSED", said, re.MULTILINE)
        assert set(passed) == {*FOLDERS} and len(passed) > 30, said[-2000:]
    for page in PAGES:
        programs = PROGRAM.findall(page.read_text())
        assert programs, page
        for program in programs:
            run("-c", program)
    run("-m", "twinop.bench", "--ops", ",".join(ops), "--quick", "--output", str(folder / "report"))
