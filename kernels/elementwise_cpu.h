// Elementwise ops on the CPU: one loop that the compiler vectorises for each instruction set,
// chosen at run time, on the framework's own threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "kernels/cpu_features.h"
#include "kernels/elementwise.h"

namespace twinop::elementwise {

// Elements that one pass of the main loop takes, a whole number of registers for every type. (Of 16
// elements GCC makes straight-line code before it reads `ivdep`: outputs that overwrite their input
// then take a scalar copy of it, 8 to 15 times slower.)
inline constexpr std::int64_t kBlock = 64;

// Blocks below which a second thread costs more than it brings. A pool's wake-up is 2 to 5 us, in
// which one core moves about 64 KiB (measured here with 2 threads: equal at 2^15 fp32 elements).
inline constexpr std::int64_t kGrain = (1 << 15) / kBlock;

// Each element is read and written once, by one pass: an output may be its input's very memory.
template <class F, class T, int kInputs, std::size_t... I>
TWINOP_INLINE void Elements(const F& functor, T* out, const Inputs<T, kInputs>& in,
                            std::int64_t begin, std::int64_t end, std::index_sequence<I...>) {
#pragma GCC ivdep
  for (std::int64_t i = begin; i < end; ++i) Round(functor(ToCompute(in[I][i])...), &out[i]);
}

template <class F, class T, int kInputs>
TWINOP_INLINE void Range(const F& functor, T* out, const Inputs<T, kInputs>& in,
                         std::int64_t count) {
  constexpr auto kIndices = std::make_index_sequence<kInputs>{};
  std::int64_t i = 0;
  for (; i + kBlock <= count; i += kBlock) Elements(functor, out, in, i, i + kBlock, kIndices);
  Elements(functor, out, in, i, count, kIndices);
}

// The same loops, compiled once per instruction set.
template <class F, class T, int kInputs>
using RangeFunction = void (*)(const F& functor, T* out, Inputs<T, kInputs> in, std::int64_t count);

template <class F, class T, int kInputs>
void RangeBaseline(const F& functor, T* out, Inputs<T, kInputs> in, std::int64_t count) {
  Range(functor, out, in, count);
}
#if defined(__x86_64__)
template <class F, class T, int kInputs>
TWINOP_TARGET_AVX2 void RangeAvx2(const F& functor, T* out, Inputs<T, kInputs> in,
                                  std::int64_t count) {
  Range(functor, out, in, count);
}
template <class F, class T, int kInputs>
TWINOP_TARGET_AVX512 void RangeAvx512(const F& functor, T* out, Inputs<T, kInputs> in,
                                      std::int64_t count) {
  Range(functor, out, in, count);
}
#endif

template <class F, class T, int kInputs>
RangeFunction<F, T, kInputs> ChooseRange() {
#if defined(__x86_64__)
  if (CpuLevel() == Level::kAvx512) return RangeAvx512<F, T, kInputs>;
  if (CpuLevel() == Level::kAvx2) return RangeAvx2<F, T, kInputs>;
#endif
  return RangeBaseline<F, T, kInputs>;
}

// For this processor; chosen when the library is loaded, so that a call only reads it.
template <class F, class T, int kInputs>
inline const RangeFunction<F, T, kInputs> kRange = ChooseRange<F, T, kInputs>();

// The frameworks' pools cut in different places. Cut between blocks, they give every element the
// same code: whether it is in a block or behind the last one depends on the tensor's size alone.
template <class F, class T, int kInputs>
[[gnu::noinline]] void OnPool(const Call& call, const F& functor) {
  const std::int64_t count = call.outputs[0].numel;
  call.context->ParallelFor(
      (count + kBlock - 1) / kBlock, kGrain, [&](std::int64_t begin, std::int64_t end) {
        const std::int64_t first = begin * kBlock;
        auto in = InputPointers<T, kInputs>(call);
        for (const T*& pointer : in.pointers) pointer += first;
        T* const out = call.outputs[0].as<T>() + first;
        kRange<F, T, kInputs>(functor, out, in, std::min(end * kBlock, count) - first);
      });
}

template <template <class> class F>
Status Cpu(const Call& call) {
  return DispatchFloat(call.outputs[0].dtype, [&call](auto tag) {
    using T = typename decltype(tag)::Type;
    using Functor = F<Compute<T>>;
    constexpr int kInputs = kArity<F>;
    const auto functor = MakeFunctor<Functor>(call.attributes);
    const std::int64_t count = call.outputs[0].numel;
    if (count <= kGrain * kBlock) {
      kRange<Functor, T, kInputs>(functor, call.outputs[0].as<T>(), InputPointers<T, kInputs>(call),
                                  count);
    } else {
      OnPool<Functor, T, kInputs>(call, functor);
    }
    return Status();
  });
}

}  // namespace twinop::elementwise
