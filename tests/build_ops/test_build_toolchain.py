"""The compilers that `twinop build` finds, and those that it refuses."""

import os
import re
import shutil
from pathlib import Path

import pytest
from build_files import program

from twinop.building.toolchain import Nvcc, architectures, find_compiler, find_nvcc
from twinop.errors import BuildError


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match=r"no C\+\+ compiler found \(c\+\+, g\+\+, clang\+\+\). Install one"):
        find_compiler()
    monkeypatch.setenv("CXX", "g++-99")
    with pytest.raises(BuildError, match=r"no C\+\+ compiler found \(g\+\+-99\).*or set CXX to one"):
        find_compiler()
    (tmp_path / "g++-99").write_text("not a program")
    (tmp_path / "g++-99").chmod(0o755)
    with pytest.raises(BuildError, match="g\\+\\+-99 does not run: Exec format error"):
        find_compiler()


@pytest.mark.parametrize(
    ("macros", "message"),
    [
        (
            "#define __GNUC__ 8\n#define __GNUC_MINOR__ 5",
            "is GCC 8.5, which is too old; twinop's headers need GCC 11",
        ),
        (
            "#define __clang__ 1\n#define __GNUC__ 4\n#define __clang_major__ 12",
            "is Clang 12.0, which is too old",
        ),
        ("what?", "does not say its version, as GCC and Clang do"),
    ],
)
def test_a_compiler_that_is_too_old(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, macros: str, message: str
) -> None:
    monkeypatch.setenv("CXX", str(program(tmp_path / "c++", f"echo '{macros}'")))
    with pytest.raises(BuildError, match=re.escape(message)):
        find_compiler()


def test_nvcc_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines = (
        'case "$*" in *version*) echo "release 12.4, V12.4.99" ;; *) echo compute_80; echo compute_90 ;; esac'
    )
    nvcc = program(tmp_path / "toolkit/bin/nvcc", lines)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'empty'}:/bin")
    if shutil.which("nvcc") is None:
        assert find_nvcc() == Nvcc(str(nvcc), "12.4.99", ("80", "90"))
    other = program(tmp_path / "other/nvcc", lines.replace("12.4", "13.1"))
    monkeypatch.setenv("CUDACXX", str(other))
    found = find_nvcc()
    assert found is not None and (found.version, found.knows_compression) == ("13.1.99", True)
    with pytest.raises(BuildError, match="but not libcudart_static.a, which libraries link"):
        _ = found.library_folder
    monkeypatch.setenv("CUDACXX", "/nowhere/nvcc")
    with pytest.raises(BuildError, match="CUDACXX=/nowhere/nvcc: no such program"):
        find_nvcc()
    monkeypatch.setenv("CUDACXX", str(program(tmp_path / "wrong", "echo hello")))
    with pytest.raises(BuildError, match="does not answer as nvcc does"):
        find_nvcc()


NVCC = Nvcc("nvcc", "13.0.88", ("80", "90", "120"))


@pytest.mark.parametrize(
    ("wanted", "archs"),
    [
        ("90,80", ["80-real", "90"]),
        ("90-real", ["90-real"]),
        ("120;90", ["90-real", "120"]),
        ("90a", ["90a"]),
        ("all", ["80-real", "90-real", "90-virtual"]),
    ],
)
def test_architectures(wanted: str, archs: list[str]) -> None:
    assert architectures(wanted, NVCC, ["75", "80", "90"]) == archs


@pytest.mark.parametrize("wanted", ["75", "80,hopper", ",", "90-fake"])
def test_an_architecture_that_nvcc_does_not_know(wanted: str) -> None:
    message = f"--archs {wanted}: nvcc (CUDA 13.0.88) does not know architecture"
    with pytest.raises(
        BuildError, match=re.escape(message) + r".*it knows 80, 90, 120. Choose some of these"
    ):
        architectures(wanted, NVCC, [])


def test_architectures_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from twinop.building import toolchain

    toolchain.gpus.cache_clear()
    program(tmp_path / "nvidia-smi", "printf '9.0\\n8.0\\n9.0\\n'")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert architectures("native", NVCC, []) == ["80-real", "90-real"]
    toolchain.gpus.cache_clear()
