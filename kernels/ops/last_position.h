// last_position -> torch.ops.custom_domain.last_position, CustomLastPosition.
#pragma once

#include "twinop/kernel.h"
#if defined(__CUDACC__)
#include "twinop/primitives/l2_hints.cuh"
#endif

namespace twinop {

#if defined(__CUDACC__)
// A block adds up a row. Of up to 4,096 numbers all loads are in flight at once. (More loads of a
// thread would wait for each other: they need more predicates than there are.)
inline constexpr int kMaskThreads = 1024, kMaskLoads = 4;

template <class T>
static __global__ void __launch_bounds__(kMaskThreads)
    LastPositionKernel(const T* mask, std::int64_t stride, std::int64_t length,
                       std::int32_t* position) {
  __shared__ std::uint32_t total;
  if (threadIdx.x == 0) total = ~0u;  // -1
  __syncthreads();
  const T* const row = mask + blockIdx.x * stride;
  PrefetchL2(row, length * sizeof(T));
  PdlTriggerAndWait();
  std::uint32_t sum = 0;
  for (std::int64_t first = threadIdx.x; first < length; first += kMaskThreads * kMaskLoads) {
#pragma unroll
    for (int i = 0; i < kMaskLoads; ++i)
      if (first + i * kMaskThreads < length)
        sum += static_cast<std::uint32_t>(row[first + i * kMaskThreads]);
  }
  atomicAdd(&total, sum);  // nvcc adds up a warp first
  __syncthreads();
  if (threadIdx.x == 0) position[blockIdx.x] = static_cast<std::int32_t>(total);
}
#endif

template <class Op>
Status LastPositions(const CallOf<Op>& call) {
  const Tensor& mask = InputOf(call, "mask"_name);
  const std::int64_t rows = mask.sizes[0], length = mask.sizes[1];
  const std::int64_t stride = mask.strides == nullptr ? length : mask.strides[0];
  auto* const position = OutputData<std::int32_t>(call, "position"_name);
  return Dispatch<std::int64_t, std::int32_t>(mask.dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    const T* const first = InputData<T>(call, "mask"_name);
#if defined(__CUDACC__)
    if (rows == 0) return Status();
    return LaunchKernel(LastPositionKernel<T>, WithPdl({rows, dim3(kMaskThreads)}), call, first,
                        stride, length, position);
#else
    call.context->ParallelFor(rows, (1 << 15) / (length + 1) + 1, [&](auto begin, auto end) {
      for (auto row = begin; row < end; ++row) {
        std::uint32_t sum = ~0u;  // -1
        for (auto i = row * stride; i < row * stride + length; ++i)
          sum += static_cast<std::uint32_t>(first[i]);
        position[row] = static_cast<std::int32_t>(sum);
      }
    });
    return Status();
#endif
  });
}

// The position of the last token of each sequence, counted from 0: the sum of its row of mask [B,
// L], less 1. Numbers other than 0 and 1 are added, too. Of the sum, in int64, position has the low
// 32 bits, as ONNX's Cast gives them, so these alone are added up.
TWINOP_OP(last_position,
          Record("last_position(Tensor mask) -> Tensor position")
              .dtypes("int64 position=int32; int32")
              .rows("-1")
              .shapes("position = mask[:1]")
              .input_shapes("mask = mask[:1] + [mask[1]]"),
          LastPositions)

}  // namespace twinop
