// Softmax over the last dimension: a block for each row. Each thread reads its part of the row with
// an own maximum and sum, and the block combines them in a tree ("online softmax",
// https://arxiv.org/abs/1805.02867).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "twinop/kernel.h"

namespace twinop::lecture {

constexpr int kRowThreads = 256;

#if defined(__CUDACC__)

__global__ void SoftmaxKernel(const float* x, float* y, std::int64_t columns) {
  __shared__ float maxima[kRowThreads], sums[kRowThreads];
  x += blockIdx.x * columns;
  y += blockIdx.x * columns;
  float most = -INFINITY, sum = 0;
  for (std::int64_t i = threadIdx.x; i < columns; i += kRowThreads) most = fmaxf(most, x[i]);
  for (std::int64_t i = threadIdx.x; i < columns; i += kRowThreads) sum += expf(x[i] - most);
  maxima[threadIdx.x] = most;
  sums[threadIdx.x] = sum;
  for (unsigned half = kRowThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x >= half) continue;
    const float other = maxima[threadIdx.x + half];
    const float larger = fmaxf(maxima[threadIdx.x], other);
    if (larger == -INFINITY) continue;  // neither thread has an element
    sums[threadIdx.x] = sums[threadIdx.x] * expf(maxima[threadIdx.x] - larger) +
                        sums[threadIdx.x + half] * expf(other - larger);
    maxima[threadIdx.x] = larger;
  }
  __syncthreads();
  for (std::int64_t i = threadIdx.x; i < columns; i += kRowThreads)
    y[i] = expf(x[i] - maxima[0]) / sums[0];
}

#endif

template <class Op>
Status LaunchSoftmax(const CallOf<Op>& call) {
  const Tensor& shape = InputOf(call, "x"_name);
  const std::int64_t columns = shape.sizes[shape.rank - 1];
  if (shape.numel == 0) return {};
  const std::int64_t rows = shape.numel / columns;
  const auto* x = InputData<float>(call, "x"_name);
  auto* y = OutputData<float>(call, "y"_name);
#if defined(__CUDACC__)
  return LaunchKernel(SoftmaxKernel, {rows, dim3(kRowThreads)}, call, x, y, columns);
#else
  call.context->ParallelFor(rows, 1, [=](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      const float* const from = x + row * columns;
      float* const to = y + row * columns;
      const float most = *std::max_element(from, from + columns);
      float sum = 0;
      for (std::int64_t i = 0; i < columns; ++i) sum += to[i] = std::exp(from[i] - most);
      for (std::int64_t i = 0; i < columns; ++i) to[i] /= sum;
    }
  });
  return {};
#endif
}

}  // namespace twinop::lecture

namespace twinop {

TWINOP_OP(
    softmax,
    Record("softmax(Tensor x) -> Tensor").dtypes("float32").input_shapes("x = x[:-1] + [x[-1]]"),
    lecture::LaunchSoftmax)

}  // namespace twinop
