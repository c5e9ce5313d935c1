"""Tests the features of the C interface that no op of twinop uses, and what the adapters do on the host.

tests/ops/abi_ops.h and host.h have the ops.
"""

from pathlib import Path

import numpy as np
import onnx
import pytest
from abi_files import CPU, FLOAT, INT8, INT32, INT64, X, in_torch, model
from onnx import TensorProto, helper

from twinop import deploy
from twinop.libraries.library import find_library

FACTORS = np.array([2, 3], np.int64)


@pytest.fixture(scope="module")
def abi() -> Path:
    return find_library("test_abi")


CUDA = pytest.param(["CUDAExecutionProvider"], marks=pytest.mark.cuda)
on_each_device = pytest.mark.parametrize("providers", [CPU, CUDA], ids=["cpu", "cuda"])


@on_each_device
@pytest.mark.parametrize("constant", [True, False])
def test_state_sees_constant_inputs(constant: bool, providers: list[str], abi: Path) -> None:
    weight = np.array([1, 2, 3], np.float32)
    node = helper.make_node("CustomPacked", ["x", "w"], ["y", "p"], "packed", domain="test.abi", n=2)
    inputs = {"x": FLOAT} | ({} if constant else {"w": FLOAT})
    graph = model([node], inputs, {"y": FLOAT, "p": INT64}, {"w": weight} if constant else {}, test__abi=2)
    opened = deploy.session(graph, providers, abi)
    for _ in range(2):
        found = opened.run({"x": X} if constant else {"x": X, "w": weight})
        np.testing.assert_array_equal(found["y"], 2 * weight * X)
        assert found["p"].tolist() == [int(constant)]


def test_a_state_that_cannot_be_made(abi: Path) -> None:
    node = helper.make_node("CustomPacked", ["x", "w"], ["y", "p"], "packed", domain="test.abi", n=13)
    graph = model([node], {"x": FLOAT, "w": FLOAT}, {"y": FLOAT, "p": INT64}, test__abi=2)
    with pytest.raises(deploy.RunError, match=r"node 'packed' \(CPU\): creating its state failed: n is 13"):
        deploy.session(graph, CPU, abi)


@on_each_device
def test_eight_outputs_and_int8(providers: list[str], abi: Path) -> None:
    names = list("abcdefgh")
    node = helper.make_node("CustomSpread", ["x"], names, domain="test.abi")
    graph = model([node], {"x": INT8}, dict.fromkeys(names, INT8), test__abi=2)
    found = deploy.session(graph, providers, abi).run({"x": np.array([-1, 5], np.int8)})
    assert [found[name].tolist() for name in names] == [[k - 1, k + 5] for k in range(8)]


@on_each_device
@pytest.mark.parametrize("index_type", [INT64, INT32])
@pytest.mark.parametrize("x_type", [FLOAT, TensorProto.FLOAT16, INT8, INT32, INT64, TensorProto.BOOL])
def test_integers_and_bools(x_type: int, index_type: int, providers: list[str], abi: Path) -> None:
    node = helper.make_node("CustomTake", ["x", "index", "keep"], ["y", "valid"], domain="test.abi")
    inputs = {"x": x_type, "index": index_type, "keep": TensorProto.BOOL}
    graph = model([node], inputs, {"y": x_type, "valid": TensorProto.BOOL}, test__abi=2)
    x = np.array([3, 0, 1]).astype(helper.tensor_dtype_to_np_dtype(x_type))
    index = np.array([2, 0, 1, 5, -1]).astype(helper.tensor_dtype_to_np_dtype(index_type))
    keep = np.array([True, True, False, True, True])
    found = deploy.session(graph, providers, abi).run({"x": x, "index": index, "keep": keep})
    assert found["valid"].tolist() == [True, True, False, False, False]
    np.testing.assert_array_equal(found["y"], np.array([x[2], x[0], 0, 0, 0], x.dtype))
    assert found["y"].dtype == x.dtype


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
    runs = opened.executed_on(custom_only=False)
    assert not [run for run in runs if "Memcpy" in run.op_type and "factors" in run.node]
    code = (
        "scale_by = torch_op.load(sys.argv[1]).scale_by\n"
        "x, factors = torch.ones(3, device='cuda'), torch.tensor([2, 3])\n"
        "print(scale_by(x, factors).tolist())\n"
        "try:\n    scale_by(x, factors.cuda())\nexcept RuntimeError as error:\n    print(error)\n"
    )
    value, refused = in_torch(code, abi).splitlines()
    assert value == "[5.0, 5.0, 5.0]"
    assert "factors is on cuda:0; the op reads it on the host: move it there with .cpu()" in refused


KINDS = {
    "error": "an error of one piece",
    "text": "a text",
    "number": "an exception that is not a std::exception",
    "memory": "bad_alloc",
    "raw": "an error of one piece",
}

STATES = """
import resource, threading
counted = torch_op.load(sys.argv[1]).counted
x = torch.ones(2)

# Each combination of attributes has its own, every time.
calls = [{}, {"seed": 1}, {"scale": 2.0}, {"scale": -0.0}, {"scale": 0.0}, {"scale": float("nan")},
         {"mode": "b"}, {"mode": "ab"}, {"mode": ""}, {"axes": []}, {"axes": [1]}, {"axes": [0, 0]},
         {"axes": [-(2**63)]}]
states = [counted(x, **call)[2].item() for call in calls]
assert len(set(states)) == len(calls)
for _ in range(3):
    assert [counted(x, **call)[2].item() for call in calls] == states
assert counted(x)[1].item() == len(calls)

# 10,000 values.
memory = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = None
for seed in range(10_000):
    alive, made, _ = counted(x, seed, 0.5, str(seed), [seed]).tolist()
    assert alive <= 64, alive
    before = before or seed == 1000 and memory()
assert made == len(calls) + 10_000 and memory() - before < 2048, memory() - before

# What is used all the time stays.
kept = counted(x, -1)[2].item()
for seed in range(1000):
    counted(x, seed)
    assert counted(x, -1)[2].item() == kept

def work(k):
    for i in range(1000):
        counted(x, (i * (k + 1)) % 150)
threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
[t.start() for t in threads], [t.join() for t in threads]
assert counted(x)[0].item() <= 64
"""


def test_torch_keeps_the_states_of_the_last_calls() -> None:
    """Not one for each value that an attribute ever had, such as a seed of each step."""
    in_torch(STATES, find_library("test_host"))


THROWING = """
import onnxruntime
from pathlib import Path
throwing = torch_op.load(sys.argv[1]).throwing
x = torch.arange(100_000.0)
torch.set_num_threads(2)

def in_ort(kind):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 2, 4
    options.register_custom_ops_library(sys.argv[1])
    onnxruntime.InferenceSession(f"{sys.argv[2]}/{kind}.onnx", options).run(None, {"x": x.numpy()})

for path in sorted(Path(sys.argv[2]).iterdir()):
    for run in (throwing, lambda _, kind: in_ort(kind)):
        for part in (x, x[:8]):
            try:
                run(part, path.stem)
            except Exception as error:
                print(path.stem, "|", str(error).replace(chr(10), " "))
            else:
                print(path.stem, "| nothing")
assert torch.equal(throwing(x), x)
"""


def test_what_pieces_of_the_work_throw_becomes_an_error(tmp_path: Path) -> None:
    """On the threads of both runtimes, and on the caller's, whatever is thrown."""
    for kind in KINDS:
        node = helper.make_node("CustomThrowing", ["x"], ["y"], "node", domain="test.host", what=kind)
        onnx.save(model([node], {"x": FLOAT}, {"y": FLOAT}, test__host=1), tmp_path / f"{kind}.onnx")
    lines = in_torch(THROWING, find_library("test_host"), tmp_path).splitlines()
    assert len(lines) == 4 * len(KINDS)
    for line in lines:
        kind, said = line.split(" | ")
        assert KINDS[kind] in said, line
    in_ort = [line for i, line in enumerate(lines) if i % 4 >= 2]
    assert all("node 'node' (CPU): test.host::throwing(x: float32[100000])" in s for s in in_ort)
