// Register-resident rows: their values, phase by phase, and the reductions over them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "twinop/rowwise/reduce.cuh"
#include "twinop/rowwise/resident_access.cuh"

namespace twinop::rowwise {

template <class Traits>
class ResidentValues : public ResidentAccess<Traits> {
 public:
  using Access = ResidentAccess<Traits>;
  using F = typename Traits::F;
  using S = typename Traits::S;
  static constexpr int kLanes = Traits::kLanes;
  static constexpr int kVectors = Traits::kVectors;
  static constexpr int kTotals = Traits::kTotals;
  using T = ElementCompute<S>;
  static constexpr int kWidth = Access::kWidth;
  static constexpr int kInputs = kRowInputs<F>;
  static constexpr bool kPrepares = F::kPreparedOutput >= 0;
  static constexpr int kResident = kPrepares ? 1 : kEarlyInputs<F>;
  static constexpr int kColumns = Access::kColumns;
  static constexpr int kSums = F::kColumnSums;
  static constexpr bool kPacked = Traits::kTuning == Tuning::kPacked;

  using typename Access::ColumnVectors;
  using RawRow = typename Access::MovedRow[kResident];
  using RowValues = Values<T, kInputs>[kVectors][kWidth];

  using Access::Access;

 protected:
  using Access::arguments_;
  using Access::ForEachVector;
  using Access::Has;

  __device__ __forceinline__ static void ColumnValues(const ColumnVectors& columns,
                                                      Values<T, kColumns> (&values)[kWidth]) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      T unpacked[kWidth];
      Unpack(columns[c], unpacked);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) values[i][c] = unpacked[i];
    }
  }

  // The values of the row's k-th vector as the phases before kPhase leave them.
  template <int kPhase>
  __device__ __forceinline__ void VectorValues(const F& functor, const RawRow& raw, int k,
                                               Values<T, kInputs> (&values)[kWidth]) const {
#pragma unroll
    for (int j = 0; j < kInputs; ++j) {
      T unpacked[kWidth];
      if (j < kResident) Unpack(raw[j < kResident ? j : 0].vectors[k], unpacked);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) values[i][j] = j < kResident ? unpacked[i] : T(0);
    }
    Values<T, kColumns> columns[kWidth] = {};
    if constexpr (kSums > 0) ColumnValues(resident_columns_[k], columns);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      if constexpr (kPrepares) {
        ReplayPhases<kPhase>(functor, values[i], columns[i]);
      } else {
        Replay<kPhase, S>(functor, values[i], columns[i]);
      }
    }
  }

  // Hides that the words are the same as before, so that values are unpacked from them again.
  __device__ __forceinline__ static void Forget(RawRow& raw) {
    if constexpr (kPacked) {
#pragma unroll
      for (auto& input : raw)
#pragma unroll
        for (auto& vector : input.vectors)
#pragma unroll
          for (auto& word : vector.words) asm volatile("" : "+r"(word));
    }
  }

  // Hides the origin of the values: the compiler would unpack them again for each phase.
  __device__ __forceinline__ static void Pin(RowValues& values) {
    if constexpr (sizeof(S) == 2) {
#pragma unroll
      for (auto& vector : values)
#pragma unroll
        for (auto& value : vector)
#pragma unroll
          for (int j = 0; j < kResident; ++j) asm("" : "+f"(value[j].value));
    }
  }

  // Runs all phases, one after another.
  __device__ __forceinline__ void Reduce(F* functor, RowValues& values, bool exists, RawRow& raw) {
    if constexpr (F::kMoments && kLanes == 0 && sizeof(S) == 2) {
      ReduceMoments(functor, values, exists, raw);
    } else {
      ReduceEach(functor, values, exists, raw, std::make_index_sequence<kPhases<F>>{});
    }
  }

  // BeginRows runs before the first of several rows is reduced, NextRow before each of the others.
  __device__ __forceinline__ void BeginRows() {
    if constexpr (kLanes == 0) {
      __shared__ BlockStorage<T> storage[2];
      storage_ = Access::Remembered(storage);
      static_assert(F::Phases::At(0) == F::Phases::At(kPhases<F> - 1));
#pragma unroll
      for (int i = 0; i < 2; ++i)
        storage_[i].template Pad<F::Phases::At(0)>(threadIdx.x, blockDim.x / 32);
    }
  }
  __device__ __forceinline__ void NextRow() {
    if constexpr (kPhases<F> == 1) storage_index_ ^= 1;
  }

  ColumnVectors resident_columns_[kVectors] = {};

 private:
  static constexpr int kChains = std::min(kWidth, 4);

  template <std::size_t... kPhase>
  __device__ __forceinline__ void ReduceEach(F* functor, RowValues& values, bool exists,
                                             RawRow& raw, std::index_sequence<kPhase...>) {
    (ReducePhase<static_cast<int>(kPhase)>(functor, values, exists, raw), ...);
  }

  template <int kPhase>
  __device__ __forceinline__ void ReducePhase(F* functor, RowValues& values, bool exists,
                                              RawRow& raw) {
    constexpr Reduction kOp = F::Phases::At(kPhase);
    using Total = Terms<F, T, kPhase>;
    ThreadTotals<kOp, Total, kChains> sums[kTotals];
    Forget(raw);
    ForEachVector(exists, [&](int k, auto whole) {
      if constexpr (kPacked) VectorValues<kPhase>(*functor, raw, k, values[k]);
      // In the phases, only ops that sum columns look at the column inputs.
      Values<T, kColumns> columns[kWidth];
      if constexpr (kSums > 0) ColumnValues(resident_columns_[k], columns);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const auto term = functor->Term(Phase<kPhase>{}, values[k][i], columns[i]);
        if (whole || Has(k, i)) sums[k % kTotals].Add(i, term);
      }
    });
    Total totals[kTotals];
#pragma unroll
    for (int t = 0; t < kTotals; ++t) totals[t] = sums[t].Sum();
    if constexpr (kLanes > 0) {
      totals[0] = ReduceLanes<kLanes, kOp>(totals[0]);
    } else {
      // Rows that follow each other need another barrier before a phase's storage is used again:
      // that of the next phase, or of the next row if there is only one phase.
      if constexpr (kSums > 0) {
        static_assert(kPhases<F> <= 2);
        totals[0] = ReduceBlock<kOp, true>(totals, threadIdx.x, blockDim.x, 0,
                                           &storage_[kPhases<F> == 1 ? storage_index_ : kPhase]);
      } else {
        __shared__ BlockStorage<T> storage;
        totals[0] = ReduceBlock<kOp>(totals, threadIdx.x, blockDim.x, 0, &storage);
      }
    }
    functor->Finish(Phase<kPhase>{}, totals[0]);
  }

  // Runs both phases of F::kMoments at once: the squares of the values as they are take one pass
  // and one barrier. They cancel only where most of them belong to the mean; then the second phase
  // runs after all.
  __device__ __forceinline__ void ReduceMoments(F* functor, RowValues& values, bool exists,
                                                RawRow& raw) {
    using One = Values<T, 1>;
    ThreadTotals<kSum, One, kChains> sums[kTotals];
    ThreadTotals<kSquares, One, kChains> squares[kTotals];
    Forget(raw);
    ForEachVector(exists, [&](int k, auto whole) {
      if constexpr (kPacked) VectorValues<0>(*functor, raw, k, values[k]);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const One term = functor->Term(Phase<0>{}, values[k][i], {});
        if (!whole && !Has(k, i)) continue;
        sums[k % kTotals].Add(i, term);
        squares[k % kTotals].Add(i, term);
      }
    });
    Values<T, 2> totals[kTotals];
#pragma unroll
    for (int t = 0; t < kTotals; ++t) totals[t] = {{sums[t].Sum()[0], squares[t].Sum()[0]}};
    __shared__ BlockStorage<T> storage;
    totals[0] = ReduceBlock<kSum>(totals, threadIdx.x, blockDim.x, 0, &storage);
    const T sum = totals[0][0], all = totals[0][1];
    functor->Finish(Phase<0>{}, One{{sum}});
    Values<T, kInputs> zero = {};
    const T minus_mean = functor->Term(Phase<1>{}, zero, {})[0];
    const T left = Fma(sum, minus_mean, all);
    constexpr float kMostCancelled = 64;  // 6 of 24 bits
    // False for NaN. The squares of large bfloat16 numbers may be infinite.
    if (Plain(all) <= kMostCancelled * Plain(left) && Plain(all) < INFINITY) {
      functor->Finish(Phase<1>{}, One{{left}});
      if constexpr (!kPacked) {  // the values as the phase would leave them
#pragma unroll
        for (auto& vector : values)
#pragma unroll
          for (auto& value : vector) static_cast<void>(functor->Term(Phase<1>{}, value, {}));
      }
    } else {
      ReducePhase<1>(functor, values, exists, raw);
    }
  }

  BlockStorage<T>* storage_;
  int storage_index_ = 0;
};

}  // namespace twinop::rowwise
