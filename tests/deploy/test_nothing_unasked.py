"""What nobody asked for: modules of the current folder, ONNX Runtime's telemetry, a foreign cache."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from models import make_model

from twinop.building.cache import cache_folder, make_folder
from twinop.errors import BuildError
from twinop.system import python_child

TAKEN = "import posix\nposix.mkdir(__file__.rpartition('/')[0] + '/taken')\nraise SystemExit(3)\n"


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder whose modules have the names of all others, and PYTHONPATH's empty entries name it."""
    others = "numpy onnx onnxruntime torch twinop pytest conftest sitecustomize usercustomize"
    for name in (*sys.stdlib_module_names, *others.split()):
        (tmp_path / f"{name}.py").write_text(TAKEN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{os.pathsep}{os.environ.get('PYTHONPATH', '')}{os.pathsep}")
    return tmp_path


def test_children_take_no_module_of_this_folder(hostile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from twinop.deploy import ort_process, ort_runs, registration, session

    monkeypatch.syspath_prepend("")  # as in a notebook
    monkeypatch.syspath_prepend(str(hostile))  # as after python -m
    server = ort_process.Server()
    model = make_model("CustomRelu").SerializeToString()
    assert server.run(ort_runs._runs, model, None, [], True, True, 0, frozenset()) != [[]]
    server.close()
    monkeypatch.setattr(registration, "registered", {})  # a library is registered in a child first
    assert session(make_model("CustomRelu"), ["CPUExecutionProvider"]).library
    said = subprocess.run(python_child.module("json.tool"), input=b"[1]", capture_output=True)
    assert said.returncode == 0 and said.stdout.split() == [b"[", b"1", b"]"]
    assert not (hostile / "taken").exists()


def test_what_pythonpath_names_is_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("print('found')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert subprocess.run(python_child.python("import mine"), capture_output=True).returncode == 1
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert subprocess.run(python_child.python("import mine"), capture_output=True).stdout == b"found\n"


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


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_command_takes_code_from_the_current_folder(
    hostile: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python files that the user names lie in another folder, where modules beside them are searched."""
    monkeypatch.setenv("PYTHONPATH", "")  # Python itself would search what an empty entry names
    for name in ("pytest.ini", "setup.cfg", "tox.ini", "pyproject.toml"):
        section = "pytest" if name.endswith("ini") else "tool:pytest"
        (hostile / name).write_text(
            f"[{section}]\naddopts = -p conftest\n" if "cfg" in name or "ini" in name else ""
        )
    away, script = tmp_path_factory.mktemp("away"), str(Path(sys.executable).with_name("twinop"))
    model, mish = away / "models/m/1/model.onnx", away / "mish"
    model.parent.mkdir(parents=True)
    (away / "net.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return torch.ops.custom_domain.relu(x)\n"
        "    def example_inputs(self):\n"
        "        return torch.ones(2, 4)\n"
    )
    for command in (
        "ops",
        "new mish",
        f"build {mish} --cpu -o {mish}/build/libmish.so",
        f"test {mish} -k bits -x",
        f"export {away}/net.py:Net -o {model}",
        f"optimize {model} -o {away}/o.onnx",
        f"run {model}",
        f"check {away}/models",
        f"doctor {model}",
        f"pack {model} -o {away}/packed",
        f"bench --library {mish} --quick --providers twinop --output {away}/r",
    ):
        done = subprocess.run([script, *command.split()], capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        assert not (hostile / "taken").exists(), command
        if command == "new mish":
            (hostile / "mish").rename(mish)
    options = ("--http-port", "0", "--no-grpc")
    with subprocess.Popen(
        [script, "serve", str(away / "models"), *options], stderr=subprocess.PIPE
    ) as served:
        assert served.stderr is not None
        try:
            assert any(b'"ready"' in line for line in served.stderr)
        finally:
            served.terminate()
    assert not (hostile / "taken").exists()


def test_the_cache_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TWINOP_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    make_folder(cache_folder() / "trees")
    for folder in (cache_folder(), cache_folder().parent):
        assert folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("TWINOP_CACHE", str(named := tmp_path / "named"))
    make_folder(cache_folder() / "trees")
    assert named.stat().st_mode & 0o777 == cache_folder().stat().st_mode & 0o777 == 0o700
    for mode in (0o770, 0o707, 0o1777):
        named.chmod(mode)
        with pytest.raises(BuildError, match=f"{named}: others may write .*chmod go-w {named}"):
            cache_folder()
    named.chmod(0o755)  # others may read what is beside the builds
    assert cache_folder() == named / "build"


@pytest.mark.parametrize("whose", ["named", "named/build"])
def test_a_cache_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whose: str) -> None:
    (folder := tmp_path / "named/build").mkdir(parents=True)
    monkeypatch.setenv("TWINOP_CACHE", str(folder.parent))
    assert cache_folder() == folder
    if os.geteuid() == 0:
        os.chown(tmp_path / whose, 12345, -1)
    else:
        monkeypatch.setattr("os.geteuid", lambda: 12345)
    with pytest.raises(BuildError, match="belongs to another user, who could change what runs. Set TWINOP_"):
        cache_folder()
