"""Session.run on a GPU: zero copy, ordered against torch's streams, threads, CUDA graphs."""

import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from models import chain, make_model, model, node, value
from run_command import run_command

from twinop.deploy import FeedError, RunError, Session, session

pytestmark = pytest.mark.cuda

DTYPES = ["float32", "float16", "bfloat16", "float64"]
CUDA = ["CUDAExecutionProvider"]
BIG = 1 << 24  # elements: a kernel takes tens of microseconds, a chain of them long enough to overtake


def delay() -> None:
    """Keeps the current stream busy for some tens of milliseconds."""
    torch.cuda._sleep(100_000_000)


def relu(dtype: str = "float32", shape: Any = ("N", 4), **options: Any) -> Session:
    return session(make_model("CustomRelu", dtype, shape), CUDA, **options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_are_bound_in_place(dtype: str, bound: dict[str, int]) -> None:
    x = torch.randn(1000, 4, device="cuda").to(getattr(torch, dtype))
    opened = relu(dtype)  # runs once more when it ends
    y = opened.run({"x": x})["y"]
    assert y.device == x.device and torch.equal(y, torch.relu(x))
    assert bound == {"x": x.data_ptr(), "y": y.data_ptr()}


def test_no_memory_beside_the_tensors(gpu_alone: None) -> None:
    opened = relu(shape=("N",))
    x = torch.randn(1 << 28, device="cuda")  # 1 GiB
    opened.run({"x": x[:1024]})
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    y = opened.run({"x": x})["y"]
    torch.cuda.synchronize()
    used = before - torch.cuda.mem_get_info()[0]
    assert torch.equal(y, torch.relu(x)) and used < 1.25 * x.nbytes, "one output, no copy of the input"


def test_layouts_and_alignment() -> None:
    opened = relu(shape=None)
    base = torch.randn(65, 66, device="cuda")
    views = base.T, base[:, ::2], base[1:, 1:], base.view(-1)[1:], base[:0], base[0, 0], base[3].expand(4, 66)
    for x in views:
        before = x.clone()
        assert torch.equal(opened.run({"x": x})["y"], torch.relu(x)) and torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_feeds_from_the_host(dtype: str) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    array = np.random.default_rng(0).standard_normal((3, 4)).astype(kind)
    opened = relu(dtype)
    y = opened.run({"x": array})["y"]
    assert isinstance(y, np.ndarray) and y.dtype == kind
    np.testing.assert_array_equal(y, np.maximum(array, kind.type(0)))
    x = torch.randn(3, 4).to(getattr(torch, dtype))
    y = opened.run({"x": x})["y"]
    assert y.device.type == "cpu" and torch.equal(y, torch.relu(x))


def test_sizes_known_only_after_the_run() -> None:
    graph = model([node("NonZero", domain="")], [value("x")], [value("y", "int64", (2, "count"))])
    opened = session(graph, CUDA)
    x = torch.tensor([[0.0, 1, 0, 1]], device="cuda")
    first, second = opened.run({"x": x})["y"], opened.run({"x": 1 - x})["y"]
    assert first.tolist() == [[0, 0], [1, 3]] and second.tolist() == [[0, 0], [0, 2]]


@pytest.mark.parametrize("side", [False, True], ids=["default stream", "side stream"])
def test_a_run_waits_for_the_current_stream_and_the_current_stream_for_it(side: bool) -> None:
    opened = relu(shape=("N",))
    x = torch.full((BIG,), -1.0, device="cuda")
    opened.run({"x": x})
    torch.cuda.synchronize()
    for i in range(5):
        with torch.cuda.stream(torch.cuda.Stream() if side else torch.cuda.current_stream()):
            delay()
            x.fill_(i + 1)  # must come before the run
            y = opened.run({"x": x})["y"]
            x.fill_(-7)  # must come after it
            total = y.double().sum()
            assert total.item() == (i + 1) * BIG


def test_a_long_run_is_waited_for() -> None:
    """The work itself is long here: what follows must not overtake it, nor reuse its memory."""
    opened = session(chain("CustomRelu", 30, shape=("N",)), CUDA)
    for i in range(5):
        x = torch.full((BIG,), i + 1.0, device="cuda")
        y = opened.run({"x": x})["y"]
        address = x.data_ptr()
        del x
        over = [torch.full((BIG,), -9.0, device="cuda") for _ in range(8)]  # all that is free
        assert address in {tensor.data_ptr() for tensor in over}, "the session holds the input's memory"
        assert y.double().sum().item() == (i + 1) * BIG


def test_the_host_does_not_wait() -> None:
    opened = relu()
    x = torch.ones(2, 4, device="cuda")
    for _ in range(3):
        opened.run({"x": x})
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    start = time.perf_counter()
    y = opened.run({"x": x})["y"]
    elapsed = time.perf_counter() - start
    busy = not torch.cuda.current_stream().query()
    assert y.sum().item() == 8 and busy and elapsed < 0.3, "queued while the stream was still asleep"


def test_on_the_sessions_own_stream() -> None:
    opened = relu(shape=("N",))
    with torch.cuda.stream(opened.stream):
        delay()
        x = torch.full((BIG,), 3.0, device="cuda")
        assert opened.run({"x": x})["y"].double().sum().item() == 3 * BIG


def test_a_failed_run_leaves_the_streams_in_order() -> None:
    opened = session(make_model("CustomPadAffine", inputs=["x", "w"], shape=None), CUDA)
    x = torch.ones(2, 4, device="cuda")
    with pytest.raises(RunError, match=r"CustomPadAffine node 'node' \(CUDA\).*weight: float32\[3\]"):
        opened.run({"x": x, "w": x[0, :3].clone()})
    torch.testing.assert_close(opened.run({"x": x, "w": x[0]})["y"][:, :4], 0.1 * x)


def in_threads(count: int, work: Callable[[int], bool]) -> None:
    def one(number: int) -> bool:
        with torch.cuda.stream(torch.cuda.Stream()):
            return work(number)

    with ThreadPoolExecutor(count) as pool:
        assert all(pool.map(one, range(count)))


def checked(opened: Session, number: int, rounds: int = 30) -> bool:
    """Inputs made, run and read on this thread's own stream, with temporaries freed in between."""
    for i in range(rounds):
        x = torch.full((100_000 + number, 4), float(number - 8), device="cuda")
        y = opened.run({"x": x})["y"] + i
        del x
        if not bool((y == max(number - 8, 0) + i).all()):
            return False
    return True


def test_sixteen_threads_on_one_session() -> None:
    opened = session(chain("CustomRelu", 3), CUDA)
    in_threads(16, lambda number: checked(opened, number))


def test_sixteen_threads_with_outputs_of_unknown_shape() -> None:
    opened = relu(shape=None)
    in_threads(16, lambda number: checked(opened, number))


def test_cuda_graph_capture_and_replay() -> None:
    opened = session(chain("CustomRelu", 50), CUDA, enable_cuda_graph=True)
    kept = []
    for i in range(10):
        rows = 3 + i % 2  # two graphs
        x = torch.randn(rows, 4, device="cuda")
        delay()
        x += i
        kept.append((x.clone(), opened.run({"x": x})["y"]))
        x.fill_(-1)
    for x, y in kept:  # outputs are not overwritten by later replays
        assert torch.equal(y, torch.relu(x))
    assert opened._tensors._graphs is not None and len(opened._tensors._graphs) == 2


def test_cuda_graphs_other_feeds_and_too_many_shapes() -> None:
    opened = session(chain("CustomRelu", 3), CUDA, enable_cuda_graph=True)
    for rows in [*range(1, 25), *range(1, 25)]:
        x = torch.randn(rows, 4, device="cuda")
        assert torch.equal(opened.run({"x": x})["y"], torch.relu(x))
        assert torch.equal(opened.run({"x": x.cpu()})["y"], torch.relu(x.cpu()))
        np.testing.assert_array_equal(opened.run({"x": x.cpu().numpy()})["y"], torch.relu(x).cpu().numpy())


def test_cuda_graphs_from_several_threads() -> None:
    opened = session(chain("CustomRelu", 3), CUDA, enable_cuda_graph=True)
    x = torch.randn(5, 4, device="cuda")
    torch.cuda.synchronize()
    in_threads(4, lambda _: all(torch.equal(opened.run({"x": x})["y"], torch.relu(x)) for _ in range(20)))


def test_pinned_memory_of_queued_runs_is_freed_before_the_session(tmp_path: Path) -> None:
    """Concat and Split leave pinned memory to the end of a run, and CUDA refuses to free it in a callback."""
    nodes = [
        node("Concat", ["x"] * 40, ["many"], "concat", "", axis=0),
        node("Split", ["many", "sizes"], ["one", "three"], "split", "", axis=1),
        node("CustomRelu", ["three"]),
    ]
    path, sizes = str(tmp_path / "model.onnx"), {"sizes": np.array([1, 3])}
    onnx.save(model(nodes, [value("x")], [value("y", shape=("M", 3))], initializers=sizes), path)
    program = f"""
import torch
from twinop.deploy import session
opened = session({path!r}, {CUDA})
x = torch.randn(3, 4, device="cuda")
for _ in range(250):
    y = opened.run({{"x": x}})["y"]
assert torch.equal(y, torch.relu(x[:, 1:]).repeat(40, 1))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("op_type, buffers", [("CustomRelu", 1), ("CustomPadAffine", 2)])
def test_a_chain_runs_in_place(op_type: str, buffers: int, gpu_alone: None) -> None:
    """x -> t1 -> t2 -> y: relu's record lets t2 take t1's memory; pad_affine's does not, so there are two."""
    graph = chain(op_type, 3, shape=(1 << 26,))  # 256 MiB
    if op_type == "CustomPadAffine":
        for each in graph.graph.node:
            each.attribute.append(make_model("CustomPadAffine", pads=[0, 0]).graph.node[0].attribute[0])
    provider = ("CUDAExecutionProvider", {"arena_extend_strategy": "kSameAsRequested"})
    opened = session(graph, [provider])
    x = torch.randn(1 << 26, device="cuda")
    y = torch.empty_like(x)
    del y  # stays in torch's cache for the output
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    opened.run({"x": x})
    torch.cuda.synchronize()
    used = (before - torch.cuda.mem_get_info()[0]) / x.nbytes
    assert buffers - 0.1 < used < buffers + 0.5, used


def test_a_gpu_tensor_for_a_cpu_session() -> None:
    opened = session(make_model("CustomRelu"), ["CPUExecutionProvider"])
    with pytest.raises(FeedError, match=r"x is on cuda:0, this session runs on cpu \(asked for\): move it"):
        opened.run({"x": torch.ones(2, 4, device="cuda")})


def test_mixed_devices() -> None:
    opened = session(make_model("CustomPadAffine", inputs=["x", "w"], shape=(4,)), CUDA)
    with pytest.raises(FeedError, match="x on cuda:0, w on cpu. Move them to one"):
        opened.run({"x": torch.ones(4, device="cuda"), "w": torch.ones(4)})


def test_the_second_gpu(two_gpus: None) -> None:
    opened = session(make_model("CustomRelu"), [("CUDAExecutionProvider", {"device_id": 1})])
    x = torch.randn(1000, 4, device="cuda:1")
    for _ in range(3):
        y = opened.run({"x": x})["y"]
        assert torch.cuda.current_device() == 0, "the caller's device is left alone"
    assert y.device == x.device and torch.equal(y, torch.relu(x)) and opened.device == "cuda:1"
    with pytest.raises(FeedError, match="x is on cuda:0, this session runs on cuda:1"):
        opened.run({"x": x.to("cuda:0")})


def test_run_onnx_on_cuda(tmp_path: Path) -> None:
    for dtype in DTYPES:
        result = run_command(
            make_model("CustomRelu", dtype), tmp_path, "--provider", "cuda", "--shape", "x=1000,4"
        )
        assert result.exit_code == 0, result.output
        assert any("y" in line and "CUDA" in line and "yes" in line for line in result.output.splitlines())
