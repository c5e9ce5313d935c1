"""linear and linear_swiglu in one kernel, which large products of 16 bits take on a Hopper GPU."""

import os
import re

import pytest
import torch
from linear_calls import ACTIVATIONS, linear_node, model_of, random
from samples import moved
from torch import Tensor
from torch.nn import functional as F

from twinop import torch_op
from twinop.libraries.library import find_library, read_library
from twinop.testing.one_node import make_session, run_bound

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
HAS_CODE = re.search(r"(^|,)90a?(-real)?(,|$)", read_library(find_library("custom_ops")).cuda_archs)
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not (IS_HOPPER and HAS_CODE and os.environ.get("TWINOP_TARGET", "9.0") == "9.0"),
        reason="a Hopper GPU runs it with its own kernels",
    ),
]
LIBRARY = find_library("custom_ops")
CASES = [(False, "gelu"), (False, "silu"), (True, "silu"), (True, "gelu"), (True, "gelu_tanh")]
M, N = 128 * 39 + 5, 1288  # enough tiles for all processors; the last ones lie partly outside


def tensors(gated: bool, m: int = M, n: int = N, k: int = 200, **options: object) -> list[Tensor]:
    """Returns x, a weight and a bias."""
    rows = 2 * n if gated else n
    x, weight, bias = (random(*shape, **options) for shape in ((m, k), (rows, k), (rows,)))  # type: ignore[arg-type]
    return [x, weight / k**0.5, bias]


def call(gated: bool, activation: str, given: list[Tensor]) -> Tensor:
    op = torch_op.linear_swiglu if gated else torch_op.linear
    return op(*given, activation=activation)


def expected(gated: bool, activation: str, given: list[Tensor]) -> Tensor:
    y = F.linear(*(tensor.double() for tensor in given))
    if not gated:
        return ACTIVATIONS[activation](y)
    gate, others = y.chunk(2, -1)
    return ACTIVATIONS[activation](gate) * others


def assert_close(found: Tensor, given: list[Tensor], gated: bool, activation: str) -> None:
    """The error is that of rounding y, and of summing in fp32."""
    x, weight, *bias = (tensor.double() for tensor in given)
    sums = F.linear(x, weight, *bias)
    error = 5e-6 * F.linear(x.abs(), weight.abs(), *(b.abs() for b in bias))
    right = expected(gated, activation, given)
    bound = torch.finfo(found.dtype).eps * right.abs() + 1e-7
    if gated:
        (gate, others), (gate_error, others_error) = sums.chunk(2, -1), error.chunk(2, -1)
        bound += 1.2 * gate_error * others.abs() + others_error * (gate.abs() + 1)
    else:
        bound += 1.2 * error
    assert bool(((found.double() - right).abs() <= bound).all())


def kernels(gated: bool, activation: str, given: list[Tensor]) -> list[str]:
    """Returns the names of the kernels of a call."""
    call(gated, activation, given)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call(gated, activation, given)
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type.name == "CUDA"]


# The kernel takes these with 114 processors, too. 4869 rows leave nothing to the last tile's second block.
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(M, N, 200), (M, N, 8), (128 * 38 + 5, N, 320), (128 * 132, 256, 64), (385, 256 * 64, 72)],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("gated", "activation"), CASES)
def test_values(gated: bool, activation: str, dtype: torch.dtype, m: int, n: int, k: int) -> None:
    given = tensors(gated, m, n, k, dtype=dtype, device="cuda")
    (kernel,) = kernels(gated, activation, given)
    assert "linear::fused" in kernel
    for operands in (given, given[:2]):
        assert_close(call(gated, activation, operands), operands, gated, activation)


@pytest.mark.parametrize(("gated", "activation"), CASES)
def test_operands_that_are_not_aligned(gated: bool, activation: str) -> None:
    """They give the bits of aligned ones."""
    given = tensors(gated, dtype=torch.bfloat16, device="cuda")
    assert torch.equal(call(gated, activation, list(map(moved, given))), call(gated, activation, given))


@pytest.mark.parametrize(("gated", "activation"), CASES)
def test_a_row_has_the_same_bits_in_every_batch_that_the_kernel_takes(gated: bool, activation: str) -> None:
    given = tensors(gated, dtype=torch.bfloat16, device="cuda")
    whole = call(gated, activation, given)
    for first in (1, 57, 128):  # each row has another place in its tile, or another tile
        part = [given[0][first:].contiguous(), *given[1:]]
        (kernel,) = kernels(gated, activation, part)
        assert "linear::fused" in kernel
        assert torch.equal(call(gated, activation, part), whole[first:])


@pytest.mark.parametrize(("gated", "activation"), CASES)
def test_special_values_stay_in_their_rows(gated: bool, activation: str) -> None:
    given = tensors(gated, dtype=torch.float16, device="cuda")
    clean = call(gated, activation, given)
    given[0][7, 3], given[0][M - 1, 0], given[0][200, 5] = torch.nan, torch.inf, -torch.inf
    found = call(gated, activation, given)
    rows = torch.tensor([7, M - 1, 200], device="cuda")
    right = expected(gated, activation, given)[rows]
    assert torch.equal(found[rows].isnan(), right.isnan()) and torch.equal(found[rows].isinf(), right.isinf())
    found[rows] = clean[rows]
    assert torch.equal(found, clean)


@pytest.mark.parametrize(("gated", "activation"), CASES)
def test_the_same_bits_every_time_and_on_other_streams(gated: bool, activation: str) -> None:
    given = tensors(gated, dtype=torch.bfloat16, device="cuda")
    first = call(gated, activation, given)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    found = []
    for _ in range(10):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(call(gated, activation, given))
    torch.cuda.synchronize()
    assert all(torch.equal(y, first) for y in found)


def test_a_cuda_graph_of_torch() -> None:
    given = tensors(True, dtype=torch.bfloat16, device="cuda")
    call(True, "silu", given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call(True, "silu", given)
    for seed in range(3):
        given[0].copy_(torch.roll(given[0], seed + 1))
        graph.replay()
        assert torch.equal(y, call(True, "silu", given))


def test_bits_in_onnxruntime() -> None:
    """Batches of several sizes, in one session: some are large enough for the kernel."""
    x, weight, bias = tensors(False, dtype=torch.float16)
    node = linear_node(["x", "weight", "bias"], "y", activation="gelu")
    session = make_session(model_of([node], ["m", 200], {"weight": weight, "bias": bias}), LIBRARY, "cuda")
    given = [weight.cuda(), bias.cuda()]
    for rows in (M, 3, M - 128, M):
        part = x[:rows].cuda()
        y = torch.empty(rows, N, dtype=torch.float16, device="cuda")
        run_bound(session, {"x": part}, {"y": y})
        assert torch.equal(y, torch_op.linear(part, *given, activation="gelu"))
