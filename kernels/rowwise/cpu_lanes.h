// The inner loops of row-wise ops on the CPU. A loop processes up to kLanes elements and adds each
// to a separate sum. The compiler can therefore vectorise it without reordering a sum.
#pragma once

#include <cstdint>
#include <limits>
#include <utility>

#include "twinop/rowwise.h"

namespace twinop::rowwise {

// The elements of a chunk, which is what one pass of a loop processes. Element c of a row is added
// to sum c % kLanes. A chunk fills whole registers for every type, and enough of them to hide the
// latency of an addition.
inline constexpr std::int64_t kLanes = 64;

// The number of terms in a block of a sum. Each block is summed separately and then added to the
// total, because a single sum over a long row would lose precision.
inline constexpr std::int64_t kBlockTerms = 64;

template <Reduction kOp, class T>
TWINOP_INLINE T ReductionIdentity() {
  return kOp == kMax ? -std::numeric_limits<T>::infinity() : T(0);
}

// A maximum may drop a NaN. The sum that follows it keeps the NaN.
template <Reduction kOp, class T>
TWINOP_INLINE T Combine(T a, T b) {
  if constexpr (kOp == kMax) return b > a ? b : a;
  return a + b;
}

template <Reduction kOp, class T, class Terms>
TWINOP_INLINE T WithTerm(T total, const Terms& terms, int t) {
  if constexpr (kOp == kSum) {
    return rowwise::WithTerm(total, terms, t);
  } else {
    return Combine<kOp>(total, kOp == kSquares ? terms[t] * terms[t] : terms[t]);
  }
}

template <Reduction kOp, class T, int kCount>
TWINOP_INLINE void Clear(T (&totals)[kCount][kLanes]) {
  for (int t = 0; t < kCount; ++t)
    for (std::int64_t i = 0; i < kLanes; ++i) totals[t][i] = ReductionIdentity<kOp, T>();
}
template <Reduction kOp, class T, int kCount>
TWINOP_INLINE void Add(T (&totals)[kCount][kLanes], const T (&terms)[kCount][kLanes]) {
  for (int t = 0; t < kCount; ++t)
    for (std::int64_t i = 0; i < kLanes; ++i)
      totals[t][i] = Combine<kOp>(totals[t][i], terms[t][i]);
}

// Combines the totals of all lanes in pairs.
template <Reduction kOp, std::int64_t kHalf = kLanes / 2, class T>
TWINOP_INLINE T FoldLanes(T (&totals)[kLanes]) {
  for (std::int64_t i = 0; i < kHalf; ++i) totals[i] = Combine<kOp>(totals[i], totals[i + kHalf]);
  if constexpr (kHalf > 1) return FoldLanes<kOp, kHalf / 2>(totals);
  return totals[0];
}

// If the row is buffered, the phase that writes its values to the buffer for later steps. It is the
// first phase for 16-bit types, because a read also needs a conversion. Otherwise it is the last.
template <class F, class S>
inline constexpr int kBufferPhase = sizeof(S) == 2 ? 0 : kPhases<F> - 1;
template <class F, class T, int kPhase>
inline constexpr int kTermCount = sizeof(Terms<F, T, kPhase>) / sizeof(T);

// ---------------------------------------------------------------------------------- a window

// Pointers to up to kLanes elements, which are contiguous in each tensor.
template <class F, class S, class W>
struct Window {
  const S* in[kRowInputs<F>];
  const W* columns[kColumnInputs<F> + 1];
  S* out[F::kRowOutputs];
  Compute<S>* sums[F::kColumnReductions + 1];
  Compute<S>* buffer[kRowInputs<F>];
};

template <class F, class S, class W, int... J>
TWINOP_INLINE auto ColumnValues([[maybe_unused]] const Window<F, S, W>& window,
                                [[maybe_unused]] std::int64_t i, std::integer_sequence<int, J...>) {
  return Values<Compute<S>, kColumnInputs<F>>{{ToCompute(window.columns[J][i])...}};
}
template <class F, class S, class W>
TWINOP_INLINE auto ColumnValues(const Window<F, S, W>& window, std::int64_t i) {
  return ColumnValues(window, i, std::make_integer_sequence<int, kColumnInputs<F>>{});
}

template <int kPhase, bool kFromBuffer, int kInput, class F, class S, class W>
TWINOP_INLINE Compute<S> RowValue(const Window<F, S, W>& window, std::int64_t i) {
  if constexpr (kInput >= kEarlyInputs<F> && kPhase < kPhases<F>) {
    return 0;  // only Result reads it
  } else if constexpr (kInput < kEarlyInputs<F> && kFromBuffer) {
    return window.buffer[kInput][i];
  } else {
    return ToCompute(window.in[kInput][i]);
  }
}

// The row's values after the phases before kPhase.
template <int kPhase, bool kBuffered, class F, class S, class W, int... J>
TWINOP_INLINE auto RowValues(const F& functor, const Window<F, S, W>& window, std::int64_t i,
                             std::integer_sequence<int, J...>) {
  constexpr bool kFromBuffer = kBuffered && (kPhase > kBufferPhase<F, S>);
  Values<Compute<S>, kRowInputs<F>> row{
      {static_cast<Compute<S>>(RowValue<kPhase, kFromBuffer, J>(window, i))...}};
  if constexpr (!kFromBuffer) Replay<kPhase, S>(functor, row, ColumnValues(window, i));
  return row;
}
template <int kPhase, bool kBuffered, class F, class S, class W>
TWINOP_INLINE auto RowValues(const F& functor, const Window<F, S, W>& window, std::int64_t i) {
  return RowValues<kPhase, kBuffered>(functor, window, i,
                                      std::make_integer_sequence<int, kRowInputs<F>>{});
}

// One functor for all elements of a row. (Interleaved rows have one functor for each element.)
template <class F>
struct SharedFunctor {
  const F functor;
  TWINOP_INLINE const F& operator[](std::int64_t) const { return functor; }
};

// The mask of a window in which all elements are valid. (Other masks are arrays of the compute
// type.)
struct AllValid {
  TWINOP_INLINE bool operator[](std::int64_t) const { return true; }
};

// Adds the terms of each of `count` elements to the totals of its lane.
template <int kPhase, bool kBuffered, class F, class S, class W, class Functors, class Mask,
          int kCount>
TWINOP_INLINE void AddTerms(const Functors functors, const Window<F, S, W>& window,
                            std::int64_t count, const Mask mask,
                            Compute<S> (&totals)[kCount][kLanes]) {
#pragma GCC ivdep
  for (std::int64_t i = 0; i < count; ++i) {
    auto row = RowValues<kPhase, kBuffered>(functors[i], window, i);
    const auto terms = functors[i].Term(Phase<kPhase>{}, row, ColumnValues(window, i));
    for (int t = 0; t < kCount; ++t) {
      const auto total = WithTerm<F::Phases::At(kPhase)>(totals[t][i], terms, t);
      totals[t][i] = mask[i] ? total : totals[t][i];
    }
    if constexpr (kBuffered && kPhase >= kBufferPhase<F, S>)
      for (int j = 0; j < kEarlyInputs<F>; ++j) window.buffer[j][i] = row[j];
  }
  // Without this barrier, GCC fuses two such loops (-floop-unroll-and-jam) and vectorises neither.
  asm volatile("");
}

template <bool kBuffered, class F, class S, class W, class Functors>
TWINOP_INLINE void WriteResults(const Functors functors, const Window<F, S, W>& window,
                                std::int64_t count) {
#pragma GCC ivdep
  for (std::int64_t i = 0; i < count; ++i) {
    const auto row = RowValues<kPhases<F>, kBuffered>(functors[i], window, i);
    const auto result = functors[i].Result(row, ColumnValues(window, i));
    if constexpr (F::kColumnReductions > 0) {
      const auto terms = functors[i].ColumnTerm(row);
      for (int s = 0; s < F::kColumnReductions; ++s)
        window.sums[s][i] = WithTerm(window.sums[s][i], terms, s);
    }
    for (int k = 0; k < F::kRowOutputs; ++k) Round(result[k], &window.out[k][i]);
  }
  asm volatile("");
}

}  // namespace twinop::rowwise
