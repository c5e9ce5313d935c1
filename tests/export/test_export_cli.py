"""Tests `python export/to_onnx.py` and `twinop export`: the default, every option, errors as one message."""

import os
import subprocess
import sys
from pathlib import Path

import onnx
import op_bodies  # noqa: F401 (the test ops)
import pytest
import warm_python
from onnx import TensorProto
from typer.testing import CliRunner, Result

from twinop.cli import app
from twinop.libraries.library import find_library

ROOT = Path(__file__).resolve().parents[2]
QUICK = ("--exporter", "torchscript")  # where the exporter does not matter

FACTORIES = """
import torch
from twinop import torch_op
import helper_of_mine

def mlp():
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch_op.CustomReLU()), (torch.randn(2, 4),)

class Two(torch.nn.Module):
    def forward(self, images, mask):
        return torch_op.relu(images) * mask

def by_name():
    return Two(), {"mask": torch.ones(2, 5), "images": torch.randn(2, 5)}


def affine():
    class Affine(torch.nn.Module):
        def forward(self, x):
            return torch_op.pad_affine(x, sign="minus", pads=[1, 1])
    return Affine(), (torch.randn(2, 3),)


def integers():
    return torch_op.CustomReLU(), (torch.arange(3),)

def only_module():
    return torch_op.CustomReLU()

def swapped():
    return (torch.randn(3),), torch_op.CustomReLU()

def broken():
    raise RuntimeError("no weights here")

class Bad(Two):
    def example_inputs(self):
        raise ValueError("no examples")

class Needs(torch.nn.Module):
    def __init__(self, width):
        super().__init__()

not_callable = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes an empty current folder with a package of factories."""
    package = tmp_path / "my_factories"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "models.py").write_text(FACTORIES)
    (package / "wrong_import.py").write_text("import package_that_is_not_there")
    (package / "wrong_code.py").write_text("1 / 0")
    (tmp_path / "helper_of_mine.py").write_text("")
    monkeypatch.chdir(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] in ("my_factories", "helper_of_mine")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["export", *arguments], env={"COLUMNS": "200"})


def succeed(*arguments: str) -> str:
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


def node_types(path: str) -> list[str]:
    return [node.op_type for node in onnx.load(path).graph.node]


def python(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    env = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"} | environment
    return warm_python.run(arguments, env=env)


def test_the_script_runs_from_anywhere(folder: Path) -> None:
    """Without PYTHONPATH, from another folder; nothing but the table is printed."""
    done = python(str(ROOT / "export" / "to_onnx.py"), PYTHONPATH="")
    said = [line for line in done.stderr.splitlines() if ": memory " not in line]  # of a step that takes long
    assert done.returncode == 0 and said == [], done.stderr
    assert len(done.stdout.splitlines()) < 15
    table = ("CustomRelu x 1", "ai.onnx 20, custom_domain 1", "bytes", "bit for bit", "yes")
    assert all(text in done.stdout for text in table), done.stdout
    model = onnx.load("custom_relu.onnx")
    assert [node.op_type for node in model.graph.node] == ["CustomRelu"]
    (x,) = model.graph.input
    assert x.type.tensor_type.elem_type == TensorProto.FLOAT
    assert x.type.tensor_type.shape.dim[0].dim_param == "batch"


def test_options_for_the_example(folder: Path) -> None:
    options = "--dtype float16 --dynamic x:0=rows,1=columns --opset 22 --exporter torchscript -o half.onnx"
    output = succeed(*options.split())
    assert "half.onnx" in output and "ai.onnx 22" in output and "float16 [rows,columns]" in output
    succeed("--dynamic", "none", "-o", "fixed.onnx", "--no-bodies", *QUICK)
    model = onnx.load("fixed.onnx")
    assert [d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim] == [8, 1024]
    assert not model.functions


def test_models_of_ones_own(folder: Path) -> None:
    mlp = ("--model", "my_factories.models:mlp", "-o", "mlp.onnx")
    output = succeed(*mlp, "--dynamic", "input:0", "--device", "cuda")
    assert "libcustom" in output and node_types("mlp.onnx") == ["CustomLinear"]
    assert "2 nodes -> 1; same outputs" in output and "1 linear+bias+relu" in output
    for plain in ("--no-optimize", "--no-bodies"):
        assert "optimised" not in succeed(*mlp, plain, *QUICK)
        assert node_types("mlp.onnx") == ["Gemm", "CustomRelu"]
    assert "optimised for cuda; --device cpu optimises it for cpu" in output
    output = succeed(*mlp, "--device", "cpu", *QUICK)  # nothing is recognised
    assert "optimised for cpu; --device cuda optimises it for cuda" in output.splitlines()[-2]
    assert node_types("mlp.onnx") == ["Gemm", "CustomRelu"]  # ONNX Runtime's products are the fastest there
    output = succeed(
        *("--model", "my_factories.models:by_name", "-o", "two.onnx", *QUICK),
        *("--dynamic", "images:0=rows", "--dynamic", "mask:0=rows"),
    )
    assert "images: float [rows,5]" in output and "mask: float [rows,5]" in output
    output = succeed("--model", "my_factories.models:mlp", "--dtype", "float64", "-o", "double.onnx", *QUICK)
    assert "double [2,4]" in output

    assert "libtest_ops.so" in succeed("--model", "my_factories.models:affine", "-o", "affine.onnx", *QUICK)


def test_what_needs_saying_is_in_the_table(folder: Path) -> None:
    assert "not compared: --no-verify" in succeed("--no-verify", *QUICK)
    output = succeed("--no-bodies", *QUICK)
    assert "without the library" in output
    assert "no function body: CustomRelu" in output
    (folder / "plain.py").write_text("import torch\ndef f(): return torch.nn.ReLU(), torch.randn(3)")
    assert "none: the model needs no library" in succeed("--model", "plain:f", "-o", "plain.onnx", *QUICK)


NET = """
import torch
from twinop import torch_op
import weights

class Net(torch.nn.Module):
    def forward(self, x):
        return torch_op.relu(x) * weights.FACTOR

    def example_inputs(self):
        return {"x": torch.randn(2, 3)}

class Twice(Net):
    @staticmethod
    def example_inputs():
        return torch.randn(4)

plain = Twice()
"""


def test_a_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules beside the file can be imported, and its name may be that of another module."""
    (elsewhere := folder / "some where").mkdir()
    (elsewhere / "weights.py").write_text("FACTOR = 2")
    for name in ("my-net.py", "typing.py"):
        (elsewhere / name).write_text(NET)
    assert "some where" not in succeed("some where/my-net.py:Net", *QUICK)
    assert node_types("net.onnx") == ["CustomRelu", "Constant", "Mul"]
    succeed("some where/typing.py:Twice", "-o", "twice.onnx", *QUICK)
    succeed("some where/typing.py:plain", *QUICK)
    assert sys.modules["typing"].__file__ != str(elsewhere / "typing.py")
    for name in ("my_net", "typing_of_twinop_export", "weights"):
        monkeypatch.delitem(sys.modules, name)


def test_libraries_are_loaded_into_torch(folder: Path) -> None:
    (folder / "cubes.py").write_text(
        "import torch\n\nclass Cubes(torch.nn.Module):\n"
        "    def forward(self, x):\n        return torch.ops.test_cube.cube(x)\n"
        "    def example_inputs(self):\n        return torch.randn(3)\n"
    )
    paths = [str(find_library(name)) for name in ("test_cube", "custom_relu")]
    given = ("cubes.py:Cubes", "--library", paths[0], "--library", paths[1], *QUICK)
    done = python("-m", "twinop", "export", *given)
    assert done.returncode == 0, done.stderr
    assert "libtest_cube.so" in done.stdout and "no function body: CustomCube" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "none/m.onnx"], "none/m.onnx: cannot be written"),
        (["--opset", "19"], "opset 19 is not supported; expected 20 to 25"),
        (["--dtype", "float8"], "dtype float8 is not known; expected one of: float32, float16"),
        (["--dtype", "int64"], "dtype int64 is not a floating type; expected one of: float32"),
        (["--exporter", "onnx"], "exporter 'onnx' is not known; expected one of: dynamo, torchscript"),
        (["--dynamic", "y:0"], "--dynamic y: the model has no input y; its inputs are: x"),
        (["--dynamic", "x:7"], "--dynamic x: input x has no axis 7; its example has shape (8, 1024)"),
        (["--dynamic", "x"], "--dynamic x: expected INPUT:AXIS,AXIS"),
        (["--dynamic", "x:first"], "--dynamic x:first: expected INPUT:AXIS,AXIS"),
        (["--dynamic", ":0"], "--dynamic :0: expected INPUT:AXIS,AXIS"),
        (["--library", "none.so", *QUICK], "none.so: no such file"),
        (["--model", "my_factories"], "--model my_factories: expected file.py:name or package.module:name"),
        (["--model", "my_factories.none:f"], "no module my_factories.none; searched the current folder"),
        (["--model", "none_at_all:f"], "no module none_at_all; searched the current folder"),
        (["--model", "my_factories.wrong_import:f"], "No module named 'package_that_is_not_there' ("),
        (["--model", "my_factories.wrong_code:f"], "importing my_factories.wrong_code failed: Zero"),
        (["--model", "my_factories.models:f"], "my_factories.models has no f; it has: mlp, Two, by_name"),
        (["--model", "my_factories.models:not_callable"], "not_callable is int; expected a function that"),
        (["--model", "my_factories.models:broken"], "broken() failed: RuntimeError: no weights here ("),
        (["--model", "my_factories.models:only_module"], "returned CustomReLU; expected (torch.nn.Module"),
        (["--model", "my_factories.models:swapped"], "swapped() returned (tuple, CustomReLU); expected"),
        (["--model", "my_factories.models:integers"], "fails on its example inputs, in torch:"),
        (["--model", "my_factories.models:Two"], "Module class Two has no method example_inputs(). Expected"),
        (["my_factories.models:Bad"], "Bad.example_inputs() failed: ValueError: no examples ("),
        (["my_factories.models:Needs"], "MODEL my_factories.models:Needs: Needs() failed: TypeError:"),
        (["my_factories/none.py:f"], "MODEL my_factories/none.py:f: no such file: "),
        (["my_factories/models.py:"], "MODEL my_factories/models.py:: expected file.py:name or"),
        (["helper_of_mine.py:f"], "helper_of_mine.py has no f; it has: none"),
        (["my_factories/wrong_code.py:f"], "importing wrong_code.py failed: ZeroDivisionError:"),
        (["helper_of_mine.py:x:"], "MODEL helper_of_mine.py:x:: expected file.py:name or"),
        (["helper_of_mine.py:f", "-o", "helper_of_mine.py"], "helper_of_mine.py: belongs to the input"),
        (["a.py:f", "--model", "b:f"], "MODEL a.py:f and --model b:f: give one of them"),
    ],
)  # fmt: skip
def test_errors_are_one_message(arguments: list[str], message: str, folder: Path) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ") and message in result.stderr
    assert "Traceback" not in result.output and len(result.stderr.splitlines()) <= 2
    assert not list(folder.glob("*.onnx"))


def test_importing_a_second_copy_is_refused() -> None:
    for name in ("export.bodies", "torch_op"):
        done, package = python("-c", f"import {name}"), name.removesuffix(".bodies")
        assert done.returncode == 1
        assert f"ImportError: import twinop.{package}, not {package}: a second copy" in done.stderr


def test_the_list_of_ops() -> None:
    for line, texts in (
        (["ops"], ("CustomRelu", "torch only", "relu(Tensor x) -> Tensor", "bfloat16")),
        (["ops", str(find_library("test_ops"))], ("CustomPadAffine", 'str sign="plus"')),
    ):
        result = CliRunner().invoke(app, line, env={"COLUMNS": "200"})
        assert result.exit_code == 0 and all(text in result.output for text in texts)
    result = CliRunner().invoke(app, ["ops", "none.so"])
    assert result.exit_code == 1 and "none.so: no such file" in result.stderr
