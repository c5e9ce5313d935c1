"""The compilers that `twinop build` finds, and those that it refuses."""

import re
import shutil
from pathlib import Path

import pytest
from build_files import program

from twinop.building.toolchain import Nvcc, find_compiler, find_nvcc, find_tool, refuse_old_tools
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
        ("#define __GNUC__ 8\n#define __GNUC_MINOR__ 5", "is GCC 8.5, which is too old"),
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
    assert found is not None and found.version == "13.1.99"
    for old in ("11.8", "12.3"):
        path = program(tmp_path / old, lines.replace("12.4", old))
        monkeypatch.setenv("CUDACXX", str(path))
        with pytest.raises(
            BuildError, match=f"{path} is of CUDA {old}.99, .* kernels need CUDA 12.4 or later"
        ):
            find_nvcc()
    monkeypatch.setenv("CUDACXX", "/nowhere/nvcc")
    with pytest.raises(BuildError, match="CUDACXX=/nowhere/nvcc: no such program"):
        find_nvcc()
    monkeypatch.setenv("CUDACXX", str(program(tmp_path / "wrong", "echo hello")))
    with pytest.raises(BuildError, match="does not answer as nvcc does"):
        find_nvcc()


def test_no_cmake_or_ninja(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    old = program(tmp_path / "old", "echo 1.10.2")
    with pytest.raises(BuildError, match=f"{old} is ninja 1.10.2; expected 1.11 or later: pip install"):
        refuse_old_tools(str(old), cuda=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    for name in ("cmake", "ninja"):
        with pytest.raises(BuildError, match=rf"no {name} found .*pip install 'twinop\[build\]'"):
            find_tool(name)


def test_a_compiler_behind_ccache(monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("ccache") is None or shutil.which("g++") is None:
        pytest.skip("needs ccache and g++")
    monkeypatch.setenv("CXX", "ccache g++ -m64")
    assert find_compiler().startswith("g++ -m64 is GCC ")
