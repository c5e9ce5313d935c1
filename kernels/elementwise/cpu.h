// Elementwise ops on the CPU. An op adds to a library one loop over contiguous elements of fp32,
// bf16 and fp64, which the compiler vectorises for each instruction set. All ops share the other
// code (cpu.cpp): conversions of other dtypes, strides, broadcasting, the framework's threads.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "twinop/elementwise.h"
#include "twinop/elementwise/choices.h"
#include "twinop/math/cpu.h"
#include "twinop/primitives/cpu_features.h"

namespace twinop::elementwise {

// Elements that one pass of the main loop takes, a whole number of registers for every type. (GCC
// unrolls a loop of 16 before it reads `ivdep`.)
inline constexpr std::int64_t kBlock = 64;

// Up to so many elements, a loop without vectors is quicker than one block.
inline constexpr std::int64_t kFew = 8;

// The most outputs and inputs that an op may have together.
inline constexpr int kMaxOperands = 8;

// Computes `count` elements of every output from those of every input.
using LoopFunction = void(const void* functor, void* const* outputs, const void* const* inputs,
                          std::int64_t count);

struct Loop {
  // A whole number of blocks, or up to kFew elements, or any number if is_scalar.
  LoopFunction* run;
  bool is_scalar;
};

// Runs a loop of `dtype` over the tensors of a call. Those of other dtypes take a loop over fp32.
Status RunLoop(const Call& call, int outputs, int inputs, const Loop& loop, DType dtype,
               const void* functor);

using twinop::OneNan;
template <class T, int kCount>
TWINOP_INLINE Results<T, kCount> OneNan(Results<T, kCount> results) {
  for (T& value : results.values) value = OneNan(value);
  return results;
}

template <class S, class F, class... Values>
TWINOP_INLINE auto Evaluate(const F& functor, Values... values) {
  const auto results = functor(values...);
  if constexpr (kTuning<F>.picks || std::is_same_v<S, BFloat16>) {  // Round makes one NaN
    return results;
  } else if constexpr (kTuning<F>.keeps_nan) {  // a NaN that the processor makes is always the same
    return ((values == values) && ...)
               ? results
               : std::numeric_limits<decltype(functor(values...))>::quiet_NaN();
  } else {
    return OneNan(results);  // not of the values: a functor may have a number for a NaN
  }
}

// Rounds the results of element i into the outputs.
template <class T, class S>
TWINOP_INLINE void Store(T result, S* const (&outputs)[1], std::int64_t i) {
  Round(result, &outputs[0][i]);
}
template <class T, class S, int kCount>
TWINOP_INLINE void Store(const Results<T, kCount>& results, S* const (&outputs)[kCount],
                         std::int64_t i) {
  for (int k = 0; k < kCount; ++k) Round(results.values[k], &outputs[k][i]);
}

// The loop of functor F over elements of S.
template <class F, class S, int kOutputs, int kInputs>
struct BlockLoop {
  template <Level kLevel>
  TWINOP_INLINE static void Run(const void* functor, void* const* outputs,
                                const void* const* inputs, std::int64_t count) {
    Outputs<S, kOutputs> out;
    for (int k = 0; k < kOutputs; ++k) out.pointers[k] = static_cast<S*>(outputs[k]);
    Inputs<S, kInputs> in;
    for (int k = 0; k < kInputs; ++k) in.pointers[k] = static_cast<const S*>(inputs[k]);
    const F& f = *static_cast<const F*>(functor);
    constexpr auto kIndices = std::make_index_sequence<kInputs>{};
    if constexpr (kTuning<F>.is_scalar) {
      Elements(f, out, in, count, kIndices);
      return;
    }
    if (count <= kFew) {
      for (std::int64_t i = 0; i < count; ++i) {
        Element(f, out, in, i, kIndices);
        asm volatile("");  // not vectorised
      }
      return;
    }
    for (std::int64_t i = 0; i < count; i += kBlock) {
      // A block's results stay in a buffer: with no store to memory in between, the compiler
      // interleaves the arithmetic of the block's registers (-fschedule-insns), each a long chain
      // of dependent operations.
      alignas(64) S buffers[kOutputs][kBlock];
      Outputs<S, kOutputs> results;
      for (int k = 0; k < kOutputs; ++k) results.pointers[k] = buffers[k];
      Inputs<S, kInputs> block = in;
      for (const S*& pointer : block.pointers) pointer += i;
      Elements(f, results, block, kBlock, kIndices);
      for (int k = 0; k < kOutputs; ++k) std::memcpy(out[k] + i, buffers[k], sizeof(buffers[k]));
    }
  }

 private:
  template <std::size_t... I>
  TWINOP_INLINE static void Element(const F& functor, const Outputs<S, kOutputs>& out,
                                    const Inputs<S, kInputs>& in, std::int64_t i,
                                    std::index_sequence<I...>) {
    Store(Evaluate<S>(functor, ToCompute(in[I][i])...), out.pointers, i);
  }
  template <std::size_t... I>
  TWINOP_INLINE static void Elements(const F& functor, const Outputs<S, kOutputs>& out,
                                     const Inputs<S, kInputs>& in, std::int64_t count,
                                     std::index_sequence<I...> indices) {
#pragma GCC ivdep
    for (std::int64_t i = 0; i < count; ++i) Element(functor, out, in, i, indices);
  }
};

template <class F, class S, int kOutputs, int kInputs>
Loop LoopOf() {
  return {ByLevel<BlockLoop<F, S, kOutputs, kInputs>, LoopFunction>::Choose(),
          kTuning<F>.is_scalar};
}

// The CPU launcher of functor F.
template <template <class> class F, class AnyCall>
Status Run(const AnyCall& call) {
  constexpr int kInputs = kArity<F>;
  constexpr int kOutputs = kResults<F>;
  static_assert(kInputs + kOutputs <= kMaxOperands);
  if (call.outputs[0].dtype == DType::kFloat64) {
    const auto functor = MakeFunctor<F<double>>(call);
    return RunLoop(call, kOutputs, kInputs, LoopOf<F<double>, double, kOutputs, kInputs>(),
                   DType::kFloat64, &functor);
  }
  const auto functor = MakeFunctor<F<float>>(call);
  bool is_bfloat16 = call.outputs[0].dtype == DType::kBFloat16;
  if constexpr (kMixed<AnyCall>.found)
    is_bfloat16 = is_bfloat16 && !IsMixed<kOutputs, kInputs>(call);
  const Loop loop = is_bfloat16 ? LoopOf<F<float>, BFloat16, kOutputs, kInputs>()
                                : LoopOf<F<float>, float, kOutputs, kInputs>();
  return RunLoop(call, kOutputs, kInputs, loop, is_bfloat16 ? DType::kBFloat16 : DType::kFloat32,
                 &functor);
}

}  // namespace twinop::elementwise
