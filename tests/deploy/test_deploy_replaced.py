"""A library's file is replaced while this process has the old one loaded."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from models import make_model

from twinop.deploy import session
from twinop.errors import LibraryError, ReplacedLibraryError

X = np.array([[-1, 2, -3, 4]], np.float32)
MODEL = make_model("CustomRelu")


@pytest.fixture
def library(libraries: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copy(libraries["custom_relu"], tmp_path))


def other_build(library: Path) -> bytes:
    return library.read_bytes() + b"\0"


def replace(library: Path, data: bytes) -> None:
    new = library.with_name("new")
    new.write_bytes(data)
    new.rename(library)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("way", ["renamed", "written over", "a link"])
def test_a_replaced_library_is_refused(library: Path, way: str) -> None:
    path = library
    if way == "a link":
        path = library.with_name("liblink.so")
        path.symlink_to(library)
    first = session(MODEL, library=path)
    assert first.checksums[0] == sha256(library)
    data = other_build(library)
    if way == "renamed":
        replace(library, data)
    elif way == "written over":
        with library.open("ab") as file:  # what runs stays as it is
            file.write(b"\0")
    else:
        other = library.with_name("other")
        other.write_bytes(data)
        path.unlink()
        path.symlink_to(other)
    with pytest.raises(ReplacedLibraryError) as error:
        session(MODEL, library=path)
    text = str(error.value)
    assert (
        text.startswith(f"{path}: the file was replaced after")
        and "Restart it, or put the new library" in text
    )
    np.testing.assert_array_equal(first.run({"x": X})["y"], np.maximum(X, 0))
    assert isinstance(error.value, LibraryError)


def test_the_loader_does_keep_the_old_library(library: Path) -> None:
    """Why it is refused, also when no session is left: the libraries are linked so that they stay loaded."""
    session(MODEL, library=library)
    replace(library, other_build(library))
    with pytest.raises(ReplacedLibraryError):
        session(MODEL, library=library)
    loaded = Path("/proc/self/maps").read_text()
    assert f"{library} (deleted)" in loaded and f"{library}\n" not in loaded


def test_the_same_library_again_is_taken(library: Path) -> None:
    for change in (os.utime, lambda path: replace(path, path.read_bytes()), lambda path: path.chmod(0o644)):
        session(MODEL, library=library)
        change(library)
        assert session(MODEL, library=library).checksums[0] == sha256(library)


def test_another_name_is_taken(library: Path) -> None:
    session(MODEL, library=library)
    for path in (library.with_name("libnew.so"), library.parent / "2" / library.name):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(other_build(library))
        opened = session(MODEL, library=path)
        assert opened.checksums[0] == sha256(path) != sha256(library)
        np.testing.assert_array_equal(opened.run({"x": X})["y"], np.maximum(X, 0))


def test_a_restart_takes_it(library: Path) -> None:
    session(MODEL, library=library)
    replace(library, other_build(library))
    code = (
        "import sys; from twinop.deploy import session; "
        "print(session(sys.argv[1], library=sys.argv[2]).checksums[0])"
    )
    model = library.with_name("model.onnx")
    model.write_bytes(MODEL.SerializeToString())
    done = subprocess.run(
        [sys.executable, "-c", code, model, library], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == sha256(library), done.stderr


def test_a_relative_path_is_that_of_this_folder(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader compares the texts of paths: it took the library of the folder that was current before."""
    other = library.parent / "other"
    other.mkdir()
    (other / library.name).write_bytes(other_build(library))
    for folder in (library.parent, other):
        monkeypatch.chdir(folder)
        assert session(MODEL, library=f"./{library.name}").checksums[0] == sha256(folder / library.name)
        assert str(folder / library.name) in Path("/proc/self/maps").read_text()


def test_a_library_that_is_taken_away(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from twinop.deploy import create_session

    choose = create_session.choose_providers

    def late(*arguments: object) -> object:
        library.unlink()
        return choose(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(create_session, "choose_providers", late)
    with pytest.raises(LibraryError, match=r"libcustom_relu\.so: cannot be read: No such file"):
        session(MODEL, library=library)
