// A test op that misbehaves where its input says so: y = x, but for an element above 1000 the CPU
// kernel sleeps that many milliseconds, and the CUDA kernel fails an assertion.
#pragma once

#include <chrono>
#include <thread>

#include "twinop/record/registry.h"
#if defined(__CUDACC__)
#include "twinop/primitives/launch.cuh"
#endif

#undef NDEBUG  // <cassert> takes it into account at each inclusion
#include <cassert>

namespace twinop {

constexpr float kStallsAbove = 1000;

#if defined(__CUDACC__)
__global__ void StallKernel(const float* x, float* y, std::int64_t count) {
  std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  assert(!(x[i] > kStallsAbove));
  y[i] = x[i];
}
inline Status LaunchStall(const Call& call) {
  constexpr int kThreads = 128;
  std::int64_t count = call.outputs[0].numel;
  return LaunchKernel(StallKernel, {(count + kThreads - 1) / kThreads, dim3(kThreads)}, call,
                      call.inputs[0].as<const float>(), call.outputs[0].as<float>(), count);
}
#else
inline Status LaunchStall(const Call& call) {
  const float* x = call.inputs[0].as<const float>();
  float* y = call.outputs[0].as<float>();
  for (std::int64_t i = 0; i < call.outputs[0].numel; ++i) {
    if (x[i] > kStallsAbove) {
      std::this_thread::sleep_for(std::chrono::milliseconds(static_cast<std::int64_t>(x[i])));
    }
    y[i] = x[i];
  }
  return {};
}
#endif

// clang-format off
TWINOP_OP(stall,
          Record("stall(Tensor x) -> Tensor y")
              .dtypes("float32")
              .shapes("y = x"),
          LaunchStall)
// clang-format on

}  // namespace twinop
