"""Tests the features of the C interface that no op of twinop uses. tests/ops/abi_ops.h has the ops."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from abi_files import CPU, FLOAT, INT8, INT32, INT64, X, in_torch, model
from onnx import helper

from twinop import deploy
from twinop.library import find_library

FACTORS = np.array([2, 3], np.int64)


@pytest.fixture(scope="module")
def abi() -> Path:
    return find_library("test_abi")


@pytest.mark.parametrize("constant", [True, False])
def test_state_sees_constant_inputs(constant: bool, abi: Path) -> None:
    weight = np.array([1, 2, 3], np.float32)
    node = helper.make_node("CustomPacked", ["x", "w"], ["y", "p"], "packed", domain="test.abi", n=2)
    inputs = {"x": FLOAT} | ({} if constant else {"w": FLOAT})
    graph = model([node], inputs, {"y": FLOAT, "p": INT64}, {"w": weight} if constant else {}, test__abi=2)
    opened = deploy.session(graph, CPU, abi)
    for _ in range(2):
        found = opened.run({"x": X} if constant else {"x": X, "w": weight})
        np.testing.assert_array_equal(found["y"], 2 * weight * X)
        assert found["p"].tolist() == [int(constant)]


def test_a_state_that_cannot_be_made(abi: Path) -> None:
    node = helper.make_node("CustomPacked", ["x", "w"], ["y", "p"], "packed", domain="test.abi", n=13)
    graph = model([node], {"x": FLOAT, "w": FLOAT}, {"y": FLOAT, "p": INT64}, test__abi=2)
    with pytest.raises(
        deploy.RunError, match=r"CustomPacked node 'packed' \(CPU\): creating its state failed: n is 13"
    ):
        deploy.session(graph, CPU, abi)


@pytest.mark.parametrize("count", [1, 3, 40])
def test_a_repeated_input(count: int, abi: Path) -> None:
    names = [f"x{k}" for k in range(count)]
    node = helper.make_node("CustomTotal", names, ["y"], domain="test.abi")
    graph = model([node], dict.fromkeys(names, INT32), {"y": INT32}, test__abi=2)
    feeds = {name: np.array([k, 1], np.int32) for k, name in enumerate(names)}
    found = deploy.session(graph, CPU, abi).run(feeds)
    assert found["y"].tolist() == [count * (count - 1) // 2, count]


def test_eight_outputs_and_int8(abi: Path) -> None:
    names = list("abcdefgh")
    node = helper.make_node("CustomSpread", ["x"], names, domain="test.abi")
    graph = model([node], {"x": INT8}, dict.fromkeys(names, INT8), test__abi=2)
    found = deploy.session(graph, CPU, abi).run({"x": np.array([-1, 5], np.int8)})
    assert [found[name].tolist() for name in names] == [[k - 1, k + 5] for k in range(8)]


def scale_model() -> onnx.ModelProto:
    node = helper.make_node("CustomScaleBy", ["x", "factors"], ["z"], "scale", domain="test.abi")
    return model([node], {"x": FLOAT, "factors": INT64}, {"z": FLOAT}, test__abi=2)


def test_an_input_in_host_memory(abi: Path) -> None:
    found = deploy.session(scale_model(), CPU, abi).run({"x": X, "factors": FACTORS})
    np.testing.assert_array_equal(found["z"], 5 * X)


@pytest.mark.cuda
def test_an_input_in_host_memory_on_cuda(abi: Path) -> None:
    """No Memcpy node in ONNX Runtime, and torch takes a CPU tensor beside a CUDA one."""
    opened = deploy.session(scale_model(), ["CUDAExecutionProvider"], abi, profile=True)
    np.testing.assert_array_equal(opened.run({"x": X, "factors": FACTORS})["z"], 5 * X)
    assert not [
        run
        for run in opened.executed_on(custom_only=False)
        if "Memcpy" in run.op_type and "factors" in run.node
    ]
    code = (
        "scale_by = torch_op.load(sys.argv[1]).scale_by\n"
        "x, factors = torch.ones(3, device='cuda'), torch.tensor([2, 3])\n"
        "print(scale_by(x, factors).tolist())\n"
        "try:\n    scale_by(x, factors.cuda())\nexcept RuntimeError as error:\n    print(error)\n"
    )
    value, refused = in_torch(code, abi).splitlines()
    assert value == "[5.0, 5.0, 5.0]"
    assert "factors is on cuda:0; the op reads it on the host: move it there with .cpu()" in refused
