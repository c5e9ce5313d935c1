"""The scratch memory that ops ask for: what no kernel of the call uses is not reserved."""

import pytest
import torch

from twinop import torch_op

MIB = 1 << 20


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_memory_of_a_call(dtype: torch.dtype) -> None:
    """What the calls use beside their results."""
    x, weight = (torch.randn(size, 64, device="cuda", dtype=dtype) / 8 for size in (16384, 8192))
    grad, rows = torch.randn(2, 1_000_000, 128, device="cuda", dtype=dtype)
    calls = (
        (lambda: torch_op.linear_swiglu(x[:32], weight), 1),
        (lambda: torch_op.linear_swiglu(x, weight, invariant=True), 1),
        (lambda: torch.ops.custom_domain.layer_norm_backward(grad, rows, None, None), 4),
    )
    for call, most in calls:
        call()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results = call()
        results = results if isinstance(results, torch.Tensor) else results[0]
        peak = torch.cuda.max_memory_allocated() - before
        assert peak - results.numel() * results.element_size() <= most * MIB
