"""Makes environments in build/compat: each onnxruntime that one .so file must serve, and the oldest CMake.

    python tests/helpers/ort_versions.py  # makes what is missing: about 3 s and 120 MB each
    python tests/helpers/ort_versions.py --all  # also those that only slow tests need

tests/ort_customop/test_ort_versions.py runs ort_matrix.py in the former; tests/project/test_cmake.py
configures with the latter.
"""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import onnxruntime

FOLDER = (Path(__file__).resolve().parents[2] / "build/compat").resolve()
SUPPORTED = ("1.18.1", "1.20.1", "1.23.2", "1.31.1", "1.32.0")
TOO_OLD = "1.17.3"
SLOW = ("1.20.1",)  # needed by slow tests alone
INSTALLED = onnxruntime.__version__
CMAKE = "cmake-3.25"  # what CMakeLists.txt asks for
PACKAGES = {  # no further dependency is imported for running a model
    "1.17.3": ("onnxruntime==1.17.3", "numpy==1.26.4"),
    "1.18.1": ("onnxruntime==1.18.1", "numpy==1.26.4"),  # the first to take numpy 2 is 1.19
    "1.20.1": ("onnxruntime==1.20.1", "numpy==2.4.6"),
    "1.23.2": ("onnxruntime==1.23.2", "numpy==2.4.6"),
    "1.27.0": ("onnxruntime==1.27.0", "numpy==2.4.6"),  # the last before standard Attention changed
    "1.31.1": ("onnxruntime==1.31.1", "numpy==2.4.6"),
    "1.32.0": ("onnxruntime==1.32.0", "numpy==2.4.6"),
    CMAKE: ("cmake==3.25.2",),
}


def python_of(version: str) -> Path:
    return FOLDER / version / "bin/python"


def is_ready(version: str) -> bool:
    stamp = FOLDER / version / "twinop-stamp"
    return python_of(version).exists() and stamp.exists() and stamp.read_text() == _wanted(version)


def environment(version: str) -> Path:
    """The Python of an environment that a test needs; without one the test fails, or is skipped offline."""
    import pytest

    if version == INSTALLED:
        return Path(sys.executable)
    if not is_ready(version):
        if os.environ.get("TWINOP_OFFLINE") == "1":
            pytest.skip(f"TWINOP_OFFLINE=1, and no build/compat/{version}")
        pytest.fail(
            f"no build/compat/{version}; ./build.sh test makes it, with tests/helpers/ort_versions.py. "
            "Without a network set TWINOP_OFFLINE=1 to skip these tests",
            pytrace=False,
        )
    return python_of(version)


def _wanted(version: str) -> str:
    return " ".join([FOLDER.as_posix(), sys.version, *PACKAGES[version]])


def make(version: str) -> str | None:
    """Makes one environment; returns what went wrong."""
    folder = FOLDER / version
    shutil.rmtree(folder, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "--python", str(python_of(version))]
    for command in (
        [sys.executable, "-m", "venv", "--without-pip", str(folder)],
        [*pip, "install", "--quiet", "--no-deps", "--no-compile", "--only-binary=:all:", *PACKAGES[version]],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            return f"{' '.join(command)}:\n{done.stdout}{done.stderr}"
    (folder / "twinop-stamp").write_text(_wanted(version))
    return None


def main() -> int:
    left_out = () if "--all" in sys.argv else SLOW
    missing = [each for each in PACKAGES if not is_ready(each) and each not in (INSTALLED, *left_out)]
    if not missing:
        return 0
    if os.environ.get("TWINOP_OFFLINE") == "1":
        print(f"twinop: offline: no environments for {', '.join(missing)}", file=sys.stderr)
        return 0
    print(f"twinop: installing {', '.join(missing)} into {FOLDER}", file=sys.stderr)
    with ThreadPoolExecutor(2) as pool:
        errors = list(filter(None, pool.map(make, missing)))
    for error in errors:
        print(f"twinop: error: {error}", file=sys.stderr)
    if errors:
        hint = "Without a network set TWINOP_OFFLINE=1: the tests that need them are then skipped"
        print(f"twinop: error: {len(errors)} environments could not be made. {hint}", file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
