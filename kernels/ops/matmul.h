// matmul -> torch.ops.custom_domain.matmul, CustomMatmul.
#pragma once

#if defined(__CUDACC__)
#include "twinop/matmul/cuda.cuh"
#else
#include "twinop/matmul/cpu.h"
#endif
#include "twinop/record/registry.h"

namespace twinop {

// A kernel for teaching, which shows in a few pages how shared memory makes a matmul fast. Nothing
// uses it by default, and cuBLAS is faster (bench/results/matmul-nvidia-h200.json).
//
// Matrices may have any M, N and K, and any batch dimensions, which broadcast as in torch. Vectors
// are not supported. `tile` is the side of CUDA's tiles; 0 chooses it from the device's shared
// memory. The CPU has blocks of its own.
template <class Op>
Status LaunchMatmul(const CallOf<Op>& call) {
#if defined(__CUDACC__)
  return matmul::Cuda(call);
#else
  return matmul::Cpu(call);
#endif
}

// clang-format off
TWINOP_OP(matmul,
          Record("matmul(Tensor a, Tensor b, str variant=\"tiled\", int tile=0) -> Tensor")
              .dtypes("float32")
              .shapes("y = broadcast(a[:-2], b[:-2]) + [a[-2], b[-1]]")
              .input_shapes("b = b[:-2] + [a[-1], b[-1]]")
              .choices("variant = naive | tiled")
              .limits("tile in 0 | 8 | 16 | 32 | 64 | 128 | 256")
              .gradient("a = matmul(grad, b.mT, variant, tile); "
                        "b = matmul(a.mT, grad, variant, tile)"),
          LaunchMatmul)
// clang-format on

}  // namespace twinop
