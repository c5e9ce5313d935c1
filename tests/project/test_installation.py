"""What messages tell before the first build, after `./build.sh demo`, in the source tree and in a wheel."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import warm_python
from models import make_model

from twinop import installation
from twinop.building.toolchain import find_installation
from twinop.deploy import session
from twinop.errors import TwinopError
from twinop.installation import ALL_OPS_TAKE, how_to_build
from twinop.libraries.library import find_library


def test_messages_to_the_user_of_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "ROOT", tmp_path)
    for module in ("twinop.building.toolchain", "twinop.libraries.find"):
        monkeypatch.setattr(f"{module}.library_folders", lambda: [tmp_path])
    for call in (lambda: find_library("none"), find_installation, lambda: session(make_model("CustomRelu"))):
        with pytest.raises(TwinopError, match="pip install --force-reinstall") as error:
            call()
        assert "build.sh" not in str(error.value)
    assert how_to_build(archs="90") == "Install a wheel of twinop that was built for 90"
    assert how_to_build("mish", needs_cuda=True) == "Build it with twinop build where nvcc is on PATH"


ROOT = Path(__file__).resolve().parents[2]
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
@pytest.mark.parametrize("arguments", [("deploy/run_onnx.py",), ("-m", "twinop")])
def test_any_python_will_do(bare: Path, arguments: tuple[str, ...]) -> None:
    done = run(bare, *arguments, "--help", cwd=ROOT)
    assert done.returncode == 0 and "Usage:" in done.stdout and done.stderr == ""


@pytest.mark.parametrize(
    ("script", "command"),
    [("export/to_onnx.py", "./build.sh"), ("tests/gpu_report.py", "./build.sh setup test")],
)
def test_before_the_first_build(bare: Path, script: str, command: str, tmp_path: Path) -> None:
    for name in (script, "twinop/__init__.py", "twinop/script.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    done = run(bare, script, "--help", cwd=tmp_path)
    assert done.returncode == 1 and done.stdout == "" and "typer" in done.stderr
    message = f". Run {command} in {tmp_path}: it sets up .venv, which is then used\n"
    assert done.stderr.startswith(f"error: {bare} lacks ") and done.stderr.endswith(message)


SCRIPT = """
import sys, torch, twinop.libraries.library
from pathlib import Path
twinop.libraries.library.library_folders = lambda: [Path(sys.argv[1])]
from twinop import torch_op
from twinop.errors import TwinopError

x = torch.tensor([-1.0, 2.0], requires_grad=True)
torch_op.CustomReLU()(x).sum().backward()
assert x.grad.tolist() == [0, 1]
for call in (lambda: torch_op.gelu(x), lambda: torch_op.CustomGELU()(x), twinop.get_library_path):
    try:
        call()
    except (AttributeError, TwinopError) as error:
        print(error)
"""


def test_other_ops_say_how_to_build_them(tmp_path: Path) -> None:
    for stem in ("custom_relu", "twinop_torch"):
        os.symlink(find_library(stem), tmp_path / f"lib{stem}.so")
    done = warm_python.run(["-c", SCRIPT, tmp_path])
    assert done.returncode == 0, done.stderr
    build = f"Build it with ./build.sh, which builds all ops ({ALL_OPS_TAKE})"
    missing = "twinop.torch_op has no op 'gelu'; loaded ops: relu, relu_backward. "
    missing += f"./build.sh demo builds relu alone. {build}"
    *of_ops, of_library = done.stdout.splitlines()
    assert of_ops == [missing] * 2
    assert of_library.startswith("libcustom_ops.so not found") and build in of_library
