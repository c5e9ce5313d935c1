"""`twinop build mish.py mish.h`: one library with ops of both kinds."""

import shutil
import sys
from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest
import torch
from build_files import tiny
from kernel_ops import mish_file
from onnx import TensorProto, helper

from twinop import torch_op
from twinop.building.builder import Built, build
from twinop.building.options import Options
from twinop.building.project import find_project
from twinop.errors import BuildError
from twinop.libraries.library import read_library
from twinop.libraries.load_module import load_module

pytest.importorskip("triton", reason="kernels in Python need it")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TWINOP_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, cache: Any) -> Built:
    folder = tmp_path_factory.mktemp("mixed")
    file = mish_file(folder, "mixed_mish")
    (folder / "times.h").write_text(tiny())
    project = find_project([file, folder / "times.h"])
    assert (project.name, project.domain) == ("mixed_mish", "mixed_mish")
    return build(project, folder / "build/libmixed_mish.so", Options("80"))


def test_the_records_are_those_of_both(built: Built) -> None:
    library = built.library
    assert list(library.records) == ["mixed_mish", "times"] and library.domain == "mixed_mish"
    assert library.records["mixed_mish"].devices == ("cpu", "cuda")
    assert library.records["times"].devices == ("cpu",)
    assert library.cuda_archs == "80-real,80-virtual" and library.exports_ort and library.source
    first, *compiled, last = built.compiled
    assert first == "tracing mixed_mish.py" and last == "linking libmixed_mish.so"
    assert sorted(compiled) == ["compiling mixed_mish.generated.cpp", "compiling times.h"]


def test_both_run_in_torch_and_in_onnx_runtime(built: Built) -> None:
    path = built.library.path
    module: Any = load_module(path.parents[1] / "mixed_mish.py")
    x = torch.linspace(-5, 5, 33)
    expected = torch.nn.functional.mish(2 * x)
    times = torch_op.load(path).functions["times"]
    assert torch.equal(module.mixed_mish(times(x)), expected)
    assert torch_op.library_of(built.library.records["mixed_mish"]) == path

    names = ["x", "twice", "y"]
    nodes = [
        helper.make_node(kind, [source], [target], domain="mixed_mish")
        for kind, source, target in zip(("CustomTimes", "CustomMixedMish"), names, names[1:], strict=False)
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:])
    opsets = [helper.make_opsetid("mixed_mish", 1), helper.make_opsetid("", 18)]
    options = ort.SessionOptions()
    options.register_custom_ops_library(str(path))
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    session = ort.InferenceSession(model, options, ["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), expected)


def test_what_did_not_change_is_not_compiled_again(
    built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a process that imported a module whose file is gone."""
    (gone := tmp_path / "gone_module.py").touch()
    monkeypatch.setitem(sys.modules, "gone_module", load_module(gone))
    gone.unlink()
    path = built.library.path
    project = find_project([path.parents[1] / "mixed_mish.py", path.parents[1] / "times.h"])
    assert build(project, tmp_path / "libmixed_mish.so", Options("80")).compiled
    assert build(project, tmp_path / "libmixed_mish.so", Options("80")).compiled == []


def test_ops_of_one_name(tmp_path: Path) -> None:
    file = mish_file(tmp_path, "one_name")
    (tmp_path / "other.h").write_text(tiny("one_name"))
    with pytest.raises(
        BuildError, match=r"one_name.py:\d+: one_name is an op of other.h, too. Ops of one library have diff"
    ):
        build(find_project([file, tmp_path / "other.h"]), options=Options("80"))
    second = mish_file(tmp_path / "second", "one_name").rename(tmp_path / "second.py")
    second.write_text(second.read_text().replace("body=", 'domain="one_name", body='))
    with pytest.raises(BuildError, match=r"second.py:\d+: one_name is an op of one_name.py:\d+, too"):
        build(find_project([file, second], "one_name"), options=Options("80"))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_kernels_of_nvcc_and_of_triton(tmp_path: Path) -> None:
    file = mish_file(tmp_path, "with_cube")
    cube = Path(__file__).parents[1] / "ops/cube.h"
    library = build(find_project([file, cube]), tmp_path / "libwith_cube.so", Options("80,90")).library
    devices = {name: record.devices for name, record in read_library(library.path).records.items()}
    both = ("cpu", "cuda")
    assert devices["cube"] == devices["cube_backward"] == devices["with_cube"] == both
    assert library.cuda_version and library.cuda_archs == "80-real,90-real,80-virtual"
    x = torch.linspace(-5, 5, 33)
    torch.testing.assert_close(torch_op.load(library.path).functions["cube"](x), x**3)
