// Elementwise ops on the CPU: one loop that the compiler vectorises for each instruction set, chosen at
// run time, on the framework's own threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "kernels/cpu_features.h"
#include "kernels/elementwise.h"

namespace twinop::elementwise {

// Elements of one fixed-size block. The tail runs the very same code on a padded copy, so that a result
// does not depend on where the thread pool cuts.
inline constexpr std::int64_t kBlock = 64;

// Elements below which a second thread costs more than it brings. A pool's wake-up is 2 to 5 us, in which
// one core moves about 64 KiB (measured here with 2 threads: equal at 2^15 fp32 elements).
inline constexpr std::int64_t kGrain = 1 << 15;

template <class F, class T, int kInputs, std::size_t... I>
TWINOP_INLINE void Block(const F& functor, T* out, const Inputs<T, kInputs>& in,
                         std::index_sequence<I...>) {
#pragma GCC ivdep  // an output that overwrites its input has no dependence from one element to the next
  for (std::int64_t i = 0; i < kBlock; ++i) Round(functor(ToCompute(in[I][i])...), &out[i]);
}

template <class F, class T, int kInputs>
TWINOP_INLINE void Range(const F& functor, T* out, Inputs<T, kInputs> in, std::int64_t begin,
                         std::int64_t end) {
  constexpr auto kIndices = std::make_index_sequence<kInputs>{};
  Inputs<T, kInputs> block;
  std::int64_t i = begin;
  for (; i + kBlock <= end; i += kBlock) {
    for (int k = 0; k < kInputs; ++k) block.pointers[k] = in[k] + i;
    Block(functor, out + i, block, kIndices);
  }
  if (i == end) return;
  T padded[kInputs + 1][kBlock] = {};
  for (int k = 0; k < kInputs; ++k) {
    std::copy(in[k] + i, in[k] + end, padded[k]);
    block.pointers[k] = padded[k];
  }
  Block(functor, padded[kInputs], block, kIndices);
  std::copy(padded[kInputs], padded[kInputs] + (end - i), out + i);
}

// The same loop, compiled once per instruction set.
template <class F, class T, int kInputs>
void RangeBaseline(const F& functor, T* out, Inputs<T, kInputs> in, std::int64_t begin,
                   std::int64_t end) {
  Range(functor, out, in, begin, end);
}
#if defined(__x86_64__)
template <class F, class T, int kInputs>
TWINOP_TARGET_AVX2 void RangeAvx2(const F& functor, T* out, Inputs<T, kInputs> in,
                                  std::int64_t begin, std::int64_t end) {
  Range(functor, out, in, begin, end);
}
template <class F, class T, int kInputs>
TWINOP_TARGET_AVX512 void RangeAvx512(const F& functor, T* out, Inputs<T, kInputs> in,
                                      std::int64_t begin, std::int64_t end) {
  Range(functor, out, in, begin, end);
}
#endif

template <template <class> class F>
Status Cpu(const Call& call) {
  return DispatchFloat(call.outputs[0].dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    constexpr int kInputs = kArity<F>;
    auto functor = MakeFunctor<F<Compute<T>>>(call.attributes);
    using Functor = decltype(functor);
    auto in = InputPointers<T, kInputs>(call);
    T* out = call.outputs[0].as<T>();
    auto range = &RangeBaseline<Functor, T, kInputs>;
#if defined(__x86_64__)
    if (CpuLevel() == Level::kAvx512) range = &RangeAvx512<Functor, T, kInputs>;
    if (CpuLevel() == Level::kAvx2) range = &RangeAvx2<Functor, T, kInputs>;
#endif
    call.context->ParallelFor(
        call.outputs[0].numel, kGrain,
        [&](std::int64_t begin, std::int64_t end) { range(functor, out, in, begin, end); });
    return Status();
  });
}

}  // namespace twinop::elementwise
