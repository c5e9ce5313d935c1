// Elementwise ops on the CPU: one loop that the compiler vectorises for each instruction set,
// chosen at run time, on the framework's own threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <tuple>
#include <type_traits>
#include <utility>

#include "kernels/elementwise.h"
#include "kernels/primitives/cpu_features.h"

namespace twinop::elementwise {

// Elements that one pass of the main loop takes, a whole number of registers for every type. (Of 16
// elements GCC makes straight-line code before it reads `ivdep`: outputs that overwrite their input
// then take a scalar copy of it, 8 to 15 times slower.)
inline constexpr std::int64_t kBlock = 64;

// Blocks below which a second thread costs more than it brings. A pool's wake-up is 2 to 5 us, in
// which one core moves about 64 KiB (measured here with 2 threads: equal at 2^15 fp32 elements).
inline constexpr std::int64_t kGrain = (1 << 15) / kBlock;

// Of two NaNs an addition keeps the first operand's sign and payload, and which operand that is, is
// the compiler's choice for each loop and instruction set: results are one NaN.
template <class T>
TWINOP_INLINE T OneNan(T value) {
  return value == value ? value : std::numeric_limits<T>::quiet_NaN();
}
template <class T, int kCount>
TWINOP_INLINE Results<T, kCount> OneNan(Results<T, kCount> results) {
  for (T& value : results.values) value = OneNan(value);
  return results;
}

// A functor that only picks one of its operands says `static constexpr bool kPicks = true;`: NaNs
// pass as they are, at half the cost where the tensors lie in the caches.
template <class F, class = void>
inline constexpr bool kPicks = false;
template <class F>
inline constexpr bool kPicks<F, std::void_t<decltype(F::kPicks)>> = F::kPicks;

template <class T, class F, class... Values>
TWINOP_INLINE auto Evaluate(const F& functor, Values... values) {
  auto results = functor(values...);
  if constexpr (kPicks<F> || std::is_same_v<T, BFloat16>) {  // of bfloat16 Round makes one NaN
    return results;
  } else if constexpr (std::is_same_v<std::tuple<Values...>, std::tuple<decltype(results)>>) {
    // One value, whose NaN passes: seen before the arithmetic, not behind it. (The processor makes
    // those of other values, and always the same.)
    return ((values == values) && ...) ? results
                                       : std::numeric_limits<decltype(results)>::quiet_NaN();
  } else {
    return OneNan(results);
  }
}

// Rounds a functor's result, or each of its results, into the outputs.
template <class R, class T>
TWINOP_INLINE void Store(R result, T* const (&out)[1], std::int64_t i) {
  Round(result, &out[0][i]);
}
template <class R, class T, int kCount>
TWINOP_INLINE void Store(const Results<R, kCount>& results, T* const (&out)[kCount],
                         std::int64_t i) {
  for (int k = 0; k < kCount; ++k) Round(results.values[k], &out[k][i]);
}

// Each element is read and written once, by one pass: an output may be its input's very memory.
template <class F, class T, int kOutputs, int kInputs, std::size_t... I>
TWINOP_INLINE void Elements(const F& functor, const Outputs<T, kOutputs>& out,
                            const Inputs<T, kInputs>& in, std::int64_t begin, std::int64_t end,
                            std::index_sequence<I...>) {
#pragma GCC ivdep
  for (std::int64_t i = begin; i < end; ++i)
    Store(Evaluate<T>(functor, ToCompute(in[I][i])...), out.pointers, i);
}

// A block's results wait in a buffer: with nothing stored in between, the compiler interleaves the
// arithmetic of the block's registers (-fschedule-insns), each a long chain of dependent operations
// (measured: exp, tanh, softplus and gelu 1.2 to 1.4 times faster).
template <class F, class T, int kOutputs, int kInputs>
TWINOP_INLINE void Range(const F& functor, const Outputs<T, kOutputs>& out,
                         const Inputs<T, kInputs>& in, std::int64_t count) {
  constexpr auto kIndices = std::make_index_sequence<kInputs>{};
  std::int64_t i = 0;
  for (; i + kBlock <= count; i += kBlock) {
    alignas(64) T buffers[kOutputs][kBlock];
    Outputs<T, kOutputs> results;
    for (int k = 0; k < kOutputs; ++k) results.pointers[k] = buffers[k];
    Inputs<T, kInputs> block = in;
    for (const T*& pointer : block.pointers) pointer += i;
    Elements(functor, results, block, 0, kBlock, kIndices);
    for (int k = 0; k < kOutputs; ++k) std::memcpy(out[k] + i, buffers[k], sizeof(buffers[k]));
  }
  Elements(functor, out, in, i, count, kIndices);
}

// The same loops, compiled once per instruction set.
template <class F, class T, int kOutputs, int kInputs>
using RangeFunction = void (*)(const F& functor, Outputs<T, kOutputs> out, Inputs<T, kInputs> in,
                               std::int64_t count);

template <class F, class T, int kOutputs, int kInputs>
void RangeBaseline(const F& functor, Outputs<T, kOutputs> out, Inputs<T, kInputs> in,
                   std::int64_t count) {
  Range(functor, out, in, count);
}
#if defined(__x86_64__)
template <class F, class T, int kOutputs, int kInputs>
TWINOP_TARGET_AVX2 void RangeAvx2(const F& functor, Outputs<T, kOutputs> out, Inputs<T, kInputs> in,
                                  std::int64_t count) {
  Range(functor, out, in, count);
}
template <class F, class T, int kOutputs, int kInputs>
TWINOP_TARGET_AVX512 void RangeAvx512(const F& functor, Outputs<T, kOutputs> out,
                                      Inputs<T, kInputs> in, std::int64_t count) {
  Range(functor, out, in, count);
}
#endif

template <class F, class T, int kOutputs, int kInputs>
RangeFunction<F, T, kOutputs, kInputs> ChooseRange() {
#if defined(__x86_64__)
  if (CpuLevel() == Level::kAvx512) return RangeAvx512<F, T, kOutputs, kInputs>;
  if (CpuLevel() == Level::kAvx2) return RangeAvx2<F, T, kOutputs, kInputs>;
#endif
  return RangeBaseline<F, T, kOutputs, kInputs>;
}

// For this processor; chosen when the library is loaded, so that a call only reads it.
template <class F, class T, int kOutputs, int kInputs>
inline const RangeFunction<F, T, kOutputs, kInputs> kRange = ChooseRange<F, T, kOutputs, kInputs>();

// The frameworks' pools cut in different places. Cut between blocks, they give every element the
// same code: whether it is in a block or behind the last one depends on the tensor's size alone.
template <class F, class T, int kOutputs, int kInputs>
[[gnu::noinline]] void OnPool(const Call& call, const F& functor) {
  const std::int64_t count = call.outputs[0].numel;
  call.context->ParallelFor(
      (count + kBlock - 1) / kBlock, kGrain, [&](std::int64_t begin, std::int64_t end) {
        const std::int64_t first = begin * kBlock;
        auto out = OutputPointers<T, kOutputs>(call);
        auto in = InputPointers<T, kInputs>(call);
        for (T*& pointer : out.pointers) pointer += first;
        for (const T*& pointer : in.pointers) pointer += first;
        kRange<F, T, kOutputs, kInputs>(functor, out, in, std::min(end * kBlock, count) - first);
      });
}

// Tensors that are not one flat sequence (strided_cpu.h).
template <class F, class T, int kOutputs, int kInputs>
void Strided(const Call& call, const F& functor);

template <template <class> class F>
Status Cpu(const Call& call) {
  return DispatchFloat(call.outputs[0].dtype, [&call](auto tag) {
    using T = typename decltype(tag)::Type;
    using Functor = F<Compute<T>>;
    constexpr int kInputs = kArity<F>;
    constexpr int kOutputs = kResults<F>;
    const auto functor = MakeFunctor<Functor>(call.attributes);
    const std::int64_t count = call.outputs[0].numel;
    if (!IsFlat(call, kOutputs, kInputs)) {
      Strided<Functor, T, kOutputs, kInputs>(call, functor);
    } else if (count <= kGrain * kBlock) {
      kRange<Functor, T, kOutputs, kInputs>(functor, OutputPointers<T, kOutputs>(call),
                                            InputPointers<T, kInputs>(call), count);
    } else {
      OnPool<Functor, T, kOutputs, kInputs>(call, functor);
    }
    return Status();
  });
}

}  // namespace twinop::elementwise
