// my_op -> torch.ops.my_op.my_op, and CustomMyOp in ONNX: y = scale * x.
//
// A launcher of your own over tensor views. nvcc compiles the part in `#if defined(__CUDACC__)`, the C++ compiler
// the other one. Kernels that you have already: include their .cu file there, and launch them as below.
#pragma once

#include <cstdint>

#include "twinop/kernel.h"

namespace twinop {

#if defined(__CUDACC__)

__global__ void MyOpKernel(const float* x, float* y, float scale, std::int64_t count) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) y[i] = scale * x[i];
}

#endif

// Queues the work on the call's stream, and returns. `Op` has the record: names are checked by the compiler.
template <class Op>
Status LaunchMyOp(const CallOf<Op>& call) {
  const Tensor& x = InputOf(call, "x"_name);
  const Tensor& y = OutputOf(call, "y"_name);
  const auto scale = AttributeOf<float>(call, "scale"_name);
#if defined(__CUDACC__)
  return LaunchKernel(MyOpKernel, GridOver(x.numel, 256), call, x.as<const float>(), y.as<float>(), scale,
                      x.numel);
#else
  for (std::int64_t i = 0; i < x.numel; ++i) y.as<float>()[i] = scale * x.as<const float>()[i];
  return {};
#endif
}

// The schema, the dtypes that the launcher takes, and the derivative in Python.
TWINOP_OP(my_op,
          Record("my_op(Tensor x, float scale=2.0) -> Tensor")
              .dtypes("float32")
              .gradient("x = scale * grad"),
          LaunchMyOp)

}  // namespace twinop
