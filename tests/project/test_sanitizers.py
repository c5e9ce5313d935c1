"""Repeats the CPU tests with libraries of the presets `asan` and `ubsan`."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from elf import Elf
from record_driver import ROOT, compiler

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TESTS = (
    *("layer_norm", "torch_op", "torch_op_errors", "cpu_levels", "ort_versions"),
    *("record", "shapes", "deploy_session"),
)
FOUND = 77  # the exit code of a process in which AddressSanitizer found something
RUNTIMES = {"asan": "libasan.so", "ubsan": "libubsan.so"}
SANITIZERS = {"asan": "address", "ubsan": "undefined"}


@pytest.fixture(scope="module")
def build() -> Callable[[str], Path]:
    def make(preset: str) -> Path:
        definitions = {"TWINOP_WITH_CUDA": "OFF", "Python_EXECUTABLE": sys.executable}
        options = [f"-D{name}={value}" for name, value in definitions.items()]
        for command in (["cmake", "--preset", preset, *options], ["cmake", "--build", "--preset", preset]):
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout[-3000:] + done.stderr
        return ROOT / f"build-{preset}"

    return make


def environment(preset: str, folder: Path, logs: Path) -> dict[str, str]:
    """Returns the environment of a process that loads sanitized libraries and writes reports to files."""
    libraries = [RUNTIMES[preset], "libstdc++.so.6"]
    commands = [[compiler(), f"-print-file-name={name}"] for name in libraries]
    paths = [subprocess.run(c, capture_output=True, text=True, check=True).stdout.strip() for c in commands]
    if not Path(paths[0]).is_absolute():
        pytest.skip(f"{compiler()} has no {libraries[0]}; GCC's is needed")
    options = f"log_path={logs / 'report'}:exitcode={FOUND}:print_stacktrace=1"
    return os.environ | {
        "LD_PRELOAD": " ".join(paths),
        # Python frees little at its end. The quarantine is small because one test watches memory grow.
        "ASAN_OPTIONS": f"{options}:detect_leaks=0:quarantine_size_mb=16",
        "UBSAN_OPTIONS": options,
        "PYTHONMALLOC": "malloc",
        "PYTHONPATH": str(ROOT),
        "TWINOP_LIBRARY_DIR": str(folder),
        "CXXFLAGS": f"-g -fsanitize={SANITIZERS[preset]} -fno-sanitize-recover=all",  # of record_driver.py
    }


def reports(logs: Path) -> str:
    return "\n".join(path.read_text()[:5000] for path in sorted(logs.glob("report*")))


@pytest.mark.parametrize("preset", RUNTIMES)
def test_cpu_tests_under(preset: str, build: Callable[[str], Path], tmp_path: Path) -> None:
    folder = build(preset)
    calls = {symbol.name for symbol in Elf(folder / "libcustom_relu.so").dynamic_symbols}
    assert any(name.startswith(("__asan_report", "__ubsan_handle")) for name in calls)
    env = environment(preset, folder, tmp_path)
    files = [str(path) for name in TESTS for path in ROOT.glob(f"tests/*/test_{name}.py")]
    assert len(files) == len(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=300", *files]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert not reports(tmp_path), reports(tmp_path)
    assert done.returncode == 0, done.stdout[-5000:]
