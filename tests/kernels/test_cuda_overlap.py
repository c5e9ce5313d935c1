"""Programmatic dependent launch: a kernel starts while the previous kernel still runs.

It must wait until its inputs are written and until its outputs are no longer read.
"""

from collections.abc import Callable

import pytest
import torch
from same_bits import assert_same_bits
from torch import Tensor

from twinop import torch_op

pytestmark = pytest.mark.cuda

Step = Callable[[Tensor, Tensor], Tensor]

# Each step takes x and a row of weights. Together, the steps use every kernel of the two skeletons.
OURS: dict[str, Step] = {
    "gelu": lambda x, w: torch_op.gelu(x),
    "layer_norm": lambda x, w: torch_op.layer_norm(x, w, w),
    "broadcast add": lambda x, w: torch_op.add(x, w),
    "softmax": lambda x, w: torch_op.softmax(x),
    "misaligned rows": lambda x, w: torch_op.softmax(torch.nn.functional.pad(x, (1, 0))[:, 1:]),
    "add_rms_norm": lambda x, w: torch_op.add_rms_norm(x, x, w)[1],
    "columns": lambda x, w: torch_op.softmax(x, dim=0),
    "strided": lambda x, w: torch_op.mul(x.T.contiguous().T, x),
    "rms_norm": lambda x, w: torch_op.rms_norm(x, w, offset=1),
    "weights made on the way": lambda x, w: torch_op.rms_norm(x, torch_op.square(x[0])),
    "sums of columns": lambda x, w: torch_op.add(
        x, torch_op.layer_norm_backward(x, torch_op.gelu(x), w, w)[1]
    ),
}
THEIRS: dict[str, Step] = {
    "torch's kernel": lambda x, w: x * 0.5,
    "a copy": lambda x, w: torch.empty_like(x).copy_(x),
    "a memset": lambda x, w: torch_op.add(x, torch.zeros_like(x)),
    "memory used again": lambda x, w: torch_op.sigmoid(torch_op.square(x)),
}
SHAPES = [(1, 4096), (8, 4096), (64, 1000), (300, 72), (5, 20000), (2, 70000), (2048, 1024)]


def chain(x: Tensor, w: Tensor, synchronized: bool = False) -> Tensor:
    """Runs our steps in sequence, then our steps and torch's alternately."""
    ours, theirs = list(OURS.values()), list(THEIRS.values())
    mixed = [step for i, own in enumerate(ours) for step in (own, theirs[i % len(theirs)])]
    for step in ours + mixed:
        x = torch_op.rms_norm(step(x, w))  # keeps the numbers near 1
        if synchronized:
            torch.cuda.synchronize()
    return x


def numbers(shape: tuple[int, int], seed: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    x = torch.randn(shape, device="cuda").bfloat16()
    return x, torch.randn(shape[1], device="cuda").bfloat16()


WATCHED = pytest.param((64, 1000), marks=(pytest.mark.sanitizer, pytest.mark.torch_writes))


@pytest.mark.parametrize("shape", [WATCHED if shape == (64, 1000) else shape for shape in SHAPES], ids=str)
def test_each_waits_for_the_one_before(shape: tuple[int, int]) -> None:
    """Each kernel waits, on a side stream and in a CUDA graph. New inputs in each run reveal stale values."""
    expected = [chain(*numbers(shape, seed), synchronized=True) for seed in range(4)]
    check(chain, shape, expected, torch.cuda.Stream())


def check(run: Step, shape: tuple[int, int], expected: list[Tensor], stream: torch.cuda.Stream) -> None:
    """Runs with the numbers of each seed, on a stream and in a graph."""
    with torch.cuda.stream(stream):
        for seed, wanted in enumerate(expected):
            found = run(*numbers(shape, seed))
            torch.cuda.synchronize()
            assert_same_bits(found, wanted, f"on a stream, seed {seed}")
    x, w = numbers(shape, 9)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(x, w)
    for seed in [*range(len(expected))] * 3:
        for old, new in zip((x, w), numbers(shape, seed), strict=True):
            old.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(found, expected[seed], f"in a graph, seed {seed}")


def test_streams_that_part_and_meet() -> None:
    """A kernel that depends on kernels of two streams waits for both, also in a CUDA graph."""
    shape = (64, 4096)
    side = torch.cuda.Stream()

    def forked(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(10):
            here = torch.cuda.current_stream()
            side.wait_stream(here)
            with torch.cuda.stream(side):
                left = torch_op.layer_norm(torch_op.gelu(x), w, w)
                left.record_stream(here)
            right = torch_op.softmax(torch_op.square(x))
            here.wait_stream(side)
            x = torch_op.rms_norm(torch_op.add(left, right))
        return x

    expected = []
    for seed in range(3):
        x, w = numbers(shape, seed)
        for _ in range(10):
            left = torch_op.layer_norm(torch_op.gelu(x), w, w)
            torch.cuda.synchronize()
            right = torch_op.softmax(torch_op.square(x))
            torch.cuda.synchronize()
            x = torch_op.rms_norm(torch_op.add(left, right))
            torch.cuda.synchronize()
        expected.append(x)
    check(forked, shape, expected, torch.cuda.current_stream())
