// The inner loops of row-wise ops on the CPU: up to kLanes elements at once, each added to a sum of
// its own, so that the compiler vectorises without reordering a sum.
#pragma once

#include <cstdint>
#include <limits>
#include <utility>

#include "kernels/rowwise.h"

namespace twinop::rowwise {

// Elements that one pass of the loops takes: element c of a row is added to sum c % kLanes. Whole
// registers for every type, and enough of them to hide the latency of an addition.
inline constexpr std::int64_t kLanes = 64;

// Terms that are added one after another before they join the total: of a long row, one long sum
// would lose digits.
inline constexpr std::int64_t kRun = 64;

template <Reduction kOp, class T>
TWINOP_INLINE T Start() {
  return kOp == kMax ? -std::numeric_limits<T>::infinity() : T(0);
}

// (A maximum may lose a NaN: the sum that follows it has it.)
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
    for (std::int64_t i = 0; i < kLanes; ++i) totals[t][i] = Start<kOp, T>();
}
template <Reduction kOp, class T, int kCount>
TWINOP_INLINE void Add(T (&totals)[kCount][kLanes], const T (&terms)[kCount][kLanes]) {
  for (int t = 0; t < kCount; ++t)
    for (std::int64_t i = 0; i < kLanes; ++i)
      totals[t][i] = Combine<kOp>(totals[t][i], terms[t][i]);
}

// All of them in one, in pairs.
template <Reduction kOp, std::int64_t kHalf = kLanes / 2, class T>
TWINOP_INLINE T Fold(T (&totals)[kLanes]) {
  for (std::int64_t i = 0; i < kHalf; ++i) totals[i] = Combine<kOp>(totals[i], totals[i + kHalf]);
  if constexpr (kHalf > 1) return Fold<kOp, kHalf / 2>(totals);
  return totals[0];
}

// The phase that leaves the row's values in memory for what comes after it, if the row is held: the
// first where reading costs more than an access, else the last.
template <class F, class S>
inline constexpr int kHoldPhase = sizeof(S) == 2 ? 0 : kPhases<F> - 1;
template <class F, class T, int kPhase>
inline constexpr int kTerms = sizeof(Terms<F, T, kPhase>) / sizeof(T);

// ---------------------------------------------------------------------------------- some elements

// Where up to kLanes elements are: dense in each tensor.
template <class F, class S, class W>
struct Window {
  const S* in[kRowInputs<F>];
  const W* columns[kColumnInputs<F> + 1];
  S* out[F::kRowOutputs];
  Compute<S>* sums[F::kColumnSums + 1];
  Compute<S>* held[kRowInputs<F>];
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

template <int kPhase, bool kFromHeld, int kInput, class F, class S, class W>
TWINOP_INLINE Compute<S> RowValue(const Window<F, S, W>& window, std::int64_t i) {
  if constexpr (kInput >= kEarlyInputs<F> && kPhase < kPhases<F>) {
    return 0;  // only Result looks at it
  } else if constexpr (kInput < kEarlyInputs<F> && kFromHeld) {
    return window.held[kInput][i];
  } else {
    return ToCompute(window.in[kInput][i]);
  }
}

// The row's values as the phases before kPhase left them.
template <int kPhase, bool kHeld, class F, class S, class W, int... J>
TWINOP_INLINE auto RowValues(const F& functor, const Window<F, S, W>& window, std::int64_t i,
                             std::integer_sequence<int, J...>) {
  constexpr bool kFromHeld = kHeld && (kPhase > kHoldPhase<F, S>);
  Values<Compute<S>, kRowInputs<F>> row{
      {static_cast<Compute<S>>(RowValue<kPhase, kFromHeld, J>(window, i))...}};
  if constexpr (!kFromHeld) Replay<kPhase, S>(functor, row, ColumnValues(window, i));
  return row;
}
template <int kPhase, bool kHeld, class F, class S, class W>
TWINOP_INLINE auto RowValues(const F& functor, const Window<F, S, W>& window, std::int64_t i) {
  return RowValues<kPhase, kHeld>(functor, window, i,
                                  std::make_integer_sequence<int, kRowInputs<F>>{});
}

// The elements' functor: one for all of a row, or, where each is of another row, one for each.
template <class F>
struct OneFunctor {
  const F functor;
  TWINOP_INLINE const F& operator[](std::int64_t) const { return functor; }
};

// Which elements of a window exist, in the compute type; all of them where there is no such list.
struct AllExist {
  TWINOP_INLINE bool operator[](std::int64_t) const { return true; }
};

// Adds the terms of `count` elements, each to the total in its place.
template <int kPhase, bool kHeld, class F, class S, class W, class Functors, class Exist,
          int kCount>
TWINOP_INLINE void AddTerms(const Functors functors, const Window<F, S, W>& window,
                            std::int64_t count, const Exist exist,
                            Compute<S> (&totals)[kCount][kLanes]) {
#pragma GCC ivdep
  for (std::int64_t i = 0; i < count; ++i) {
    auto row = RowValues<kPhase, kHeld>(functors[i], window, i);
    const auto terms = functors[i].Term(Phase<kPhase>{}, row, ColumnValues(window, i));
    for (int t = 0; t < kCount; ++t) {
      const auto total = WithTerm<F::Phases::At(kPhase)>(totals[t][i], terms, t);
      totals[t][i] = exist[i] ? total : totals[t][i];
    }
    if constexpr (kHeld && kPhase >= kHoldPhase<F, S>)
      for (int j = 0; j < kEarlyInputs<F>; ++j) window.held[j][i] = row[j];
  }
  // GCC would take two such loops for one, and then vectorise neither (-floop-unroll-and-jam).
  asm volatile("");
}

template <bool kHeld, class F, class S, class W, class Functors>
TWINOP_INLINE void WriteResults(const Functors functors, const Window<F, S, W>& window,
                                std::int64_t count) {
#pragma GCC ivdep
  for (std::int64_t i = 0; i < count; ++i) {
    const auto row = RowValues<kPhases<F>, kHeld>(functors[i], window, i);
    const auto result = functors[i].Result(row, ColumnValues(window, i));
    if constexpr (F::kColumnSums > 0) {
      const auto terms = functors[i].ColumnTerm(row);
      for (int s = 0; s < F::kColumnSums; ++s)
        window.sums[s][i] = WithTerm(window.sums[s][i], terms, s);
    }
    for (int k = 0; k < F::kRowOutputs; ++k) Round(result[k], &window.out[k][i]);
  }
  asm volatile("");
}

}  // namespace twinop::rowwise
