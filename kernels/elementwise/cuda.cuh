// Elementwise ops on CUDA. Tensors that are one flat sequence of aligned vectors take the kernel in
// this file, all others the one in strided_cuda.cuh. Every element is computed alone, so the result
// does not depend on the kernel.
#pragma once

#include <cstdint>
#include <utility>

#include "twinop/elementwise.h"
#include "twinop/elementwise/launch_settings.h"
#include "twinop/primitives/l2_hints.cuh"
#include "twinop/primitives/launch.cuh"
#include "twinop/primitives/vector.cuh"

namespace twinop::elementwise {

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
  if constexpr (PlainCase<F>::kExists) return __ballot_sync(0xFFFFFFFFu, takes_part);
  return 0;
}

// A warp whose vectors hold plain values only takes the functor's plain case (tuning.h). There is
// one branch for all elements, because a branch for each would keep their arithmetic from being
// interleaved.
template <class F, class T, int kWidth, int kOutputs, int kInputs, std::size_t... I>
__device__ __forceinline__ void Apply(const F& functor, unsigned lanes,
                                      Vector<T, kWidth> (&out)[kOutputs],
                                      const Vector<T, kWidth> (&in)[kInputs],
                                      std::index_sequence<I...> indices) {
  if constexpr (PlainCase<F>::kExists) {
    static_assert(kOutputs == 1);
    bool plain = true;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) plain = plain & PlainCase<F>::Holds(ComputeAt(in[I], i)...);
    if (__all_sync(lanes, plain)) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const auto result = PlainCase<F>::Try(ComputeAt(in[I], i)...);
        plain = plain & result.plain;
        Round(result.value, &out[0].values[i]);
      }
      if (__all_sync(lanes, plain)) return;
    }
  }
  ApplyEach(functor, out, in, indices);
}

// A block takes kThreads * kLoads consecutive vectors. The loads of a thread are kThreads vectors
// apart, so that each is coalesced across the warp, and all are issued before the first use. The
// first threads of the grid take the elements behind the last whole vector.
template <class F, class T, int kWidth, int kThreads, int kLoads, int kOutputs, int kInputs>
__global__ void __launch_bounds__(kThreads, kLoads <= 2 || sizeof(T) == 8
                                                ? BlocksOf(kThreads, kTuning<F>.registers)
                                                : 0)
    ElementwiseKernel(F functor, std::int64_t count, Outputs<T, kOutputs> out,
                      Inputs<T, kInputs> in, Reads reads) {
  using V = Vector<T, kWidth>;
  constexpr auto kIndices = std::make_index_sequence<kInputs>{};
  WaitForPreviousKernel();
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

  if constexpr (kWidth > 1) {
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
}

// The L2 hint for operands none of which is broadcast.
template <class T>
Reads ReadsOf(std::int64_t count, int operands) {
  return Reads(count * operands * static_cast<std::int64_t>(sizeof(T)));
}

template <class F, class T, int kWidth, int kThreads, int kLoads, int kOutputs, int kInputs>
Status LaunchElementwise(const Call& call, const F& functor, const Outputs<T, kOutputs>& out,
                         const Inputs<T, kInputs>& in) {
  const std::int64_t count = call.outputs[0].numel;
  const std::int64_t per_block = std::int64_t{kThreads} * kLoads * kWidth;
  const std::int64_t blocks = (count + per_block - 1) / per_block;
  return LaunchKernel(ElementwiseKernel<F, T, kWidth, kThreads, kLoads, kOutputs, kInputs>,
                      Dependent({blocks, dim3(kThreads)}), call, functor, count, out, in,
                      ReadsOf<T>(count, kOutputs + kInputs));
}

// Launches the kernel for tensors that are not one flat sequence of aligned vectors
// (strided_cuda.cuh).
template <class F, class T, int kOutputs, int kInputs>
Status LaunchStrided(const Call& call, const F& functor, const Outputs<T, kOutputs>& out,
                     const Inputs<T, kInputs>& in);

template <class T, int kCount>
bool AreAligned(const Pointers<T, kCount>& tensors) {
  bool aligned = true;
  for (T* pointer : tensors.pointers) aligned = aligned && IsAligned(pointer, kVectorBytes);
  return aligned;
}

template <class F, class T, int kOutputs, int kInputs>
Status LaunchFlat(const Call& call, const F& functor, const Outputs<T, kOutputs>& out,
                  const Inputs<T, kInputs>& in) {
  constexpr int kWidth = kVectorBytes / sizeof(T);
  constexpr int kMost = kTuning<F>.loads;
  if constexpr (sizeof(T) < 8) {
    constexpr int kCached = kMost > kLoads ? kMost : kCachedLoads;
    const std::int64_t bytes = call.outputs[0].bytes();
    if (bytes < kElementwisePolicy.cached_min_bytes)
      return LaunchElementwise<F, T, kWidth, kThreads, kLoads>(call, functor, out, in);
    if (bytes <= kElementwisePolicy.cached_max_bytes)
      return LaunchElementwise<F, T, kWidth, kThreads, kCached>(call, functor, out, in);
  }
  return LaunchElementwise<F, T, kWidth, kThreads, kMost>(call, functor, out, in);
}

template <template <class> class F, class AnyCall>
Status Cuda(const AnyCall& call) {
  return DispatchFloat(call.outputs[0].dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    constexpr int kInputs = kArity<F>;
    constexpr int kOutputs = kResults<F>;
    const auto functor = MakeFunctor<F<ElementCompute<T>>>(call);
    const auto out = OutputPointers<T, kOutputs>(call);
    const auto in = InputPointers<T, kInputs>(call);
    const bool flat = IsFlat(call, kOutputs, kInputs);
    const bool aligned = flat && AreAligned(out) && AreAligned(in);
    if (__builtin_expect(kIsTraced, false))
      Trace("  %s", !flat     ? "strides: each element finds its operands"
                    : aligned ? "one flat sequence of aligned vectors"
                              : "one flat sequence that begins between two vectors");
    return aligned ? LaunchFlat(call, functor, out, in) : LaunchStrided(call, functor, out, in);
  });
}

}  // namespace twinop::elementwise
