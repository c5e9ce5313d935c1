"""torch.utils.cpp_extension.load_inline with the kernel that everybody writes first: a thread per element."""

import os
from functools import cache
from typing import Any

import torch

_SOURCE = r"""
#include <ATen/Dispatch.h>
#include <ATen/cuda/CUDAContext.h>
#include <torch/types.h>

struct Relu { __device__ static float of(float x) { return x > 0 ? x : 0; } };
struct Square { __device__ static float of(float x) { return x * x; } };
struct Gelu { __device__ static float of(float x) { return 0.5f * x * (1 + erff(x * 0.70710678f)); } };

template <class Op, class T>
__global__ void kernel(const T* x, T* y, int64_t n) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) y[i] = static_cast<T>(Op::of(static_cast<float>(x[i])));
}

template <class Op>
torch::Tensor run(torch::Tensor x) {
  auto y = torch::empty_like(x);
  const int64_t n = x.numel();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "peer", [&] {
    kernel<Op, scalar_t><<<(n + 255) / 256, 256, 0, at::cuda::getCurrentCUDAStream()>>>(
        x.data_ptr<scalar_t>(), y.data_ptr<scalar_t>(), n);
  });
  return y;
}

torch::Tensor relu(torch::Tensor x) { return run<Relu>(x); }
torch::Tensor square(torch::Tensor x) { return run<Square>(x); }
torch::Tensor gelu(torch::Tensor x) { return run<Gelu>(x); }
"""
_FUNCTIONS = ("relu", "square", "gelu")


@cache
def module() -> Any:
    """Compiles it, for this GPU only; a minute, unless it was compiled before.

    Raises:
        RuntimeError: no GPU or no CUDA compiler.
    """
    from torch.utils import cpp_extension

    if not torch.cuda.is_available():
        raise RuntimeError("a CUDA kernel needs a GPU")
    if cpp_extension.CUDA_HOME is None:
        raise RuntimeError("no CUDA compiler: neither nvcc on the PATH nor CUDA_HOME")
    major, minor = torch.cuda.get_device_capability()
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", f"{major}.{minor}")
    declarations = "\n".join(f"torch::Tensor {name}(torch::Tensor x);" for name in _FUNCTIONS)
    return cpp_extension.load_inline(
        "twinop_bench_inline", cpp_sources=declarations, cuda_sources=_SOURCE, functions=list(_FUNCTIONS)
    )


def relu(x: torch.Tensor) -> torch.Tensor:
    return module().relu(x)


def square(x: torch.Tensor) -> torch.Tensor:
    return module().square(x)


def gelu(x: torch.Tensor) -> torch.Tensor:
    return module().gelu(x)
