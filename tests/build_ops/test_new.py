"""`twinop new`: projects that work as they are made, and become wheels."""

import errno
import os
import re
import subprocess
import sys
import zipfile
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import warm_python
from build_files import twinop
from record_driver import read_by_compiler

from twinop.building.new import create_project
from twinop.building.project import find_project
from twinop.errors import BuildError, TwinopError


def run_pytest(folder: Path) -> None:
    done = warm_python.run(["-m", "pytest", "-q"], cwd=folder)
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout


def wheel_of(folder: Path) -> None:
    """Writes a project's wheel beside it."""
    pip = [sys.executable, "-m", "pip", "wheel", ".", "--no-build-isolation", "--no-deps", "--no-index", "-q"]
    done = subprocess.run([*pip, "-w", ".."], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("kind", ["elementwise", "rowwise", "kernel"])
def test_no_name_of_the_template_is_left(kind: Any, tmp_path: Path) -> None:
    """That the projects build and are green: tests/journeys."""
    texts = [path.read_text() for path in create_project("my_first", kind, tmp_path).iterdir()]
    assert len(texts) == 4 and not any(re.search("my_op|MyOp", text) for text in texts)


@pytest.mark.parametrize("name", ["total", "xMyOp"])
def test_a_name_that_the_projects_own_test_uses(name: str, tmp_path: Path) -> None:
    folder = create_project(name, "kernel", tmp_path)
    text = f"def {name}(a, scale): return scale * a"
    (folder / f"{name}.py").write_text(text)
    run_pytest(folder)


def test_names_of_functions_and_types_in_the_headers(tmp_path: Path) -> None:
    headers = [create_project(name, "rowwise", tmp_path) / f"{name}.h" for name in ("exp", "op")]
    done = read_by_compiler("".join(f'#include "{header}"\n' for header in headers))
    assert done.returncode == 0, done.stderr


def test_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not entry_points(group="hatch", name="twinop"):
        pytest.skip("twinop was installed here before it had a build hook")
    folder = create_project("packed", "kernel", tmp_path)
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    text = (folder / "packed.h").read_text().replace("TWINOP_OP(", "TWINOP_CPU_OP(")
    (folder / "packed.h").write_text(text)
    wheel_of(folder)
    with zipfile.ZipFile(tmp_path / "packed-0.1.0-py3-none-linux_x86_64.whl") as wheel:
        names = wheel.namelist()
        assert wheel.read("packed/__init__.py") == (folder / "packed.py").read_bytes()
        assert wheel.read("packed-0.1.0.dist-info/entry_points.txt").split() == [
            *(b"[twinop.libraries]", b"packed", b"=", b"packed")
        ]
    own = [name for name in names if "dist-info" not in name]
    assert own == ["packed/__init__.py", "packed/libpacked.so"]


def test_a_folder_that_exists(tmp_path: Path) -> None:
    (tmp_path / "mish").mkdir()
    done = twinop("new", "mish", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr == "error: mish already exists. Choose another name, or another folder to start from\n"
    assert list((tmp_path / "mish").iterdir()) == []


def test_a_parent_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match=r"file/mish: cannot be written: Not a directory"):
        create_project("mish", parent=tmp_path / "file")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("my-op", "op name 'my-op': expected letters, digits and _"),
        ("class", "op name class: a keyword of Python. Choose another name, such as my_class"),
        ("../up", "expected letters, digits and _"),
        ("torch", "reserved, because formulas use torch"),
        ("name", "reserved, because torch.ops.<domain>.name is the name of the domain"),
        ("json", "would hide the module json"),
        ("numpy", "would hide the module numpy"),
        ("library_path", "its Python file has something else of this name. Choose another name"),
        ("tl", "its Python file has something else of this name"),
        ("__", "expected letters, digits and _"),
        ("custom_domain", "reserved for twinop's own ops"),
        ("aten", "reserved for torch's own operators"),
    ],
)
def test_names_that_a_project_cannot_have(name: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(TwinopError, match=said):
        create_project(name, parent=tmp_path)
    assert not list(tmp_path.iterdir())


def test_version() -> None:
    from typer.testing import CliRunner

    from twinop import __version__
    from twinop.cli import app

    assert CliRunner().invoke(app, ["--version"]).stdout == f"twinop {__version__}\n"


def test_cuda_only_op_is_found(tmp_path: Path) -> None:
    """docs/from-a-pytorch-extension.md recommends the macro."""
    header = tmp_path / "only.h"
    header.write_text('TWINOP_CUDA_OP(only, Record("only(Tensor x) -> Tensor"), Launch)\n')
    (source,) = find_project([header]).sources
    assert source.ops == (("CUDA_OP", "only"),) and source.has_cuda


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG])
def test_a_full_disk_leaves_nothing(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, written = Path.write_text, list[Path]()

    def full(self: Path, *text: Any, **options: Any) -> int:
        written.append(self)
        if len(written) > 2:
            raise OSError(number, os.strerror(number))
        return plain(self, *text, **options)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(BuildError) as error:
        create_project("mish", parent=tmp_path)
    said = str(error.value)
    assert os.strerror(number) in said
    assert "start from another folder" in said and " -o" not in said and not [*tmp_path.iterdir()]
