// The launcher of most test ops.
#pragma once

#include "twinop/kernel.h"

namespace twinop {

#if defined(__CUDACC__)
template <class F>
__global__ void ForEachKernel(F functor, std::int64_t count) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) functor(i);
}
#endif

// Runs functor(i) for i from 0 to count - 1 on either device, on the CPU in pieces of at least
// `grain`.
template <class F>
Status ForEach(const Call& call, std::int64_t count, const F& functor,
               [[maybe_unused]] std::int64_t grain = 1024) {
  if (count == 0) return {};
#if defined(__CUDACC__)
  return LaunchKernel(ForEachKernel<F>, GridOver(count, 128), call, functor, count);
#else
  call.context->ParallelFor(count, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) functor(i);
  });
  return {};
#endif
}

}  // namespace twinop
