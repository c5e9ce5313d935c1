"""What a user's Python module declares: its op, its second derivative, its library."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from user_ops import cube_package, cube_project, output_of, run_python

import twinop
from twinop.errors import ExportError, LibraryError, TwinopError
from twinop.libraries import declare
from twinop.libraries.library import find_library
from twinop.record import names
from twinop.record.body_registry import BODIES

LIGHT = """
import sys
import test_cube

assert repr(test_cube.cube) == "<op test_cube::cube>" and test_cube.cube.__doc__ == "y = x * x * x"
print({"torch", "onnx", "onnxruntime", "numpy"} & set(sys.modules))
"""
IN_TORCH = """
import pickle

import test_cube
import torch

x = torch.tensor([2.0, -3.0], requires_grad=True)
compiled = torch.compile(lambda x: test_cube.cube(x) + 1, fullgraph=True, backend="eager")
assert compiled(x).tolist() == [9, -26], "the first call may be a traced one"

y = pickle.loads(pickle.dumps(test_cube.cube))(x)
assert y.equal(torch.ops.test_cube.cube(x)) and y.tolist() == [8, -27]
(first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
assert first.tolist() == [12, 27]
(second,) = torch.autograd.grad(first.sum(), x)
assert second.tolist() == [12, -18]
print(test_cube.library_path())
"""


def test_a_users_op_in_torch(tmp_path: Path) -> None:
    project = cube_project(tmp_path / "a project, é")
    (elsewhere := tmp_path / "elsewhere").mkdir()
    assert output_of(LIGHT, elsewhere, project, fresh=True) == "set()\n"
    assert output_of(IN_TORCH, elsewhere, project).strip() == str(project / "build/libtest_cube.so")


LATE = """
import torch
from twinop import torch_op

ops = torch_op.load_domain("test_cube")
{late}
x = torch.tensor([2.0], requires_grad=True)
(first,) = torch.autograd.grad(ops.cube(x), x, create_graph=True)
print(*torch.autograd.grad(first, x))
"""


def test_a_package_by_its_domain(tmp_path: Path) -> None:
    """Its module, which `load_domain` imports, has the second derivative. An export names the package."""
    site = cube_package(tmp_path / "site")
    (elsewhere := tmp_path / "elsewhere").mkdir()
    code = LATE.format(late="assert ops.library.path.parent.name == 'test_cube'")
    code += "from twinop.export import exporter\nprint(exporter._packages(torch_op.records().values()))"
    told = "{'twinop.package.test_cube': 'test-cube==1.2'}"
    assert output_of(code, elsewhere, site) == f"tensor([12.])\n{told}\n"


def test_the_module_may_come_after_the_library(tmp_path: Path) -> None:
    project = cube_project(tmp_path)
    assert output_of(LATE.format(late="import test_cube"), project, project) == "tensor([12.])\n"


REBUILT = """
import shutil
import warnings

from twinop import torch_op
from twinop.errors import TwinopWarning

ops = torch_op.load("build/libtest_cube.so")
shutil.move("build/libtest_cube.so", "build/old.so")
shutil.copy("build/old.so", "build/libtest_cube.so")
for again in (
    lambda: torch_op.load("build/libtest_cube.so", "other"),
    lambda: torch_op.library_of(ops.records["cube"]),
):
    with warnings.catch_warnings(record=True) as caught:
        again()
    assert "libtest_cube.so was built again after this process loaded it, and torch" in str(caught[0].message)
"""


def test_a_library_that_is_built_again_under_a_process(tmp_path: Path) -> None:
    output_of(REBUILT, cube_project(tmp_path))


def test_a_script_has_the_domain_of_its_name(tmp_path: Path) -> None:
    script = tmp_path / "my_script.py"
    script.write_text("import twinop\n\n\n@twinop.op\ndef act(op, x):\n    return op.Relu(x)\n\n\nprint(act)")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert done.stdout == "<op my_script::act>\n", done.stderr
    done = run_python("import twinop\n@twinop.op\ndef act(op, x): ...", tmp_path)
    assert 'its domain is its module\'s name, and this module has none. Pass domain="my_ops"' in (done.stderr)


def test_names_of_the_package() -> None:
    assert Path(twinop.get_library_path()).name == "libcustom_ops.so"
    assert (Path(twinop.get_include()) / "twinop/elementwise.h").is_file()
    assert list(Path(twinop.get_cmake_dir()).glob("*.cmake"))
    assert {"op", "second_derivative", "library_beside", "libraries_for", "deploy"} <= set(dir(twinop))
    with pytest.raises(AttributeError, match="twinop has no attribute 'nothing'"):
        _ = twinop.nothing
    loads = "import sys, twinop; print({'torch', 'onnx', 'numpy', 'typer'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", loads], capture_output=True, text=True).stdout == "set()\n"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my-ops", "domain 'my-ops': expected a name of letters, digits and _, such as my_ops, or several"),
        ("", "domain '': expected a name"),
        ("lambda", "domain lambda: a keyword of Python"),
        ("custom_domain", "domain custom_domain: reserved for twinop's own ops. Choose another name"),
        ("aten", "domain aten: reserved for torch's own operators"),
        ("ai.onnx.ml", "domain ai.onnx.ml: reserved for ONNX's operators"),
        ("com.microsoft.nchwc", "domain com.microsoft.nchwc: reserved for ONNX Runtime's operators"),
    ],
)
def test_domains_that_cannot_be(name: str, message: str) -> None:
    with pytest.raises(TwinopError) as caught:
        names.check_domain(name)
    assert str(caught.value).startswith(message)
    with pytest.raises(TwinopError):
        twinop.op(domain=name)(lambda op, x: x)


def test_an_op_has_one_body(monkeypatch: pytest.MonkeyPatch) -> None:
    def act(op, x):
        return x

    first = twinop.op(domain="taken")(act)
    assert first.body is act and BODIES["taken::act"].build is act
    twinop.op(domain="taken")(act)  # as when its cell runs again

    def other(op, x):
        return x

    other.__name__ = "act"
    with pytest.raises(ExportError, match=r"op taken::act has a body already, from .*act; the second"):
        twinop.op(domain="taken")(other)
    monkeypatch.delitem(BODIES, "taken::act")


def test_a_library_that_is_not_built(tmp_path: Path) -> None:
    for file, places in (
        ("mish.py", [tmp_path, tmp_path / "build"]),
        ("mish/__init__.py", [tmp_path / "mish", tmp_path / "mish/build", tmp_path / "build"]),
    ):
        with pytest.raises(LibraryError) as caught:
            twinop.library_beside(tmp_path / file)()
        said = f"libmish.so not found; searched {', '.join(map(str, places))}. `twinop build --name mish` in "
        assert str(caught.value).startswith(f"{said}{tmp_path}")


def test_a_library_that_does_not_fit_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(find_library("test_cube"))
    for domain, said in (
        ("other", "has the domain test_cube, and own_one declares other::square. Build the library for"),
        ("test_cube", "has no op square, which own_one declares; it has: cube, cube_backward. Build it"),
    ):
        module = ModuleType("own_one")
        module.library_path = lambda: path  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "own_one", module)

        def square(op, x):
            return op.Mul(x, x)

        square.__module__ = "own_one"
        op = declare.Op(square, domain)
        with pytest.raises(LibraryError, match=said):
            op(1)


def test_a_second_derivative_of_other_arguments(tmp_path: Path) -> None:
    project = cube_project(tmp_path)
    text = (project / "test_cube.py").read_text()
    (project / "test_cube.py").write_text(text.replace("(grad_y, x):", "(grad_y, x, power):"))
    done = run_python(LATE.format(late="import test_cube"), project, project)
    assert "second derivative test_cube::cube_backward: the function takes power, expected" in done.stderr
