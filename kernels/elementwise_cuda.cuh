// Elementwise ops on CUDA: 16-byte vectors, as many loads in flight as the machine takes, 64-bit
// counts, a scalar kernel for misaligned tensors. Every element is computed alone, so the result
// does not depend on the path.
#pragma once

#include <cstdint>
#include <utility>

#include "kernels/cuda_launch.cuh"
#include "kernels/elementwise.h"
#include "kernels/elementwise_settings.h"

namespace twinop::elementwise {

template <class T, int kWidth>
struct alignas(sizeof(T) * kWidth) Vector {
  T values[kWidth];
};

template <class F, class T, int kWidth, int kInputs, std::size_t... I>
__device__ __forceinline__ Vector<T, kWidth> Apply(const F& functor,
                                                   const Vector<T, kWidth> (&in)[kInputs],
                                                   std::index_sequence<I...>) {
  Vector<T, kWidth> out;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) Round(functor(ToCompute(in[I].values[i])...), &out.values[i]);
  return out;
}

// A block owns kThreads * kLoads consecutive vectors; a thread's loads are kThreads vectors apart,
// so that each is coalesced across the warp, and all are issued before the first use. The elements
// behind the last whole vector go to the first threads of the grid.
template <class F, class T, int kWidth, int kThreads, int kLoads, int kInputs>
__global__ void __launch_bounds__(kThreads)
    ElementwiseKernel(F functor, std::int64_t count, T* out, Inputs<T, kInputs> in) {
  using V = Vector<T, kWidth>;
  constexpr auto kIndices = std::make_index_sequence<kInputs>{};
  const std::int64_t vectors = count / kWidth;
  const std::int64_t first =
      static_cast<std::int64_t>(blockIdx.x) * (kThreads * kLoads) + static_cast<int>(threadIdx.x);

  V loaded[kLoads][kInputs];
#pragma unroll
  for (int j = 0; j < kLoads; ++j) {
    const std::int64_t v = first + j * kThreads;
    if (v < vectors) {
#pragma unroll
      for (int k = 0; k < kInputs; ++k) loaded[j][k] = reinterpret_cast<const V*>(in[k])[v];
    }
  }
#pragma unroll
  for (int j = 0; j < kLoads; ++j) {
    const std::int64_t v = first + j * kThreads;
    if (v < vectors) reinterpret_cast<V*>(out)[v] = Apply(functor, loaded[j], kIndices);
  }

  if constexpr (kWidth > 1) {
    const std::int64_t tail = vectors * kWidth + first;
    if (blockIdx.x == 0 && tail < count) {
      Vector<T, 1> last[kInputs];
#pragma unroll
      for (int k = 0; k < kInputs; ++k) last[k].values[0] = in[k][tail];
      out[tail] = Apply(functor, last, kIndices).values[0];
    }
  }
}

template <class F, class T, int kWidth, int kThreads, int kLoads, int kInputs>
Status LaunchElementwise(const Call& call, const F& functor, T* out, Inputs<T, kInputs> in) {
  const std::int64_t count = call.outputs[0].numel;
  const std::int64_t per_block = std::int64_t{kThreads} * kLoads * kWidth;
  const std::int64_t blocks = (count + per_block - 1) / per_block;
  return LaunchKernel(ElementwiseKernel<F, T, kWidth, kThreads, kLoads, kInputs>, blocks, kThreads,
                      call, functor, count, out, in);
}

template <template <class> class F>
Status Cuda(const Call& call) {
  return DispatchFloat(call.outputs[0].dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    constexpr int kInputs = kArity<F>;
    constexpr int kWidth = kVectorBytes / sizeof(T);
    auto functor = MakeFunctor<F<Compute<T>>>(call.attributes);
    auto in = InputPointers<T, kInputs>(call);
    T* out = call.outputs[0].as<T>();
    bool aligned = IsAligned(out, kVectorBytes);
    for (const T* pointer : in.pointers) aligned = aligned && IsAligned(pointer, kVectorBytes);
    using Functor = decltype(functor);
    if (!aligned) {
      return LaunchElementwise<Functor, T, 1, kThreads, kScalarLoads>(call, functor, out, in);
    }
    const std::int64_t bytes = call.outputs[0].bytes();
    if (bytes >= kResidentMinBytes && bytes <= kResidentMaxBytes) {
      return LaunchElementwise<Functor, T, kWidth, kThreads, kResidentLoads>(call, functor, out,
                                                                             in);
    }
    return LaunchElementwise<Functor, T, kWidth, kThreads, kLoads>(call, functor, out, in);
  });
}

}  // namespace twinop::elementwise
