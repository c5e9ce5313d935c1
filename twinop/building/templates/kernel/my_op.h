// my_op -> torch.ops.my_op.my_op, and CustomMyOp in ONNX: y = scale x, and total = the sum of y.
//
// A launcher of your own over tensor views. nvcc compiles the part in `#if defined(__CUDACC__)`, the C++ compiler
// the other one. Kernels that you have already: include their .cu file there, and launch them as below.
#pragma once

#include <cstdint>

#include "twinop/kernel.h"

namespace twinop {

// The sum of each block goes into scratch memory. The frameworks allocate it, because a launcher may not.
constexpr int kMyOpThreads = 256;

inline std::int64_t MyOpBlocks(const Call& call) { return call.inputs[0].numel / kMyOpThreads + 1; }

inline std::int64_t MyOpScratch(const Call& call) {
  return MyOpBlocks(call) * static_cast<std::int64_t>(sizeof(float));
}

#if defined(__CUDACC__)

// The sum over a block, in the thread 0.
__device__ inline float MyOpBlockSum(float value) {
  __shared__ float sums[kMyOpThreads];
  sums[threadIdx.x] = value;
  for (unsigned half = kMyOpThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  return sums[0];
}

__global__ void MyOpScaleKernel(const float* x, float* y, float* sums, float scale, std::int64_t count) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kMyOpThreads + threadIdx.x;
  const float value = i < count ? scale * x[i] : 0.0f;
  if (i < count) y[i] = value;
  const float sum = MyOpBlockSum(value);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

__global__ void MyOpTotalKernel(const float* sums, float* total, std::int64_t blocks) {
  float value = 0.0f;
  for (std::int64_t i = threadIdx.x; i < blocks; i += kMyOpThreads) value += sums[i];
  value = MyOpBlockSum(value);
  if (threadIdx.x == 0) *total = value;
}

#endif

// Queues the work on the call's stream, and returns. `Op` has the record: names are checked by the compiler.
template <class Op>
Status LaunchMyOp(const CallOf<Op>& call) {
  const Tensor& x = InputOf(call, "x"_name);
  const Tensor& y = OutputOf(call, "y"_name);
  const Tensor& total = OutputOf(call, "total"_name);
  const auto scale = AttributeOf<float>(call, "scale"_name);
#if defined(__CUDACC__)
  auto* const sums = static_cast<float*>(call.scratch);
  const std::int64_t blocks = MyOpBlocks(call);
  TWINOP_RETURN_IF_ERROR(LaunchKernel(MyOpScaleKernel, {blocks, dim3(kMyOpThreads)}, call,
                                      x.as<const float>(), y.as<float>(), sums, scale, x.numel));
  return LaunchKernel(MyOpTotalKernel, {1, dim3(kMyOpThreads)}, call, sums, total.as<float>(), blocks);
#else
  float sum = 0.0f;
  for (std::int64_t i = 0; i < x.numel; ++i) {
    y.as<float>()[i] = scale * x.as<const float>()[i];
    sum += y.as<float>()[i];
  }
  *total.as<float>() = sum;
  return {};
#endif
}

// The schema, the dtypes that the launcher takes, the shapes of the outputs, and the derivative in Python.
TWINOP_OP(my_op,
          Record("my_op(Tensor x, float scale=2.0) -> (Tensor y, Tensor total)")
              .dtypes("float32")
              .shapes("y = x; total = [1]")
              .scratch<MyOpScratch>()
              .gradient("x = scale * (grad_y + grad_total.squeeze(0))"),
          LaunchMyOp)

}  // namespace twinop
