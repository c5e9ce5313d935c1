"""`twinop build` of a Python file and a header: what the library holds, where it runs, and errors."""

import os
import shutil
import statistics
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
import pytest
import torch
import warm_python
from build_files import tiny
from kernel_ops import mish_file

from twinop import torch_op
from twinop.building.builder import Built, build
from twinop.building.project import Options, find_project
from twinop.errors import BuildError, TwinopError
from twinop.export import export
from twinop.libraries.declare import load_module
from twinop.libraries.kernel_op import describe_source
from twinop.libraries.library import Library, needed_libraries
from twinop.testing.one_node import make_session, one_node_model

pytest.importorskip("triton", reason="kernels in Python need it")


@pytest.fixture(scope="session")  # as the module is imported once
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("built")


@pytest.fixture(scope="session")
def library(folder: Path) -> Library:
    """A library with ops of both kinds, built for two architectures without a GPU and without nvcc."""
    mish_file(folder, "built_mish")
    (folder / "times.h").write_text(tiny())
    patch = pytest.MonkeyPatch()
    patch.setenv("CUDACXX", "no-such-nvcc")
    patch.setenv("TWINOP_CACHE", str(folder / "cache"))
    built = again(folder)
    patch.undo()
    assert built.notes == []
    first, *compiled, last = built.compiled
    assert first == "tracing built_mish.py" and last == "linking libbuilt_mish.so"
    assert sorted(compiled) == ["compiling built_mish.generated.cpp", "compiling times.h"]
    return built.library


def again(folder: Path) -> Built:
    project = find_project([folder / "built_mish.py", folder / "times.h"])
    assert (project.name, project.domain) == ("built_mish", "built_mish")
    return build(project, folder / "build" / "libbuilt_mish.so", Options("80,90"))


def test_what_it_holds(library: Library, folder: Path) -> None:
    assert library.domain == "built_mish" and library.cuda_archs == "80-real,90-real,80-virtual"
    assert list(library.records) == ["built_mish", "times"] and library.exports_ort
    assert library.records["times"].devices == ("cpu",)
    record = library.records["built_mish"]
    assert record.onnx_name == "CustomBuiltMish" and record.devices == ("cpu", "cuda")
    assert record.dtypes == "float32; float16; bfloat16"
    assert library.source == describe_source([folder / "built_mish.py"])
    unwanted = ("python", "triton", "LLVM", "torch", "cudart", "libcuda.")
    assert not [name for name in needed_libraries(library.path) if any(each in name for each in unwanted)]
    assert library.path.stat().st_size < 1_000_000


def test_it_runs_in_torch_and_in_onnx_runtime(library: Library, folder: Path, tmp_path: Path) -> None:
    """On the CPU both run the body; the op in Python finds its library."""
    op: Any = load_module(folder / "built_mish.py").built_mish
    x = torch.linspace(-5, 5, 33).view(3, 11)
    expected = torch.nn.functional.mish(x)
    assert torch.equal(op(x), expected)
    assert torch_op.library_of(library.records["built_mish"]) == library.path
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        model = one_node_model(library.records["built_mish"], {"x": name, "y": name}, [1], {})
        session = make_session(model, library.path, "cpu")
        (found,) = session.run_with_ort_values(None, {"x": ort.OrtValue.from_dlpack(x.to(dtype))})
        torch.testing.assert_close(torch.from_dlpack(found), op(x.to(dtype)))
    times = torch_op.load(library.path).functions["times"]
    assert torch.equal(op(times(x)), torch.nn.functional.mish(2 * x))

    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return op(times(x))

    report = export(Net(), (x,), tmp_path / "net.onnx", dynamic={"x": [0]}, optimize=False)
    assert report.parity is not None and report.parity.error < 1e-6
    proto = onnx.load(tmp_path / "net.onnx")
    assert [each.name for each in proto.functions] == ["CustomBuiltMish"]
    assert [each.op_type for each in proto.graph.node] == ["CustomTimes", "CustomBuiltMish"]


def test_an_outdated_library_is_not_used(library: Library, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "build", tmp_path / "build")
    file = tmp_path / "built_mish.py"
    code = "import torch, built_mish; built_mish.built_mish(torch.ones(2)); from twinop import torch_op; "
    code += "print('built_mish::built_mish' in torch_op.records())"
    for text in ("", "# changed\n"):
        file.write_text((folder / "built_mish.py").read_text() + text)
        env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        done = warm_python.run(["-c", code], cwd=tmp_path, env=env)
        assert done.stdout == f"{not text}\n", done.stderr
        assert ("was built from another version of built_mish.py" in done.stderr) == bool(text)


def refused(tmp_path: Path, name: str, text: str, archs: str = "90", **more: Any) -> str:
    file = tmp_path / f"{name}.py"
    file.write_text(text)
    with pytest.raises(TwinopError) as raised:
        build(find_project([file], **more), options=Options(archs))
    return str(raised.value)


@pytest.mark.cuda
def test_without_its_python_file_the_gpu_is_tested(library: Library, tmp_path: Path) -> None:
    path = shutil.copy(library.path, tmp_path)
    done = warm_python.run(["-m", "twinop", "test", path], cwd=tmp_path)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr


def test_what_cannot_be_built(tmp_path: Path) -> None:
    mish = mish_file(tmp_path, "refused_mish").read_text()
    assert "--archs sm_90: expected native, all, or a" in refused(tmp_path, "refused_mish", mish, "sm_90")
    with pytest.raises(BuildError, match="--cpu: kernels in Python run on CUDA only"):
        build(find_project([tmp_path / "refused_mish.py"]), options=Options(cpu=True))
    said = refused(tmp_path, "refused_mish", mish, "90", domain="other")
    assert "refused_mish has the domain refused_mish, the library other" in said
    without = "\n".join(line for line in mish.splitlines() if "cdiv" not in line)
    without = without.replace("refused_mish", "no_kernel")
    assert "no_kernel launches no kernel" in refused(tmp_path, "no_kernel", without)
    assert "declares no op with kernels" in refused(tmp_path, "no_op", "import torch\n")
    said = refused(tmp_path, "nothing_declared", 'TEXT = """\n@twinop.triton_op(\n"""\n')
    assert "declares no op. Expected @twinop.triton_op" in said
    assert statistics.mean([1]) == 1  # imported
    said = refused(tmp_path, "statistics", mish)
    assert "another module has the name statistics" in said and "Rename the file" in said


def test_ops_of_one_name(tmp_path: Path) -> None:
    file = mish_file(tmp_path, "one_name")
    (tmp_path / "other.h").write_text(tiny("one_name"))
    with pytest.raises(BuildError, match=r"one_name.py:\d+: one_name is an op of other.h, too"):
        build(find_project([file, tmp_path / "other.h"]), options=Options("80"))
    second = mish_file(tmp_path / "second", "one_name").rename(tmp_path / "second.py")
    second.write_text(second.read_text().replace("body=", 'domain="one_name", body='))
    with pytest.raises(BuildError, match=r"second.py:\d+: one_name is an op of one_name.py:\d+, too"):
        build(find_project([file, second], "one_name"), options=Options("80"))
