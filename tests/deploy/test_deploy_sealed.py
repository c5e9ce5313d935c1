"""Libraries run from sealed copies: what was checked is what runs, whatever happens to the file."""

import errno
import hashlib
import os
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from abi_files import CPU, X, c_library, negate_model
from models import make_model

from twinop.deploy import ort_process, registration, session
from twinop.errors import LibraryError, TwinopError, TwinopWarning
from twinop.system import python_child

PLUS = "-DSIGN=1"  # a build that gives x, where the usual one gives -x


@pytest.fixture
def library(tmp_path: Path) -> Path:
    return Path(shutil.copy(c_library("plain_c"), tmp_path))


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def renamed(library: Path, data: bytes) -> None:
    new = library.with_name("new")
    new.write_bytes(data)
    new.rename(library)


def written_over(library: Path, data: bytes) -> None:
    library.write_bytes(data)


def linked(library: Path, data: bytes) -> None:
    other = library.with_name("other")
    other.write_bytes(data)
    library.unlink()
    library.symlink_to(other)


@pytest.mark.parametrize("replace", [renamed, written_over, linked])
def test_a_replaced_library_is_what_runs_next(library: Path, replace: Callable[[Path, bytes], None]) -> None:
    """Sessions that live go on with the code that they were opened with."""
    first = session(negate_model(), CPU, library)
    old = sha256(library)
    replace(library, c_library("plain_c", PLUS).read_bytes())
    second = session(negate_model(), CPU, library)
    assert first.checksums == [old] and second.checksums == [sha256(library)] != [old]
    for _ in range(2):
        np.testing.assert_array_equal(first.run({"x": X})["y"], -X)
        np.testing.assert_array_equal(second.run({"x": X})["y"], X)
    shutil.copy(c_library("plain_c"), library)
    np.testing.assert_array_equal(session(negate_model(), CPU, library).run({"x": X})["y"], -X)


def test_a_library_that_was_spoiled_does_no_harm_to_a_session(library: Path) -> None:
    opened = session(negate_model(), CPU, library)
    for data in (b"", b"\0" * library.stat().st_size, library.read_bytes()[:5000]):
        library.write_bytes(data)
        np.testing.assert_array_equal(opened.run({"x": X})["y"], -X)
        with pytest.raises(LibraryError, match=r"libplain_c\.so: "):
            session(negate_model(), CPU, library)


def test_one_content_is_loaded_once(libraries: dict[str, Path], tmp_path: Path) -> None:
    def mapped() -> list[str]:
        lines = Path("/proc/self/maps").read_text().splitlines()
        assert not any("r-xp" in line and str(tmp_path) in line for line in lines)
        return [line for line in lines if "memfd:libcustom_relu.so" in line and "r-xp" in line]

    model = make_model("CustomRelu")
    copy = session(model, CPU, libraries["custom_relu"]).libraries[0].copy
    assert str(copy.path) == f"/proc/{os.getpid()}/fd/{copy.number}"  # the name for debuggers
    before, files = mapped(), len(os.listdir("/proc/self/fd"))
    assert before
    for number in range(20):
        other = Path(shutil.copy(libraries["custom_relu"], tmp_path / f"lib{number}.so"))
        session(model, CPU, other)
    assert mapped() == before and len(os.listdir("/proc/self/fd")) < files + 10


def test_a_relative_path_is_that_of_this_folder(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = library.parent / "other"
    other.mkdir()
    shutil.copy(c_library("plain_c", PLUS), other / library.name)
    for folder, expected in ((library.parent, -X), (other, X)):
        monkeypatch.chdir(folder)
        opened = session(negate_model(), CPU, f"./{library.name}")
        np.testing.assert_array_equal(opened.run({"x": X})["y"], expected)


def test_a_library_that_finds_others_by_its_place() -> None:
    for path in ("$ORIGIN", "/opt:${ORIGIN}/lib"):
        found = c_library("plain_c", link=f"-Wl,-rpath,{path}")
        with pytest.raises(LibraryError) as error:
            session(negate_model(), CPU, found)
        said = f"finds other libraries relative to its own file ({path})"
        for part in (str(found), said, "--set-rpath /opt"):
            assert part in str(error.value)
    session(negate_model(), CPU, c_library("plain_c", link="-Wl,-rpath,/opt/libraries"))


def test_a_library_that_changes_once_is_read_again(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fstat, changes = os.fstat, [c_library("plain_c", PLUS).read_bytes()]

    def after_the_first_read(number: int) -> Any:
        found = fstat(number)
        if changes and found.st_ino == library.stat().st_ino:
            library.write_bytes(changes.pop())
        return found

    monkeypatch.setattr(os, "fstat", after_the_first_read)
    opened = session(negate_model(), CPU, library)
    np.testing.assert_array_equal(opened.run({"x": X})["y"], X)
    assert opened.checksums == [sha256(library)]


def test_no_memory_for_the_copy(library: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(LibraryError) as error:
            session(negate_model(), CPU, library)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    size = library.stat().st_size
    assert str(error.value).startswith(f"{library}: cannot be copied into memory ({size} bytes): ")


def test_constants_of_zeros() -> None:
    """They may be valid, so another process tries them first."""
    zeros = "-DZEROS=8192"
    opened = session(negate_model(), CPU, c_library("plain_c", zeros))
    np.testing.assert_array_equal(opened.run({"x": X})["y"], -X)
    deadly = c_library("plain_c", zeros, "-DENDS=1")
    with pytest.raises(LibraryError) as error:
        session(negate_model(), CPU, deadly)
    for part in (f"{deadly}: the file is damaged", "a process that loads it ends with SIGABRT", "Copy"):
        assert part in str(error.value)


@pytest.mark.parametrize("how", ["refused", "not executable"])
def test_memory_that_runs_no_code(how: str, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with vm.memfd_noexec=2, or under SELinux: a file without a name takes its place."""
    registration._copy.cache_clear()
    monkeypatch.setattr(registration, "registered", {})
    if how == "refused":

        def refuse(*_: Any) -> int:
            raise PermissionError(errno.EACCES, "Permission denied")

        monkeypatch.setattr(os, "memfd_create", refuse)
    else:
        runs = registration._runs_code
        is_memory = lambda number: "memfd:" in os.readlink(f"/proc/self/fd/{number}")  # noqa: E731
        monkeypatch.setattr(registration, "_runs_code", lambda number: not is_memory(number) and runs(number))
    (away := library.with_name("away")).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(away))
    opened = session(negate_model(), CPU, library)
    np.testing.assert_array_equal(opened.run({"x": X})["y"], -X)
    number = opened.libraries[0].copy.number
    assert "(deleted)" in os.readlink(f"/proc/self/fd/{number}") and opened.checksums == [sha256(library)]
    with pytest.raises(OSError):
        os.write(number, b"x")
    assert not [*away.iterdir()]
    monkeypatch.setattr(registration, "_runs_code", lambda number: False)
    registration._copy.cache_clear()
    with pytest.raises(LibraryError, match=r"code run from memory \(vm.memfd_noexec.*set TMPDIR") as error:
        session(negate_model(), CPU, library)
    assert "more memory" not in str(error.value)
    registration._copy.cache_clear()


def test_other_apps_are_not_started(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen app, or one with Python in it, would start itself once more."""
    app = tmp_path / "app"
    app.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    app.chmod(0o755)
    real = getattr(sys, "_base_executable", sys.executable)
    monkeypatch.setattr(registration, "registered", {})
    for name, path in (("executable", str(app)), ("_base_executable", real)):
        monkeypatch.setattr(sys, name, path, raising=False)
    assert python_child.executable() == real
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    monkeypatch.setattr(sys, "_base_executable", str(app), raising=False)
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    assert python_child.executable() == ""
    with pytest.warns(TwinopWarning, match=f"{library} is loaded without a trial, and if it is damaged"):
        opened = session(negate_model(), CPU, library)
    np.testing.assert_array_equal(opened.run({"x": X})["y"], -X)
    with pytest.warns(TwinopWarning, match="the model runs in this one, and may end it or never come to"):
        assert ort_process.Server().run(list, [1]) == [1]
    with pytest.raises(TwinopError, match="no Python interpreter was found for a child process"):
        python_child.module("json.tool")
    assert not (tmp_path / "started").exists()
