"""linear on a GPU: alignment, determinism, streams, graphs, TF32, and which cuBLASLt it uses."""

import itertools
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from linear_calls import ACTIVATIONS, linear_node, model_of, random
from torch.nn import functional as F

from twinop import torch_op
from twinop.libraries.library import find_library
from twinop.testing.one_node import make_session, run_bound

pytestmark = pytest.mark.cuda
ROOT = Path(__file__).resolve().parents[2]
LIBRARY = find_library("custom_ops")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 1, 1), (3, 5, 7), (129, 130, 131), (64, 768, 3072), (2048, 8, 9)]
)
def test_sizes_of_any_alignment(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    """cuBLASLt's algorithms need rows of some alignment; those that do not have it are computed too."""
    bound = 1e-10 if dtype == torch.float64 else 3 * torch.finfo(dtype).eps
    for layout, activation, residual in itertools.product(("nk", "kn"), ACTIVATIONS, (False, True)):
        shapes = [(m, k), (n, k) if layout == "nk" else (k, n), (n,), *([(m, n)] if residual else [])]
        tensors = [random(*shape, dtype=dtype, device="cuda") for shape in shapes]
        x, weight, bias, *more = (tensor.double() for tensor in tensors)
        weight = weight if layout == "nk" else weight.mT
        expected = ACTIVATIONS[activation](F.linear(x, weight, bias) + (more[0] if more else 0))
        size = x.abs() @ weight.abs().mT + bias.abs() + (more[0].abs() if more else 0)
        found = torch_op.linear(*tensors, activation=activation, layout=layout)
        assert bool(((found.double() - expected).abs() <= bound * size).all()), (layout, activation, residual)


# 4869 rows and more go through the fused kernel on a Hopper GPU.
@pytest.mark.parametrize("rows", [1, 2, 7, 64, 128, 1000, 2048, 4869, 8192])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gelu_is_as_exact_for_any_number_of_rows(dtype: torch.dtype, rows: int) -> None:
    """Within one unit, for sums without an error: results next to 0 and of large negative sums, too."""
    sums = torch.linspace(-13, 6, 1288, dtype=torch.float64).to(dtype).cuda()
    x = torch.zeros(rows, 200, dtype=dtype, device="cuda")
    x[:, 3] = 1
    weight = torch.zeros(1288, 200, dtype=dtype, device="cuda")
    weight[:, 3] = sums
    found = torch_op.linear(x, weight, activation="gelu").double()
    wide = sums.double()
    right = wide * torch.special.erfc(-wide * 0.5**0.5) / 2
    info = torch.finfo(dtype)
    unit = torch.ldexp(torch.full_like(right, info.eps), torch.frexp(right.abs().clamp(min=info.tiny))[1] - 1)
    assert float(((found - right).abs() / unit).max()) <= 0.6
    gated = torch_op.linear_swiglu(x, torch.cat([weight, weight]), activation="gelu").double()
    assert float(((gated - found * wide).abs() / (info.eps * (found * wide).abs() + info.tiny)).max()) <= 1.2


def test_the_same_bits_every_time() -> None:
    """Also where the sum over K is split, which a wide K with few rows asks for."""
    sizes = (16, 16384), (64, 16384)
    x, weight = (random(*size, dtype=torch.bfloat16, device="cuda") for size in sizes)
    first = torch_op.linear(x, weight)
    for _ in range(20):
        assert torch.equal(torch_op.linear(x, weight), first)


def test_streams_and_threads_at_once() -> None:
    """Threads share a device's handle and plans, and each call has its own workspace."""
    weight, bias = (random(*size, dtype=torch.float16, device="cuda") for size in ((512, 256), (512,)))
    inputs = [random(100 + i, 256, dtype=torch.float16, device="cuda") for i in range(8)]
    expected = [torch_op.linear(x, weight, bias, activation="gelu_tanh") for x in inputs]
    torch.cuda.synchronize()
    failures: list[int] = []

    def work(i: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                y = torch_op.linear(inputs[i], weight, bias, activation="gelu_tanh")
                if not torch.equal(y, expected[i]):
                    failures.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_cuda_graph_of_onnxruntime() -> None:
    """ONNX Runtime captures the node in its second run and replays it with other values."""
    constants = {"weight": random(48, 64), "bias": random(48)}
    node = linear_node(["x", "weight", "bias"], "y", activation="gelu")
    model = model_of([node], [32, 64], constants)
    session = make_session(model, LIBRARY, "cuda", enable_cuda_graph="1")
    x, y = torch.zeros(32, 64, device="cuda"), torch.zeros(32, 48, device="cuda")
    weight, bias = (tensor.cuda() for tensor in constants.values())
    for seed in range(5):
        x.copy_(random(32, 64).cuda() + seed)
        run_bound(session, {"x": x}, {"y": y})
        assert torch.equal(y, torch_op.linear(x, weight, bias, activation="gelu"))


def in_another_process(code: str, **environment: str) -> str:
    """Runs Python code and returns what it prints."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": path} | environment
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout


def test_tf32_only_if_asked() -> None:
    code = (
        "import torch; from twinop import torch_op; torch.manual_seed(0)\n"
        "x, w = torch.randn(256, 512, device='cuda'), torch.randn(256, 512, device='cuda')\n"
        "e = x.double() @ w.double().mT\n"
        "print(float((torch_op.linear(x, w).double() - e).abs().max() / e.abs().max()))\n"
    )
    without, with_tf32 = (float(in_another_process(code, TWINOP_TF32=asked)) for asked in ("0", "1"))
    assert without < 1e-6 < 1e-5 < with_tf32 < 1e-3


def test_the_cublaslt_of_the_process_is_used() -> None:
    """No second copy is loaded."""
    code = (
        "import torch; from twinop import torch_op\n"
        "torch_op.linear(torch.ones(2, 8, device='cuda'), torch.ones(8, 8, device='cuda'))\n"
        "print(*{line.split()[-1] for line in open('/proc/self/maps') if 'libcublasLt' in line})\n"
    )
    mapped = in_another_process(code).split()
    assert len(mapped) == 1, mapped
