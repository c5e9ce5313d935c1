// The elementwise kernel of tensors that are one flat sequence of aligned vectors, and what it
// shares with the other one (strided_kernel.cuh).
#pragma once

#include <cstdint>
#include <utility>

#include "twinop/elementwise.h"
#include "twinop/elementwise/choose.h"
#include "twinop/math/math.h"
#include "twinop/primitives/l2_hints.cuh"
#include "twinop/primitives/launch.cuh"
#include "twinop/primitives/vector.cuh"

namespace twinop::elementwise {

// The second argument of __launch_bounds__: as many blocks as the 64 Ki registers of a
// multiprocessor serve, or 0, which leaves the registers to the compiler.
constexpr int BlocksOf(int registers) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 800 && __CUDA_ARCH__ != 900 && __CUDA_ARCH__ != 1000
  constexpr int kMaxThreads = 1536;
#else
  constexpr int kMaxThreads = 2048;
#endif
  if (registers == 0) return 0;
  return (registers * kMaxThreads <= 65536 ? kMaxThreads : 65536 / registers) / kThreads;
}

// The fast path of a functor of one result, for most values. `Takes` is false for values that need
// special cases. `Try` returns the `value` without special cases and whether it `holds` after all.
template <class F>
struct FastPath {
  static constexpr bool kExists = false;
};

// The results of a functor over vectors, one for each output.
template <class F, class T, int kWidth, int kOutputs, int kInputs, std::size_t... I>
__device__ __forceinline__ void ApplyEach(const F& functor, Vector<T, kWidth> (&out)[kOutputs],
                                          const Vector<T, kWidth> (&in)[kInputs],
                                          std::index_sequence<I...>) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    auto results = functor(ComputeAt(in[I], i)...);
    if constexpr (kResultCount<decltype(results)> == 1) {
      Round(results, &out[0].values[i]);
    } else {
#pragma unroll
      for (int k = 0; k < kOutputs; ++k) Round(results.values[k], &out[k].values[i]);
    }
  }
}

// The lanes that take part in Apply, given to all lanes of a warp, of which some may have no
// vector.
template <class F>
__device__ __forceinline__ unsigned LanesOf(bool takes_part) {
  if constexpr (FastPath<F>::kExists) return __ballot_sync(0xFFFFFFFFu, takes_part);
  return 0;
}

// A warp takes the functor's fast path if all its values do. There is one branch for all elements,
// because a branch for each would keep their arithmetic from being interleaved.
template <class F, class T, int kWidth, int kOutputs, int kInputs, std::size_t... I>
__device__ __forceinline__ void Apply(const F& functor, unsigned lanes,
                                      Vector<T, kWidth> (&out)[kOutputs],
                                      const Vector<T, kWidth> (&in)[kInputs],
                                      std::index_sequence<I...> indices) {
  if constexpr (FastPath<F>::kExists) {
    static_assert(kOutputs == 1);
    bool fast = true;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) fast = fast & FastPath<F>::Takes(ComputeAt(in[I], i)...);
    if (__all_sync(lanes, fast)) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const auto result = FastPath<F>::Try(ComputeAt(in[I], i)...);
        fast = fast & result.holds;
        Round(result.value, &out[0].values[i]);
      }
      if (__all_sync(lanes, fast)) return;
    }
  }
  ApplyEach(functor, out, in, indices);
}

// A block takes kThreads * kLoads consecutive vectors. The loads of a thread are kThreads vectors
// apart, so that each is coalesced across the warp, and all are issued before the first use. The
// first threads of the grid take the elements behind the last whole vector.
template <class F, class T, int kLoads, int kOutputs, int kInputs>
__global__ void __launch_bounds__(kThreads, kLoads <= 2 || sizeof(T) == 8
                                                ? BlocksOf(kTuning<F>.registers)
                                                : 0)
    FlatKernel(F functor, std::int64_t count, Outputs<T, kOutputs> out, Inputs<T, kInputs> in,
               L2ReadPolicy reads) {
  constexpr int kWidth = kVectorBytes / sizeof(T);
  using V = Vector<T, kWidth>;
  constexpr auto kIndices = std::make_index_sequence<kInputs>{};
  PdlTriggerAndWait();
  const std::int64_t vectors = count / kWidth;
  const std::int64_t first =
      static_cast<std::int64_t>(blockIdx.x) * (kThreads * kLoads) + static_cast<int>(threadIdx.x);

  V loaded[kLoads][kInputs];
#pragma unroll
  for (int j = 0; j < kLoads; ++j) {
    const std::int64_t v = first + j * kThreads;
    if (v < vectors) {
#pragma unroll
      for (int k = 0; k < kInputs; ++k)
        loaded[j][k] = reinterpret_cast<const V*>(reads.Of(in[k]))[v];
    }
  }
#pragma unroll
  for (int j = 0; j < kLoads; ++j) {
    const std::int64_t v = first + j * kThreads;
    const unsigned lanes = LanesOf<F>(v < vectors);
    if (v < vectors) {
      V results[kOutputs];
      Apply(functor, lanes, results, loaded[j], kIndices);
#pragma unroll
      for (int k = 0; k < kOutputs; ++k) reinterpret_cast<V*>(out[k])[v] = results[k];
    }
  }

  const std::int64_t tail = vectors * kWidth + first;
  const bool has_tail = blockIdx.x == 0 && tail < count;
  const unsigned lanes = LanesOf<F>(has_tail);
  if (has_tail) {
    Vector<T, 1> last[kInputs];
    Vector<T, 1> results[kOutputs];
#pragma unroll
    for (int k = 0; k < kInputs; ++k) last[k].values[0] = in[k][tail];
    Apply(functor, lanes, results, last, kIndices);
#pragma unroll
    for (int k = 0; k < kOutputs; ++k) out[k][tail] = results[k].values[0];
  }
}

}  // namespace twinop::elementwise
