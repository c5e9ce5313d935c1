"""build.sh: its messages when something is missing, and the work that it does not repeat.

Python, pip and cmake are stand-ins here. The real ones build the libraries that the other tests load."""

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from twinop.installation import ALL_OPS_TAKE

ROOT = Path(__file__).resolve().parents[2]
PYTHON = """\
#!/bin/sh
case "$1 $2" in
  "-V "*) echo "Python 3.11.7" ;;
  "-m venv") [ -e "$FAIL_VENV" ] && exit 1
    mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && cp "$FAKES/cmake" "$3/bin/cmake" ;;
  "-m pip") echo "pip $*" >>"$LOG"
    [ ! -e "$FAIL_PIP" ] ;;
  "-m twinop.bench") echo "$*" >>"$LOG" ;;
  "-m pytest") shift 2; for word in "$@"; do echo "pytest [$word]" >>"$LOG"; done ;;
  "-c "*) exit 0 ;;
esac
"""
OLD_PYTHON = '#!/bin/sh\n[ "$1" = -V ] && echo "Python 3.9.2"\n[ "$1" = -V ]\n'
CMAKE = '#!/bin/sh\necho "cmake $* ORT_ROOT=$ORT_ROOT" >>"$LOG"\nmkdir -p build; echo >>build/libx.so\n'


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a copy of build.sh in a folder with a space in its name, with few programs on PATH."""
    tree, programs = tmp_path / "a tree", tmp_path / "programs"
    (tree / "twinop").mkdir(parents=True)
    programs.mkdir()
    shutil.copytree(ROOT / "requirements", tree / "requirements")
    for name in ("build.sh", "pyproject.toml", "CMakeLists.txt"):
        shutil.copy(ROOT / name, tree / name)
    for name, text in {
        "python3": PYTHON,
        "python-old": OLD_PYTHON,
        "cmake": CMAKE,
        "c++": "#!/bin/sh\n",
    }.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    for name in ("bash", "cat", "cp", "dirname", "find", "mkdir", "rm", "sh", "sha256sum", "sort"):
        os.symlink(str(shutil.which(name)), programs / name)

    def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        paths = {"LOG": "log", "FAIL_PIP": "fail pip", "FAIL_VENV": "fail venv", "FAKES": "programs"}
        return subprocess.run(
            [tree / "build.sh", *arguments],
            env={"PATH": str(programs)} | {name: str(tmp_path / path) for name, path in paths.items()} | env,
            check=False,
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )

    return run


def log(tmp_path: Path) -> list[str]:
    """Returns the calls of the stand-ins since the last call of this function."""
    lines = (tmp_path / "log").read_text().splitlines() if (tmp_path / "log").exists() else []
    (tmp_path / "log").unlink(missing_ok=True)
    return lines


def test_the_second_run_needs_no_network(tmp_path, build):
    assert build().returncode == 0
    first = log(tmp_path)
    assert len(first) == 4
    assert first[0].endswith(" -r requirements/base.txt -r requirements/compile.txt -r requirements/cpu.txt")
    assert first[1:3] == ["cmake --preset default ORT_ROOT=", "cmake --build --preset default ORT_ROOT="]
    assert "--no-deps --config-settings=wheel.cmake=false --editable ." in first[3]
    (tmp_path / "programs/cmake").write_text("")  # build.sh uses only the one in .venv
    (tmp_path / "a tree/.venv/bin/cmake").write_text('#!/bin/sh\necho cmake >>"$LOG"\n')
    assert build().returncode == 0
    assert log(tmp_path) == ["cmake", "cmake"]


def test_the_cuda_kernels_can_be_left_out(tmp_path, build):
    (tmp_path / "programs" / "nvcc").symlink_to(tmp_path / "programs" / "c++")
    done = build("build")
    assert f"the first build of all ops takes {ALL_OPS_TAKE}\n" in done.stderr
    assert not any("TWINOP_WITH_CUDA" in line for line in log(tmp_path))
    for command in ("build", "demo"):
        build(command, "--cpu")
        assert [line for line in log(tmp_path) if "--preset default -DTWINOP_WITH_CUDA=OFF" in line]


def test_the_demo_builds_relu_alone(tmp_path, build):
    """It compiles while packages are installed, and a build of all ops stays one."""
    done = build("demo")
    assert done.returncode == 0
    assert done.stderr.endswith(f"done; this built relu alone. ./build.sh builds all ops: {ALL_OPS_TAKE}\n")
    calls = log(tmp_path)
    assert calls[0].endswith("pip install --quiet -r requirements/compile.txt")
    order = [re.sub(" ORT_ROOT=$", "", line) for line in calls if line.startswith("cmake")]
    relu = "cmake --build --preset default --target custom_relu"
    assert order == ["cmake --preset default", relu, "cmake --build --preset demo"]
    packages = next(line for line in calls if "requirements/base.txt" in line)
    assert calls.index(packages) < calls.index(f"{order[2]} ORT_ROOT=")
    (tmp_path / "a tree/build/libcustom_ops.so").touch()
    done = build("demo")
    assert "cmake --build --preset default ORT_ROOT=" in log(tmp_path) and "relu alone" not in done.stderr


def test_a_demo_that_fails_ends(tmp_path, build):
    """Where compiling fails, it ends after pip."""
    cmake = tmp_path / "programs/cmake"
    cmake.write_text(cmake.read_text() + 'case "$*" in *custom_relu) exit 1 ;; esac\n')
    done, calls = build("demo"), log(tmp_path)
    assert done.returncode == 1 and any("requirements/base.txt" in line for line in calls)
    assert not any("--preset demo" in line for line in calls)


def change(path: Path) -> None:
    with path.open("a") as file:
        file.write("# changed\n")


def installed(tmp_path: Path) -> list[list[str]]:
    """Returns the purposes of each call of pip since the last call of this function."""
    calls = [re.findall(r"requirements/(\w+)\.txt", line) for line in log(tmp_path)]
    return [purposes for purposes in calls if purposes]


def test_a_command_installs_what_it_needs(tmp_path, build):
    build("demo")
    assert installed(tmp_path) == [["compile"], ["base", "compile", "cpu"]]
    build("bench", "--quick")
    assert installed(tmp_path) == [["bench"]]
    build("bench")
    assert installed(tmp_path) == []
    build("test", "--all")
    assert installed(tmp_path)[0] == ["serve", "test", "slow"]
    build("setup")
    assert installed(tmp_path) == [["lint", "wheel", "docs"]]
    change(tmp_path / "a tree/requirements/constraints.txt")
    build("setup")
    everything = ["base", "compile", "cpu", "serve", "bench", "test", "lint", "wheel", "docs"]
    assert installed(tmp_path) == [everything]


def test_serve_passes_its_arguments_on(tmp_path, build):
    assert "twinop serve MODEL serves an .onnx file" in build("serve").stderr
    program = tmp_path / "a tree/.venv/bin/twinop"
    program.write_text('#!/bin/sh\necho "$PWD: $*" >>"$LOG"\n')
    program.chmod(0o755)
    log(tmp_path)
    assert build("serve", "a model.onnx", "--no-grpc").returncode == 0
    assert log(tmp_path)[-1] == f"{tmp_path}: serve a model.onnx --no-grpc"


def test_an_interrupted_setup_starts_again(tmp_path, build):
    (tmp_path / "fail pip").touch()
    done = build()
    assert done.returncode == 1
    assert done.stderr.endswith("in requirements/ could not be installed; see pip's message above.\n")
    (tmp_path / "fail pip").unlink()
    log(tmp_path)
    assert build().returncode == 0
    assert "requirements/base.txt" in log(tmp_path)[0]


def test_paths_are_relative_to_the_caller(tmp_path, build):
    build(ORT_ROOT="an ort")
    assert f"cmake --preset default ORT_ROOT={tmp_path}/an ort" in log(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), ["-n", "3", "--dist", "worksteal"]),
        (("--all",), ["-n", "3", "--dist", "worksteal", "-m", ""]),
        (("-n", "0"), ["-n", "0"]),
        (("--all", "-k", "a or b"), ["-m", "", "-k", "a or b"]),
        (("tests/x y.py",), ["tests/x y.py"]),
    ],
)
def test_arguments_go_to_pytest(tmp_path, build, arguments, expected):
    assert build("test", *arguments).returncode == 0
    started = [line for line in log(tmp_path) if line.startswith("pytest")]
    assert started == [f"pytest [{word}]" for word in expected]


@pytest.mark.parametrize(
    ("arguments", "env", "message"),
    [
        (["frob"], {}, "unknown command: frob"),
        (["demo", "--wrng"], {}, "demo: unknown argument: --wrng"),
        (["build", "--cpu", "--wrng"], {}, "build: unknown argument: --wrng"),
        (["clean", "all"], {}, "clean: unknown argument: all"),
        (["setup", "tests"], {}, "no requirements/tests.txt: expected some of base serve bench test lint"),
        ([], {"TWINOP_DEVICE": "tpu"}, "TWINOP_DEVICE=tpu: expected cpu or cuda"),
        ([], {"TWINOP_PYTHON": "python9"}, "no python9 found. Install Python 3.11 or later, or set"),
        ([], {"TWINOP_PYTHON": "python-old"}, "is Python 3.9.2; twinop needs 3.11 or later. Set"),
    ],
)
def test_mistakes(tmp_path, build, arguments, env, message):
    done = build(*arguments, **env)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("twinop: error: ") and message in last
    assert log(tmp_path) == []


def test_missing_tools(tmp_path, build):
    (tmp_path / "fail venv").touch()
    assert "cannot make a virtual environment (Debian, Ubuntu: install python3-venv)." in build().stderr
    (tmp_path / "programs/c++").unlink()
    done = build()
    assert done.returncode == 1
    assert "error: no C++ compiler found (c++, g++, clang++). Install one (Debian, " in done.stderr
