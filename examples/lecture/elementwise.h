// ReLU, the square and GELU as a lecture on CUDA writes them first: a thread for each element. Then
// ReLU with a thread for each float4, which reads 16 bytes at once.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "twinop/kernel.h"

namespace twinop::lecture {

constexpr int kThreads = 256;

struct Relu {
  TWINOP_INLINE float operator()(float x) const { return x < 0.0f ? 0.0f : x; }
};

struct Square {
  TWINOP_INLINE float operator()(float x) const { return x * x; }
};

// The tanh form, https://arxiv.org/abs/1606.08415
struct Gelu {
  TWINOP_INLINE float operator()(float x) const {
    return 0.5f * x * (1.0f + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
  }
};

#if defined(__CUDACC__)

template <class F>
__global__ void ScalarKernel(const float* x, float* y, std::int64_t count) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) y[i] = F{}(x[i]);
}

// The last thread also takes the elements behind the last whole float4.
template <class F>
__global__ void Float4Kernel(const float* x, float* y, std::int64_t count) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const std::int64_t whole = count / 4;
  if (i < whole) {
    const float4 v = reinterpret_cast<const float4*>(x)[i];
    reinterpret_cast<float4*>(y)[i] = {F{}(v.x), F{}(v.y), F{}(v.z), F{}(v.w)};
  }
  if (i == whole)
    for (std::int64_t k = 4 * whole; k < count; ++k) y[k] = F{}(x[k]);
}

#endif

template <class F, int kVector, class Op>
Status Launch(const CallOf<Op>& call) {
  const auto* x = InputData<float>(call, "x"_name);
  auto* y = OutputData<float>(call, "y"_name);
  const std::int64_t count = InputOf(call, "x"_name).numel;
#if defined(__CUDACC__)
  // Runtimes hand out any address: a slice of a tensor may begin between two float4.
  if (kVector == 4 && IsAligned(x, 16) && IsAligned(y, 16))
    return LaunchKernel(Float4Kernel<F>, GridOver(count / 4 + 1, kThreads), call, x, y, count);
  return LaunchKernel(ScalarKernel<F>, GridOver(count, kThreads), call, x, y, count);
#else
  call.context->ParallelFor(count, 4096, [=](std::int64_t begin, std::int64_t end) {
    std::transform(x + begin, x + end, y + begin, F{});
  });
  return {};
#endif
}

}  // namespace twinop::lecture

namespace twinop {

TWINOP_OP(relu_scalar, Record("relu_scalar(Tensor x) -> Tensor").dtypes("float32"),
          (lecture::Launch<lecture::Relu, 1>))

TWINOP_OP(relu_float4, Record("relu_float4(Tensor x) -> Tensor").dtypes("float32"),
          (lecture::Launch<lecture::Relu, 4>))

TWINOP_OP(square, Record("square(Tensor x) -> Tensor").dtypes("float32"),
          (lecture::Launch<lecture::Square, 1>))

TWINOP_OP(gelu, Record("gelu(Tensor x) -> Tensor").dtypes("float32"),
          (lecture::Launch<lecture::Gelu, 1>))

}  // namespace twinop
