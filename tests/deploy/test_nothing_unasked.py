"""What nobody asked for: modules of the current folder, ONNX Runtime's telemetry, a foreign cache."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from models import make_model

from twinop import child
from twinop.building.cache import cache_folder, work_folder
from twinop.errors import BuildError

TAKEN = "import pathlib\npathlib.Path(__file__).with_name('taken').touch()\nraise SystemExit(3)\n"


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder whose modules have the names of others."""
    for name in ("json", "runpy", "onnxruntime", "numpy", "onnx", "pickle", "ctypes", "typing"):
        (tmp_path / f"{name}.py").write_text(TAKEN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_children_take_no_module_of_the_current_folder(
    hostile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from twinop.deploy.doctor.facts import _ask
    from twinop.export import ort_process

    monkeypatch.syspath_prepend("")  # as in a notebook
    monkeypatch.syspath_prepend(str(hostile))  # as after python -m
    answer, problem = _ask()
    assert "version" in answer and not problem
    server = ort_process.Server()
    model = make_model("CustomRelu").SerializeToString()
    assert server.run(ort_process.Request(model, None)).libraries
    server.close()
    said = subprocess.run(child.module("json.tool"), input=b"[1]", capture_output=True)
    assert said.returncode == 0 and said.stdout.split() == [b"[", b"1", b"]"]
    assert not (hostile / "taken").exists()


def test_what_pythonpath_names_is_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("print('found')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert subprocess.run(child.python("import mine"), capture_output=True).returncode == 1
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert subprocess.run(child.python("import mine"), capture_output=True).stdout == b"found\n"


@pytest.mark.parametrize(("setting", "writes"), [(None, False), ("0", True)])
def test_telemetry_is_off_unless_asked(tmp_path: Path, setting: str | None, writes: bool) -> None:
    program = "import twinop, onnxruntime; onnxruntime.InferenceSession"
    # Nothing else: in an environment with CI=true, ONNX Runtime writes none by itself.
    kept = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    environment |= {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    if setting is not None:
        environment["ORT_DISABLE_TELEMETRY"] = setting
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
    import onnxruntime

    has_telemetry = tuple(map(int, onnxruntime.__version__.split(".")[:2])) >= (1, 31)
    assert [*tmp_path.rglob("*.db")] == [] or (writes and has_telemetry)
    assert not writes or not has_telemetry or [*tmp_path.rglob("*.db")]


def test_the_cache_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TWINOP_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with work_folder() as work:
        for folder in (cache_folder(), cache_folder().parent):
            assert folder in work.parents and folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    with pytest.raises(BuildError, match="belongs to another user, who could change what runs. Set TWINOP_"):
        cache_folder()
