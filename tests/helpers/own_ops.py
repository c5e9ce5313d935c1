"""Projects of users with ops of their own, for the tests: a Python file and the library in build/."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from abi_files import ROOT

from twinop.library import find_library

CUBE = '''
import twinop

library_path = twinop.library_beside(__file__)


@twinop.op
def cube(op, x):
    """y = x * x * x"""
    return op.Mul(op.Mul(x, x), x)


@twinop.second_derivative
def cube_backward(grad_y, x):
    return 3 * grad_y * x * x
'''


def cube_project(folder: Path) -> Path:
    """Makes a project as `twinop build` leaves it: test_cube.py and build/libtest_cube.so."""
    (folder / "build").mkdir(parents=True)
    shutil.copy(find_library("test_cube"), folder / "build")
    (folder / "test_cube.py").write_text(CUBE)
    return folder


def cube_package(site: Path) -> Path:
    """Makes the installed package test-cube 1.2 in a folder of packages."""
    (site / "test_cube").mkdir(parents=True)
    (site / "test_cube/__init__.py").write_text(CUBE)
    shutil.copy(find_library("test_cube"), site / "test_cube")
    return describe_package(site, "test-cube", "1.2", "test_cube", "test_cube")


def describe_package(site: Path, name: str, version: str, domain: str, module: str) -> Path:
    """Makes the metadata of an installed package, with an entry point."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[twinop.libraries]\n{domain} = {module}\n")
    return site


def run_python(code: str, folder: Path, *path: Path) -> subprocess.CompletedProcess[str]:
    """Runs code in a process whose current folder and folders of packages are these."""
    places = os.pathsep.join(map(str, (*path, ROOT)))
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": places, "COLUMNS": "200"},
    )


def output_of(code: str, folder: Path, *path: Path) -> str:
    """Returns what code prints in `run_python`."""
    done = run_python(code, folder, *path)
    assert done.returncode == 0, done.stderr
    return done.stdout
