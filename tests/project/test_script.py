"""Any Python can start the scripts: they find .venv, or say how to create it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ("export/to_onnx.py", "deploy/run_onnx.py", "tests/gpu_report.py")
in_checkout = pytest.mark.skipif(not (ROOT / ".venv").is_dir(), reason="no .venv: ./build.sh has not run")


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a Python without packages, as in a new shell."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    return folder / "bin" / "python"


def run(python: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {"PATH": "/usr/bin:/bin", "COLUMNS": "200"}
    return subprocess.run([python, *arguments], capture_output=True, text=True, cwd=cwd, env=env, timeout=200)


@in_checkout
@pytest.mark.parametrize("arguments", [*((script,) for script in SCRIPTS), ("-m", "twinop")])
def test_any_python_will_do(bare: Path, arguments: tuple[str, ...]) -> None:
    done = run(bare, *arguments, "--help", cwd=ROOT)
    assert done.returncode == 0 and "Usage:" in done.stdout and done.stderr == ""


@pytest.mark.parametrize(
    ("script", "command"),
    [*((script, "./build.sh") for script in SCRIPTS[:2]), ("tests/gpu_report.py", "./build.sh setup test")],
)
def test_before_the_first_build(bare: Path, script: str, command: str, tmp_path: Path) -> None:
    for name in (script, "twinop/__init__.py", "twinop/script.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    done = run(bare, script, "--help", cwd=tmp_path)
    assert done.returncode == 1 and done.stdout == "" and "typer" in done.stderr
    message = f". Run {command} in {tmp_path}: it sets up .venv, which is then used\n"
    assert done.stderr.startswith(f"error: {bare} lacks ") and done.stderr.endswith(message)
