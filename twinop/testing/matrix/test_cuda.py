"""Every op runs on side streams and in CUDA graphs: its launcher only queues work on the call's stream."""

import pytest
import torch

from twinop.record.op_spec import OpSpec

from ..messages import fail, require_same_bits
from ..samples import Sample, call, called, make_sample

LAUNCHERS = (
    "A launcher queues its work on call.stream and returns. It takes memory from call.scratch, not from "
    "cudaMalloc, and it never calls cudaDeviceSynchronize, cudaStreamSynchronize or cudaMemcpy"
)


def shapes_for(record: OpSpec, *shapes: tuple[int, int]) -> list[tuple[int, int]]:
    """Omits wide shapes where another input has as many rows as the first one has columns."""
    square = not record.rows and not record.is_elementwise
    return [shape for shape in shapes if not (square and shape[1] >= 65536)]


def on_gpu(record: OpSpec, shape: tuple[int, int], seed: int, last: bool = False) -> Sample:
    dtypes = record.combinations[-1 if last else 0]
    return make_sample(record, dtypes, shape, seed, tame=True).to("cuda", record.host_inputs)


def fill(sample: Sample, other: Sample) -> None:
    for name, tensor in sample.tensors().items():
        tensor.copy_(other.tensors()[name])


@pytest.mark.cuda
@pytest.mark.backward_too
def test_side_stream(record: OpSpec) -> None:
    """The kernels follow the work queued before them on torch's current stream."""
    for shape in shapes_for(record, (64, 34), (4, 65536)):
        first, second = (on_gpu(record, shape, seed, last=True) for seed in (1, 2))
        expected = call(record, second)
        torch.cuda.synchronize()  # a pending load would hide a launch on another stream
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)
            fill(first, second)
            found = call(record, first)
        stream.synchronize()
        said = f"the op does not wait for the work before it on its stream. {LAUNCHERS}. It differs"
        require_same_bits(record, first, found, expected, said, ("on a side stream", "alone"))


@pytest.mark.cuda
@pytest.mark.backward_too
def test_cuda_graph(record: OpSpec) -> None:
    """A captured graph can be replayed with other inputs. Wide rows may need clusters or scratch memory."""
    if record.sizes:
        pytest.skip("the sizes of its outputs come from the data: both runtimes refuse the capture")
    for shape in shapes_for(record, (64, 34), (4, 4098), (2, 65536)):
        sample = on_gpu(record, shape, 1)
        call(record, sample)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                found = call(record, sample)
        except RuntimeError as error:
            fail(
                f"{called(record, sample)}: the op cannot be captured in a CUDA graph: its launcher "
                "allocates memory, synchronizes, or works on the null stream. "
                f"{LAUNCHERS}.\nCUDA says: {error}"
            )
        for seed in (2, 3):
            fill(sample, on_gpu(record, shape, seed))
            graph.replay()
            torch.cuda.synchronize()
            said = (
                "a replayed CUDA graph does not compute the op again: its launcher works outside of the "
                f"call's stream, perhaps on the null stream. {LAUNCHERS}. It differs"
            )
            require_same_bits(record, sample, found, call(record, sample), said, ("replayed", "called"))
