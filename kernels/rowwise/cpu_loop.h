// The loop over the elements of a row on the CPU, compiled for each instruction set. It takes
// chunks of kLanes elements and adds each to a sum of its own. The compiler can therefore vectorise
// it without reordering a sum: the result has the same bits for every instruction set.
#pragma once

#include <cstdint>
#include <limits>
#include <utility>

#include "twinop/primitives/cpu_features.h"
#include "twinop/rowwise.h"
#include "twinop/rowwise/cpu_rows.h"

namespace twinop::rowwise {

// A chunk fills whole registers for every type, and enough of them to hide an addition's latency.
inline constexpr std::int64_t kLanes = 64;

// The number of terms in a block of a sum. Each block is summed separately and then added to the
// total, because a single sum over a long row would lose precision.
inline constexpr std::int64_t kBlockTerms = 64;

// Pointers to elements of the compute type in each tensor.
template <class F, class T>
struct Chunk {
  const T* in[kRowInputs<F>];
  const T* columns[kColumnInputs<F> + 1];
  T* out[F::kRowOutputs];
  T* sums[F::kColumnReductions + 1];
  T* kept[kRowInputs<F>];  // what Term makes of a row's values (kReplacesValues)

  TWINOP_INLINE Chunk At(std::int64_t c) const {
    Chunk chunk = *this;
    for (int j = 0; j < kRowInputs<F>; ++j) chunk.in[j] += c, chunk.kept[j] += c;
    for (int j = 0; j < kColumnInputs<F>; ++j) chunk.columns[j] += c;
    for (int k = 0; k < F::kRowOutputs; ++k) chunk.out[k] += c;
    for (int s = 0; s < F::kColumnReductions; ++s) chunk.sums[s] += c;
    return chunk;
  }
};

template <class F, class T>
struct Row {
  Chunk<F, T> body, tail;  // the whole chunks, and the last one, of fewer elements
  std::int64_t full;       // elements of whole chunks
  const T* mask;           // 1 for the elements of the tail, else 0; null: there is none
  T* fused;                // memory for whole chunks and the tail (kFusedSumOutput)
  DType dtype;             // of the row's tensors
};

// ---------------------------------------------------------------------------------- reductions

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

// The mask of a chunk whose elements are all valid.
struct AllValid {
  TWINOP_INLINE bool operator[](std::int64_t) const { return true; }
};

// ---------------------------------------------------------------------------------- the loop

template <class F, class T>
struct RowLoop {
  using C = Chunk<F, T>;
  using RowIndices = std::make_integer_sequence<int, kRowInputs<F>>;

  template <Level kLevel>
  TWINOP_INLINE static void Run(const F& initial, const Row<F, T>& row) {
    C body = row.body, tail = row.tail;
    if constexpr (F::kFusedSumOutput >= 0) {
      for (std::int64_t c = 0; c < row.full; c += kLanes)
        WriteSums(initial, body.At(c), row.fused + c);
      if (row.mask != nullptr) WriteSums(initial, tail, row.fused + row.full);
      RoundInPlace(row.dtype, row.fused, row.full + (row.mask != nullptr ? kLanes : 0));
      body.in[0] = row.fused;
      tail.in[0] = row.fused + row.full;
    }
    F functor = initial;
    ReduceAll(&functor, row, body, tail, std::make_integer_sequence<int, kPhases<F>>{});
    for (std::int64_t c = 0; c < row.full; c += kLanes) WriteResults(functor, body.At(c));
    if (row.mask != nullptr) WriteResults(functor, tail);
  }

 private:
  template <int... J>
  TWINOP_INLINE static auto Columns([[maybe_unused]] const C& chunk,
                                    [[maybe_unused]] std::int64_t i,
                                    std::integer_sequence<int, J...>) {
    return Values<T, kColumnInputs<F>>{{chunk.columns[J][i]...}};
  }
  TWINOP_INLINE static auto Columns(const C& chunk, std::int64_t i) {
    return Columns(chunk, i, std::make_integer_sequence<int, kColumnInputs<F>>{});
  }

  template <int kPhase, int kInput>
  TWINOP_INLINE static T Value(const C& chunk, std::int64_t i) {
    if constexpr (kInput >= kEarlyInputs<F> && kPhase < kPhases<F>) return 0;  // Result reads it
    if constexpr (F::kReplacesValues && kInput < kEarlyInputs<F> && kPhase == kPhases<F>)
      return chunk.kept[kInput][i];
    return chunk.in[kInput][i];
  }
  // The row's values after the phases before kPhase.
  template <int kPhase, int... J>
  TWINOP_INLINE static auto RowValues(const F& functor, const C& chunk, std::int64_t i,
                                      std::integer_sequence<int, J...>) {
    Values<T, kRowInputs<F>> row{{Value<kPhase, J>(chunk, i)...}};
    if constexpr (!(F::kReplacesValues && kPhase == kPhases<F>))
      ReplayPhases<kPhase>(functor, row, Columns(chunk, i));
    return row;
  }

  TWINOP_INLINE static void WriteSums(const F functor, const C chunk, T* sums) {
#pragma GCC ivdep
    for (std::int64_t i = 0; i < kLanes; ++i)
      sums[i] = functor.FusedSum(RowValues<0>(functor, chunk, i, RowIndices{}));
    asm volatile("");
  }

  // Adds the terms of each element to the totals of its lane.
  template <int kPhase, class Mask, int kCount>
  TWINOP_INLINE static void AddTerms(const F functor, const C chunk, const Mask mask,
                                     T (&totals)[kCount][kLanes]) {
#pragma GCC ivdep
    for (std::int64_t i = 0; i < kLanes; ++i) {
      auto row = RowValues<kPhase>(functor, chunk, i, RowIndices{});
      const auto terms = functor.Term(Phase<kPhase>{}, row, Columns(chunk, i));
      for (int t = 0; t < kCount; ++t) {
        const auto total = WithTerm<F::Phases::At(kPhase)>(totals[t][i], terms, t);
        totals[t][i] = mask[i] ? total : totals[t][i];
      }
      if constexpr (F::kReplacesValues && kPhase == kPhases<F> - 1)
        for (int j = 0; j < kEarlyInputs<F>; ++j) chunk.kept[j][i] = row[j];
    }
    // Without this barrier, GCC fuses two such loops (-floop-unroll-and-jam) and vectorises
    // neither.
    asm volatile("");
  }

  template <int kPhase>
  TWINOP_INLINE static void Reduce(F* functor, const Row<F, T>& row, const C& body, const C& tail) {
    constexpr Reduction kOp = F::Phases::At(kPhase);
    constexpr int kCount = sizeof(Terms<F, T, kPhase>) / sizeof(T);
    constexpr std::int64_t kBlockElements = kBlockTerms * kLanes;
    alignas(64) T totals[kCount][kLanes];
    Clear<kOp>(totals);
    std::int64_t c = 0;
    if (row.full >= 2 * kBlockElements) {
      alignas(64) T block[kCount][kLanes];
      for (; c + kBlockElements <= row.full; c += kBlockElements) {
        Clear<kOp>(block);
        for (std::int64_t i = c; i < c + kBlockElements; i += kLanes)
          AddTerms<kPhase>(*functor, body.At(i), AllValid{}, block);
        Add<kOp>(totals, block);
      }
    }
    for (; c < row.full; c += kLanes) AddTerms<kPhase>(*functor, body.At(c), AllValid{}, totals);
    if (row.mask != nullptr) AddTerms<kPhase>(*functor, tail, row.mask, totals);
    Terms<F, T, kPhase> total;
    for (int t = 0; t < kCount; ++t) total[t] = FoldLanes<kOp>(totals[t]);
    functor->Finish(Phase<kPhase>{}, total);
  }
  template <int... P>
  TWINOP_INLINE static void ReduceAll(F* functor, const Row<F, T>& row, const C& body,
                                      const C& tail, std::integer_sequence<int, P...>) {
    (Reduce<P>(functor, row, body, tail), ...);
  }

  TWINOP_INLINE static void WriteResults(const F functor, const C chunk) {
#pragma GCC ivdep
    for (std::int64_t i = 0; i < kLanes; ++i) {
      const auto row = RowValues<kPhases<F>>(functor, chunk, i, RowIndices{});
      const auto result = functor.Result(row, Columns(chunk, i));
      if constexpr (F::kColumnReductions > 0) {
        const auto terms = functor.ColumnTerm(row);
        for (int s = 0; s < F::kColumnReductions; ++s)
          chunk.sums[s][i] = rowwise::WithTerm(chunk.sums[s][i], terms, s);
      }
      for (int k = 0; k < F::kRowOutputs; ++k) chunk.out[k][i] = result[k];
    }
    asm volatile("");
  }
};

}  // namespace twinop::rowwise
