"""`twinop build`: what it makes, what it compiles again, several processes at once, and its compilers."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
from build_files import program, tiny, twinop

from twinop.building.builder import Built, build
from twinop.building.project import Options, find_project
from twinop.building.toolchain import Nvcc, find_compiler, find_nvcc, find_tool, refuse_old_tools
from twinop.deploy.registration import sealed
from twinop.errors import BuildError, TwinopWarning
from twinop.libraries.built import changed_since
from twinop.libraries.declare import library_beside
from twinop.libraries.library import read_library

CPU = Options(cpu=True, debug=True)  # optimizing takes a third of a compiler's time


def test_only_what_changed_is_compiled(times: Built, tmp_path: Path) -> None:
    folder = tmp_path / "ein Ordner ü $b's (c) #d, e&f@g"  # what shells, CMake and ninja could take apart
    folder.mkdir()
    (folder / "factor.h").write_text("#define THREE 3\n")
    header = folder / "times.h"
    header.write_text('#include "factor.h"\n' + tiny(factor="THREE").replace("THREE * grad", "3 * grad"))
    project = find_project([header])
    steps = ["compiling times.h", "linking libtimes.so"]
    assert build(project, options=CPU).compiled == ["compiling library_times.cpp", *steps]
    assert build(project, options=CPU).compiled == []
    (folder / "factor.h").write_text("#define THREE 3.0f\n")
    assert build(project, options=CPU).compiled == steps
    header.write_text(header.read_text() + "// a comment\n")
    assert build(project, options=CPU).compiled[0] == steps[0]
    (folder / "factor.h").write_text("#define THREE 3\n")
    output = folder / "out.so"
    assert build(project, output, CPU).library.path == output
    assert read_library(output).records.keys() == {"times"}


def test_what_ninja_does_not_see_is_compiled_again(times: Built, tmp_path: Path) -> None:
    """A copy; a damaged build tree; an older file in the place of a newer one: ninja looks at times."""
    copy = shutil.copytree(times.library.path.parents[1], tmp_path / "copy")
    header, output = copy / "times.h", copy / "build/libtimes.so"
    header.write_text(tiny(factor="6"))
    copied = build(find_project([header]), output, CPU).library
    assert copied.records["times"].gradients[0].text == "6 * grad"
    (copy / "build/.libtimes/CMakeLists.txt").unlink()
    assert "compiling times.h" in build(find_project([header]), output, CPU).compiled
    header.write_text(tiny(factor="5"))
    os.utime(header, (1, 1))
    assert "compiling times.h" in build(find_project([header]), output, CPU).compiled


def test_the_command_in_a_pipe(times: Built, tmp_path: Path) -> None:
    """The table and one line, without escape sequences and progress; nothing in the folder but build/."""
    shutil.copy(times.library.path.parents[1] / "times.h", tmp_path)
    done = twinop("build", "times.h", "--cpu", cwd=tmp_path)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert "│ times │ CustomTimes │ times(Tensor x) -> Tensor │ float32 │ cpu     │" in done.stdout
    assert "build/libtimes.so (domain times 1," in done.stdout and "\x1b" not in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["build", "times.h"]
    names = sorted(path.name for path in (tmp_path / "build").iterdir())
    assert names == [".libtimes", ".libtimes.so.built", "libtimes.so"]
    again = twinop("build", "--cpu", "--name", "times", "-o", "lib.so", cwd=tmp_path)
    assert "lib.so: " in again.stdout and (tmp_path / "lib.so").is_file(), again.stderr


def test_files_of_one_name_and_a_source_without_ops(tmp_path: Path) -> None:
    files = {"a/op.h": tiny("one"), "b/op.h": tiny("two"), "op.cpp": "int Helper() { return 1; }\n"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    built = build(find_project([tmp_path / name for name in files], "both"), options=CPU)
    assert list(built.library.records) == ["one", "two"] and built.library.domain == "both"
    assert built.compiled.count("compiling op.h") == 2 and "compiling op.cpp" in built.compiled


def test_debug_flags_and_warnings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = (
        "null,nonnull-attribute,returns-nonnull-attribute"  # a function's address is no constant with them
    )
    monkeypatch.setenv("CXXFLAGS", f"-fsanitize=undefined -fno-sanitize={checks}")
    monkeypatch.setenv("LDFLAGS", "-fsanitize=undefined")
    header = tmp_path / "times.h"
    header.write_text(tiny().replace("return {};", "int unused; return {};"))
    built = build(find_project([header]), options=CPU)
    assert any("unused variable" in note for note in built.notes)
    command = ["nm", "-C", str(built.library.path)]
    symbols = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "twinop::LaunchtTimes" not in symbols and "LaunchCpu" not in symbols
    assert "__ubsan_handle" in symbols and "Launchtimes" in symbols  # not stripped


BUILD = """
import sys
from pathlib import Path
from twinop.building.builder import build
from twinop.building.project import Options
from twinop.building.project import find_project
built = build(find_project([Path(sys.argv[1])]), Path(sys.argv[2]), Options(cpu=True, debug=True))
print(len(built.library.records))
"""


def test_two_processes_at_once(times: Built, tmp_path: Path) -> None:
    header = tmp_path / "times.h"
    header.write_text(tiny(factor="5"))
    command = [sys.executable, "-c", BUILD, str(header), str(tmp_path / "libtimes.so")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate()[0] for process in processes] == ["1\n", "1\n"]


@pytest.mark.parametrize("how", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL])
def test_an_interrupted_build_leaves_no_library(tmp_path: Path, how: int) -> None:
    """A compiler that writes half an object file and waits; the build is interrupted meanwhile."""
    (tmp_path / "times.h").write_text(tiny(factor="6"))
    started = tmp_path / "started"
    compiler = program(
        tmp_path / "bin" / "c++",
        'case "$*" in *times.0.cpp*) ;; *) exec c++ "$@" ;; esac',
        'while [ "$1" != -o ]; do shift; done',
        f'echo half > "$2"; touch "{started}"; exec sleep 5',
    )
    output = tmp_path / "build/libtimes.so"
    command = [sys.executable, "-c", BUILD, str(tmp_path / "times.h"), str(output)]
    # A shell's background jobs, and so their tests, ignore SIGINT. (A preexec_fn would fork this process
    # with all of its threads; the child has aborted in a long run.)
    env, nothing = os.environ | {"CXX": str(compiler)}, subprocess.DEVNULL
    process = subprocess.Popen(["env", "--default-signal=INT", *command], env=env, stderr=nothing)
    while not started.exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(how)
    assert process.wait(30) != 0
    assert not output.exists()
    assert how != signal.SIGINT or not list(tmp_path.rglob("times.0.cpp.o"))
    program(compiler, 'exec c++ "$@"')
    subprocess.run(command, env=os.environ | {"CXX": str(compiler)}, check=True)
    assert read_library(output).records.keys() == {"times"}


def test_a_header_that_changes_while_it_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler in whose time an editor saves the header: what is kept was compiled from what is there."""
    factor, times, saved = tmp_path / "factor.h", tmp_path / "times.h", tmp_path / "saved"
    factor.write_text("#define SEVEN 7\n")
    times.write_text('#include "factor.h"\n' + tiny(factor="SEVEN").replace("SEVEN * grad", "7 * grad"))

    compiler = tmp_path / "compiler"
    monkeypatch.setenv("CXX", str(compiler))

    def compiles(then: str) -> None:
        program(compiler, f'c++ "$@" || exit 1; case "$*" in *times.0.cpp*) {then} ;; esac')

    compiles(f'test -e {saved} || echo "#define SEVEN 7.0f" > {factor}; touch {saved}')
    project, output = find_project([times]), tmp_path / "build/libtimes.so"
    assert build(project, output, CPU).compiled.count("compiling times.h") == 2
    assert changed_since(output) == "" and build(project, output, CPU).compiled == []
    compiles(f"echo // >> {factor}")
    with pytest.raises(BuildError, match=r"factor\.h: changed while it was compiled, 3 times .*Build again"):
        build(project, output, CPU)


@pytest.fixture
def old(times: Built, tmp_path: Path) -> Path:
    """A project whose library is older than a header that its header includes."""
    header, text = tmp_path / "times.h", tiny(factor="TWO").replace("TWO * grad", "2 * grad")
    (tmp_path / "factor.h").write_text("#define TWO 2\n")
    header.write_text(f'#include "factor.h"\n{text}')
    library = build(find_project([header]), tmp_path / "build/libtimes.so", CPU).library.path
    assert changed_since(library) == ""
    (tmp_path / "factor.h").write_text("#define TWO 3\n")
    return tmp_path


def test_a_library_that_is_older_than_its_sources(old: Path) -> None:
    library, factor = old / "build/libtimes.so", old / "factor.h"
    said = f"{factor} has changed since {library} was built"
    assert said in changed_since(library) and "twinop build" in changed_since(library)
    with pytest.warns(TwinopWarning, match=re.escape(said)):
        sealed(library)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once
        assert library_beside(old / "times.py")() == str(library)
    factor.unlink()  # the library was copied without it
    assert changed_since(library) == ""
    factor.write_text("#define TWO 3\n")
    library.write_bytes(library.read_bytes() + b"\0")  # another tool wrote it
    assert changed_since(library) == ""


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
def test_old_compilers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, macros: str, message: str) -> None:
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
    path = program(tmp_path / "12.3", lines.replace("12.4", "12.3"))
    monkeypatch.setenv("CUDACXX", str(path))
    with pytest.raises(BuildError, match=f"{path} is of CUDA 12.3.99, .* need CUDA 12.4 or later"):
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
        refuse_old_tools(str(old))
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
