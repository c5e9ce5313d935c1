"""Peers from CUDA C++, numba, Liger, apex, quack and flashinfer, which are imported when they are called."""

import os
from functools import cache
from typing import Any

import torch
from torch import Tensor

# ------------------------------------------------------------------------------- torch's load_inline

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
def inline_module() -> Any:
    """Compiles the first kernel that everybody writes, one thread per element, for this GPU; takes a minute.

    Raises:
        RuntimeError: there is no GPU or no CUDA compiler.
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


def inline_relu(x: Tensor) -> Tensor:
    return inline_module().relu(x)


def inline_square(x: Tensor) -> Tensor:
    return inline_module().square(x)


def inline_gelu(x: Tensor) -> Tensor:
    return inline_module().gelu(x)


# ------------------------------------------------------------------------------- numba


@cache
def _numba_square() -> Any:
    import numpy as np

    if not hasattr(np, "row_stack"):  # NumPy 2.5 removed it, and older versions of numba-cuda need it
        np.row_stack = np.vstack
    from numba import cuda

    @cuda.jit
    def kernel(x, y):
        i = cuda.grid(1)
        if i < x.size:
            y[i] = x[i] * x[i]

    return kernel


def numba_square(x: Tensor) -> Tensor:
    """Squares with one thread per element. numba reads torch's tensors in place, but has no bfloat16."""
    kernel, threads = _numba_square(), 256
    from numba import cuda

    if x.dtype == torch.bfloat16:
        raise TypeError("numba has no bfloat16 arrays")
    y = torch.empty_like(x)
    blocks = (x.numel() + threads - 1) // threads
    stream = cuda.external_stream(torch.cuda.current_stream(x.device).cuda_stream) if x.is_cuda else 0
    arrays = [cuda.as_cuda_array(t.detach(), sync=False) if t.is_cuda else t.numpy() for t in (x, y)]
    kernel[blocks, threads, stream](*arrays)
    return y


# ------------------------------------------------------------------------------- Liger


def liger_softmax(x: Tensor) -> Tensor:
    from liger_kernel.ops import LigerSoftmaxFunction

    return LigerSoftmaxFunction.apply(x)


def liger_layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    from liger_kernel.ops import LigerLayerNormFunction

    return LigerLayerNormFunction.apply(x, weight, bias, 1e-5)


def liger_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    from liger_kernel.ops import LigerRMSNormFunction

    # The last argument keeps the gradients out of the inputs' memory.
    return LigerRMSNormFunction.apply(x, weight, 1e-6, 0.0, "llama", False)


def liger_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    from liger_kernel.ops import LigerFusedAddRMSNormFunction

    return LigerFusedAddRMSNormFunction.apply(x, residual, weight, 1e-6, 0.0, "llama", False)


def liger_swiglu(x: Tensor, gate: Tensor) -> Tensor:
    from liger_kernel.ops import LigerSiLUMulFunction

    return LigerSiLUMulFunction.apply(gate, x)


def liger_swiglu_packed(x: Tensor) -> Tensor:
    from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction  # Liger >= 0.8

    return LigerFusedGateUpSiLUMulFunction.apply(x, False)


# ------------------------------------------------------------------------------- apex, quack, flashinfer


def apex_layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    from apex.normalization.fused_layer_norm import fused_layer_norm_affine

    return fused_layer_norm_affine(x, weight, bias, x.shape[-1:], 1e-5)


def apex_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    from apex.normalization.fused_layer_norm import fused_rms_norm_affine

    return fused_rms_norm_affine(x, weight, x.shape[-1:], 1e-6)


def quack_softmax(x: Tensor) -> Tensor:
    from quack.softmax import softmax

    return softmax(x)


def quack_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    from quack.rmsnorm import rmsnorm

    return rmsnorm(x, weight, eps=1e-6)


def quack_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    from quack.rmsnorm import rmsnorm

    return rmsnorm(x, weight, residual=residual, eps=1e-6, prenorm=True)


def flashinfer_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    from flashinfer.norm import rmsnorm

    return rmsnorm(x, weight, eps=1e-6)


def flashinfer_silu_and_mul(x: Tensor) -> Tensor:
    from flashinfer.activation import silu_and_mul

    return silu_and_mul(x)
