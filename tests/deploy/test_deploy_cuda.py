"""Session.run on a GPU: zero copy, ordered against torch's streams, threads, CUDA graphs."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from models import chain, make_model, model, node, value

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


def test_a_gpu_tensor_for_a_cpu_session() -> None:
    opened = session(make_model("CustomRelu"), ["CPUExecutionProvider"])
    with pytest.raises(FeedError, match=r"x is on cuda:0, this session runs on cpu \(asked for\): move it"):
        opened.run({"x": torch.ones(2, 4, device="cuda")})


def test_the_second_gpu(two_gpus: None) -> None:
    opened = session(make_model("CustomRelu"), [("CUDAExecutionProvider", {"device_id": 1})])
    x = torch.randn(1000, 4, device="cuda:1")
    for _ in range(3):
        y = opened.run({"x": x})["y"]
        assert torch.cuda.current_device() == 0, "the caller's device is left alone"
    assert y.device == x.device and torch.equal(y, torch.relu(x)) and opened.device == "cuda:1"
    with pytest.raises(FeedError, match="x is on cuda:0, this session runs on cuda:1"):
        opened.run({"x": x.to("cuda:0")})
