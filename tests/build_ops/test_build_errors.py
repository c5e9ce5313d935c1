"""`twinop build`: each mistake and each fault of a machine is one message."""

import errno
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from build_files import tiny, twinop
from record_driver import read_by_compiler

from twinop.building import toolchain
from twinop.building.builder import Built, build
from twinop.building.diagnostics import build_error, cmake_error
from twinop.building.project import Options, find_project
from twinop.building.toolchain import find_installation
from twinop.errors import BuildError, TwinopError
from twinop.record.record_checks import check_record
from twinop.record.schema_text import record_of

CPU = Options(cpu=True, debug=True)


@pytest.fixture
def header(tmp_path: Path) -> Path:
    (tmp_path / "times.h").write_text(tiny())
    return tmp_path / "times.h"


@pytest.mark.parametrize(
    ("sources", "name", "domain", "message"),
    [
        (["nothere.h"], None, None, "nothere.h: no such file or folder. Expected a"),
        (["times.h", "plain.h"], None, None, "--name is required for several files: --name mish makes the"),
        (["times.h", "."], None, None, "expected one folder, or source files"),
        (["plain.h"], None, None, "plain.h: registers no op. Expected a header with TWINOP_UNARY"),
        (["empty"], None, None, "empty: no .h, .hpp, .cuh, .cu, .cpp, .cc file: registers no op"),
        (["notes.txt"], None, None, "notes.txt: not a source of ops. Expected a file that ends in .h"),
        (["latin.h"], None, None, "latin.h: cannot be read: 'utf-8' codec"),
        (["name.h"], None, None, "op name name: reserved, because torch.ops.<domain>.name"),
        (["times.h"], "a b", None, "--name a b: expected letters, digits and _, as in mish"),
        (["times.h"], None, "aten", "domain aten: reserved"),
        (["times.h", "times.cpp"], "two", None, "times.cpp both have an op times. Ops of one library have"),
    ],
)
def test_what_cannot_be_built(header: Path, sources: list[str], name: Any, domain: Any, message: str) -> None:
    folder = header.parent
    (folder / "plain.h").write_text("// nothing\n")
    (folder / "notes.txt").write_text("TWINOP_OP(x, y)\n")
    (folder / "times.cpp").write_text(tiny())
    (folder / "name.h").write_text("TWINOP_OP(name, y)\n")
    (folder / "latin.h").write_bytes("// é".encode("latin-1"))
    (folder / "empty").mkdir()
    with pytest.raises(TwinopError, match=re.escape(message)):
        find_project([folder / source for source in sources], name, domain)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tool.twinop", "pyproject.toml: does not parse:"),
        ('[tool.twinop]\nsource = ["times.h"]', "[tool.twinop] has source = ['times.h']; expected some of"),
        ('[tool.twinop]\nsources = "times.h"', "[tool.twinop] has sources = 'times.h'; expected some of"),
        ('[tool.twinop]\nsources = ["a.h"]', "names the source"),
    ],
)
def test_a_broken_pyproject(header: Path, text: str, message: str) -> None:
    (header.parent / "pyproject.toml").write_text(text)
    with pytest.raises(BuildError, match=re.escape(message)):
        find_project([header.parent])


def test_what_a_project_says(header: Path) -> None:
    settings = '[tool.twinop]\nsources = ["times.h"]\ndomain = "my.ops"\n'
    (header.parent / "pyproject.toml").write_text(f'[project]\nname = "my-ops"\n{settings}')
    found = find_project([header.parent])
    assert (found.name, found.domain) == ("my_ops", "my.ops")
    assert find_project([header.parent], "other", "other.ops").domain == "other.ops"
    assert find_project([header, header], "two").domain == "two"
    (header.parent / "pyproject.toml").unlink()
    (header.parent / "helper.h").write_text("#pragma once\n")
    folder = find_project([header.parent])
    assert [source.path.name for source in folder.sources] == ["times.h"]
    assert folder.name == re.sub(r"\W", "_", header.parent.name)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            "/usr/include/crt/host_config.h:143:2: error: #error -- unsupported GNU version! gcc versions "
            "later than 13 are not supported! The nvcc flag",
            "compiling mish.h: nvcc does not support this gcc; it supports gcc up to 13. Install g++-13, and "
            "build with CXX=g++-13",
        ),
        ("nvcc fatal   : Unsupported gpu architecture 'compute_75'", "does not know the architecture"),
        ("Killed", "compiling mish.h failed"),
    ],
)
def test_what_compilers_say(said: str, message: str) -> None:
    error = build_error("compiling mish.h", said, [])
    assert message in str(error) and said in (error.output, str(error).splitlines()[0])


def test_an_error_in_the_source(header: Path) -> None:
    """The message has the user's file and line, and comes last; --verbose shows the compiler's text."""
    header.write_text(header.read_text().replace("return {};", "return wrong;"))
    message = "times.h:10: ‘wrong’ was not declared in this scope"
    for options in ((), ("--verbose",)):
        done = twinop("build", "times.h", "--cpu", "--debug", *options, cwd=header.parent, LC_ALL="C.UTF-8")
        before, found, said = done.stderr.rpartition("error: ")
        assert done.returncode == 1 and found and said.startswith(message), done.stderr
        assert ("error: " in before) == bool(options) and "/ops/times.0.cpp" not in done.stderr
        assert bool(options) or before == "--verbose shows all that the compiler says\n"
    assert not (header.parent / "build/libtimes.so").exists()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("(Tensor x)", "(Tensor x, int[] n=[1, a])", "does not parse: a number is wanted"),
        ('Tensor")', 'Tensor").limits("a > 0")', "does not parse: a record's limits name no"),
        ('Record("times', 'Record("other', "static assertion failed: the schema has another name"),
    ],
)
def test_what_is_wrong_in_a_record(
    header: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, message: str
) -> None:
    monkeypatch.chdir(header.parent)
    header.write_text(header.read_text().replace(old, new, 1))
    lines = read_by_compiler(f'#include "{header}"\n').stderr.splitlines()
    said = "\n".join(line for line in lines if "<stdin>" not in line)
    said = str(build_error("compiling times.h", said, [header]))
    assert said.startswith("times.h:13: ") and message in said and "\n" not in said


@pytest.mark.parametrize(
    ("arguments", "texts", "message"),
    [
        ("", {"gradient": "x = 2 * gard"}, "derivative `x = 2 * gard` uses gard, expected x, y, grad, torch"),
        (", float a=-1.0", {"limits": "a > 0"}, "the default of attribute a is -1, expected a finite number"),
        (', str a="b"', {"choices": "a = c | d"}, "the default of attribute a is 'b', expected one of c | d"),
        ("", {"dtypes": "float32; float32 y=float64"}, "dtypes: x float32 gives both y float32 and y"),
        (", int lambda=1", {}, "argument lambda: a keyword of Python. Choose another name"),
        (", int self=1", {}, "an attribute is called self, which exporters use"),
        (", float grad=1.0", {"gradient": "x = grad"}, "derivative `x = grad` uses grad, which is also an"),
    ],
)
def test_what_no_compiler_refuses_in_a_record(arguments: str, texts: dict[str, str], message: str) -> None:
    record = record_of(f"times(Tensor x{arguments}) -> Tensor", "times", **{"dtypes": "float32"} | texts)
    with pytest.raises(TwinopError, match=f"^times::times: {re.escape(message)}"):
        check_record(record, {"times"})


def test_two_ops_of_one_name_in_onnx(header: Path) -> None:
    header.write_text(tiny() + tiny("Times"))
    with pytest.raises(TwinopError, match="^ops Times and times are both CustomTimes in ONNX. Rename"):
        build(find_project([header]), options=CPU)


def test_a_header_with_ops_that_another_one_includes(header: Path) -> None:
    header.with_name("more.h").write_text('#include "times.h"\n' + tiny("more"))
    with pytest.raises(TwinopError, match="two source files register the op times, as where one header incl"):
        build(find_project([header.parent]), options=CPU)


def test_a_formula_that_is_no_python_ends_a_build(header: Path) -> None:
    header.write_text(header.read_text().replace("2 * grad", "2 * grad *"))
    message = re.escape(
        "times::times: derivative `x = 2 * grad *` is not a Python expression: invalid syntax"
    )
    with pytest.raises(TwinopError, match=message):
        build(find_project([header]), options=CPU)
    assert not (header.parent / "build/libtimes.so").exists()


SAID_BY_NVCC = """\
/include/twinop/record/arguments.h(60): error: static assertion failed with "the op's schema has no attribute"
    static_assert(kIndex >= 0, "the op's schema has no attribute of this name");
    ^
          detected during:
            instantiation of "T twinop::AttributeOf<T,Op,Name>(const CallOf<Op> &, Name)" at line 14 of HEADER
            instantiation of "F twinop::MakeFunctor<F,AnyCall>()" at line 152 of /include/twinop/elementwise.h
"""
RECORD_OF_NVCC = """\
HEADER(13): error: expression must have a constant value
  namespace times_op { constexpr Record kRecord = Record("times(Tensor x) -> Tensor").limits("n > 0")
                                                             ^
/include/twinop/record/record.h(288): note #2721-D: expression cannot be interpreted
        if (attribute < 0) throw "a record's limits name no attribute of its op";
                           ^
"""


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (SAID_BY_NVCC, "times.h:14: static assertion failed: the op's schema has no attribute"),
        (RECORD_OF_NVCC, "times.h:13: the record does not parse: a record's limits name no attribute"),
        (
            'HEADER(9): error: static assertion failed with "mine"',
            "times.h:9: static assertion failed: mine",
        ),
    ],
)
def test_headlines_of_nvcc(header: Path, monkeypatch: pytest.MonkeyPatch, said: str, expected: str) -> None:
    monkeypatch.chdir(header.parent)
    found = str(build_error("compiling times.h (CUDA)", said.replace("HEADER", str(header)), [header]))
    assert found.startswith(expected)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            "-- The CXX compiler\nCMake Error at cmake/TwinopCuda.cmake:69 (message):\n"
            "  TWINOP_CUDA_ARCHS=75: this nvcc (nvcc) does not know\n  architecture 75\nCall Stack:\n  x:3\n",
            "--archs 75: this nvcc (nvcc) does not know architecture 75",
        ),
        (
            'CMake Error at CMakeTestCXXCompiler.cmake:73 (message):\n  The C++ compiler\n\n    "c++"\n\n'
            "  is not able to compile a simple test program.\n\n  It fails with the following output:\n\n"
            "    cannot find -lm\n\n  \n\nCall Stack\n",
            'The C++ compiler "c++" is not able to compile a simple test program.',
        ),
    ],
)
def test_errors_of_cmake(said: str, message: str) -> None:
    error = cmake_error(said)
    assert str(error) == message and error.output in ("", said.strip())


@pytest.mark.parametrize("character", ['"', ";", "[", "]", "\\", "<", "|", "${", "\udce9"])
def test_a_folder_that_cmake_cannot_read(character: str, tmp_path: Path) -> None:
    header = tmp_path / f"a{character}b/times.h"
    header.parent.mkdir()
    header.write_text(tiny())
    said = f"CMake cannot build in or from a path with {character!r}. Rename the folder"
    with pytest.raises(BuildError, match=re.escape(said)):
        build(find_project([header]), tmp_path / "build/libtimes.so", CPU)


def test_a_folder_that_is_a_file(times: Built, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    project = find_project([times.library.path.parents[1] / "times.h"])
    with pytest.raises(BuildError, match="libtimes.so: cannot be written: File exists.*another file with -o"):
        build(project, tmp_path / "file" / "libtimes.so", CPU)
    monkeypatch.setenv("TWINOP_CACHE", str(tmp_path / "file"))
    with pytest.raises(BuildError, match="cannot be written: File exists.*or set TWINOP_CACHE to a folder"):
        build(project, options=CPU)


@pytest.mark.parametrize(
    ("number", "message"),
    [(errno.ENOSPC, "No space left on device"), (errno.EROFS, "Read-only file system")],
)
def test_a_disk_that_is_full(
    times: Built, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int, message: str
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fdopen", fail)
    with pytest.raises(BuildError, match=rf"(libtimes\.so|CMakeLists\.txt): .*{message}"):
        build(find_project([times.library.path.parents[1] / "times.h"]), tmp_path / "libtimes.so", CPU)
    assert list(tmp_path.iterdir()) == []


def test_an_installation_that_cannot_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed = find_installation()
    monkeypatch.setattr(toolchain, "library_folders", lambda: [tmp_path])
    for name in ("twinop-build.cmake", "exports.map"):
        shutil.copy(installed / name, tmp_path)
    message = rf"searched {tmp_path} \(without libtwinop_ort.a\). Build it with ./build.sh"
    with pytest.raises(BuildError, match=message):
        find_installation()
    (tmp_path / "libtwinop_ort.a").write_bytes(b"")
    (tmp_path / "twinop-build.cmake").write_text("set(TWINOP_VERSION 9.9)\n")
    with pytest.raises(BuildError, match="was built by twinop 9.9; this is twinop .*Build it with"):
        find_installation()


def test_no_nvcc_is_a_note(times: Built, tmp_path: Path) -> None:
    """Without nvcc, an op with a CUDA kernel is built for the CPU, and the note says so."""
    source = tiny("both").replace("TWINOP_CPU_OP", "TWINOP_OP")
    (tmp_path / "both.h").write_text(source)
    (tmp_path / "bin").mkdir()
    for name in ("c++", "as", "ld"):
        found = shutil.which(name)
        assert found is not None
        (tmp_path / "bin" / name).symlink_to(found)
    path = {"PATH": str(tmp_path / "bin"), "CUDA_HOME": "/nowhere"}
    if Path("/usr/local/cuda/bin/nvcc").exists():
        pytest.skip("nvcc is where it is found without PATH")
    done = twinop("build", "both.h", cwd=tmp_path, **path)
    assert done.returncode == 0 and "note: no nvcc found (CUDACXX, PATH, CUDA_HOME, " in done.stderr
