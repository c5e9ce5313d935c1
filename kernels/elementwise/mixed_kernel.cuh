// The elementwise kernel of operands of several dtypes, which are known at run time only: all
// threads take the same branch. A thread takes kMixedWidth neighbouring elements.
#pragma once

#include <cstdint>
#include <utility>

#include "twinop/elementwise/strided_kernel.cuh"

namespace twinop::elementwise {

inline constexpr int kMixedWidth = 4;

template <int kOperands>
struct MixedOperands {
  char* data[kOperands];
  DType dtypes[kOperands];
  bool have_vectors[kOperands];  // a thread's elements are one access
};

template <class S>
struct alignas(kMixedWidth * sizeof(S)) MixedVector {
  S values[kMixedWidth];
};

template <class F, int kInputs, std::size_t... I>
__device__ __forceinline__ auto ApplyTo(const F& functor,
                                        const float (&values)[kInputs][kMixedWidth], int i,
                                        std::index_sequence<I...>) {
  return functor(values[I][i]...);
}

template <class F, int kOutputs, int kInputs>
__global__ void __launch_bounds__(kThreads)
    MixedKernel(F functor, std::uint32_t count, MixedOperands<kOutputs + kInputs> operands,
                Strides<kOutputs + kInputs> strides) {
  constexpr int kOperands = kOutputs + kInputs;
  PdlTriggerAndWait();
  const std::uint32_t first = (blockIdx.x * kThreads + threadIdx.x) * kMixedWidth;
  if (first >= count) return;
  const int left = static_cast<int>(min(count - first, std::uint32_t{kMixedWidth}));

  std::int64_t offsets[kMixedWidth][kOperands];
#pragma unroll
  for (int i = 0; i < kMixedWidth; ++i) strides.Locate(first + min(i, left - 1), offsets[i]);
  float values[kInputs][kMixedWidth];
#pragma unroll
  for (int k = 0; k < kInputs; ++k)
    WithStorage(operands.dtypes[kOutputs + k], [&](auto tag) {
      using S = typename decltype(tag)::Type;
      const S* const data = reinterpret_cast<const S*>(operands.data[kOutputs + k]);
      MixedVector<S> vector;
      if (operands.have_vectors[kOutputs + k] && left == kMixedWidth) {
        vector = *reinterpret_cast<const MixedVector<S>*>(data + offsets[0][kOutputs + k]);
      } else {
#pragma unroll
        for (int i = 0; i < kMixedWidth; ++i) vector.values[i] = data[offsets[i][kOutputs + k]];
      }
#pragma unroll
      for (int i = 0; i < kMixedWidth; ++i) values[k][i] = ToCompute(vector.values[i]);
    });

  float results[kOutputs][kMixedWidth];
#pragma unroll
  for (int i = 0; i < kMixedWidth; ++i) {
    const auto result = ApplyTo(functor, values, i, std::make_index_sequence<kInputs>{});
    if constexpr (kResultCount<std::remove_const_t<decltype(result)>> == 1) {
      results[0][i] = result;
    } else {
#pragma unroll
      for (int k = 0; k < kOutputs; ++k) results[k][i] = result.values[k];
    }
  }
#pragma unroll
  for (int k = 0; k < kOutputs; ++k)
    WithStorage(operands.dtypes[k], [&](auto tag) {
      using S = typename decltype(tag)::Type;
      S* const data = reinterpret_cast<S*>(operands.data[k]);
      MixedVector<S> vector;
#pragma unroll
      for (int i = 0; i < kMixedWidth; ++i) Round(results[k][i], &vector.values[i]);
      if (operands.have_vectors[k] && left == kMixedWidth) {
        *reinterpret_cast<MixedVector<S>*>(data + offsets[0][k]) = vector;
      } else {
#pragma unroll
        for (int i = 0; i < kMixedWidth; ++i)
          if (i < left) data[offsets[i][k]] = vector.values[i];
      }
    });
}

}  // namespace twinop::elementwise
