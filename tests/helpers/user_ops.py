"""Projects of users with ops of their own, for the tests: a Python file and the library in build/."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import onnx
import warm_python
from abi_files import ROOT, c_library

from twinop.libraries.built import mark
from twinop.libraries.library import find_library

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
    """Makes a project as `twinop build` leaves it: a module test_cube, and build/libtest_cube.so."""
    put_in_build(find_library("test_cube"), folder)
    (folder / "test_cube.py").write_text(CUBE)
    return folder


def put_in_build(library: Path, project: Path) -> Path:
    """Copies a library to a project's build/, as `twinop build` leaves it."""
    (project / "build").mkdir(parents=True, exist_ok=True)
    copy = Path(shutil.copy(library, project / "build"))
    mark(copy).touch()
    return copy


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


def run_python(code: str, folder: Path, *path: Path, fresh: bool = False) -> subprocess.CompletedProcess[str]:
    """Runs code in a process whose current folder and folders of packages are these.

    Args:
        fresh: for a test of imports: nothing is imported before.
    """
    places = os.pathsep.join([*map(str, (*path, ROOT)), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": places, "COLUMNS": "200"}
    if not fresh:
        return warm_python.run(["-c", code], cwd=folder, env=env)
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=env)


def output_of(code: str, folder: Path, *path: Path, fresh: bool = False) -> str:
    """Returns what code prints in `run_python`."""
    done = run_python(code, folder, *path, fresh=fresh)
    assert done.returncode == 0, done.stderr
    return done.stdout


NEGATE = """
import pathlib

import twinop


def library_path():
    return pathlib.Path(__file__).with_name("libother_ops.so")


@twinop.op(domain="other.ops")
def negate(op, x, *, times):
    return op.Neg(op.Mul(x, times))
"""


def negate_package(site: Path) -> Path:
    """Makes the installed package other-ops 0.3, whose domain is not its name."""
    site.mkdir(exist_ok=True)
    (site / "other_ops.py").write_text(NEGATE)
    shutil.copy(c_library("other_ops", '-DDOMAIN="other.ops"'), site / "libother_ops.so")
    return describe_package(site, "other-ops", "0.3", "other.ops", "other_ops")


def three_nodes() -> onnx.ModelProto:
    """y = relu(-x * x * x), with nodes of two packages and of twinop."""
    imports = '["": 20, "test_cube": 1, "other.ops": 1, "custom_domain": 1]'
    return onnx.parser.parse_model(f"""<ir_version: 10, opset_import: {imports}>
        g (float[rows, 4] x) => (float[rows, 4] y) {{ c = test_cube.CustomCube (x)
        n = other.ops.CustomNegate (c) y = custom_domain.CustomRelu (n) }}""")
