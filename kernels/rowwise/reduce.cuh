// Reductions over the threads that share a row, in an order that only their number decides.
#pragma once

#include "twinop/math/math.h"
#include "twinop/primitives/hopper.cuh"
#include "twinop/rowwise.h"
#include "twinop/rowwise/choose.h"

namespace twinop::rowwise {

template <class F, class S, class W>
inline constexpr OpTraits kTraitsOf{kEarlyInputs<F>,
                                    F::kFusedSumOutput >= 0,
                                    kColumnInputs<F>,
                                    F::kColumnReductions > 0,
                                    F::kGathers || F::kColumnsOfBatch,
                                    F::kAnyWidth && kColumnInputs<F> == 0 && F::kFusedSumOutput < 0,
                                    sizeof(S),
                                    sizeof(W),
                                    F::kQuantises};

// The float or double in a compute type.
__device__ __forceinline__ float Unwrap(ApproxFloat value) { return value.value; }
__device__ __forceinline__ float Unwrap(float value) { return value; }
__device__ __forceinline__ double Unwrap(double value) { return value; }

// A maximum may lose a NaN; the sum that follows has it.
template <Reduction kOp, class T>
__device__ __forceinline__ T Combine(T a, T b) {
  if constexpr (kOp == kMax) return fmax(Unwrap(a), Unwrap(b));
  return Unwrap(a) + Unwrap(b);
}

// The identity of the reduction. Adding -0 changes nothing, so the compiler leaves it out; adding 0
// would.
template <Reduction kOp, class T>
__device__ __forceinline__ T Start() {
  if constexpr (kOp == kMax) return -T(INFINITY);
  return -T(0);
}

// What a thread adds up: kChains totals, so that additions do not wait for each other, which are
// then added in pairs.
template <Reduction kOp, class Total, int kChains>
struct ThreadTotals {
  using T = std::remove_reference_t<decltype(std::declval<Total>()[0])>;
  static constexpr int kTerms = sizeof(Total) / sizeof(T);

  Total totals[kChains];

  __device__ __forceinline__ ThreadTotals() {
#pragma unroll
    for (int i = 0; i < kChains; ++i)
#pragma unroll
      for (int t = 0; t < kTerms; ++t) totals[i][t] = Start<kOp, T>();
  }

  __device__ __forceinline__ void Add(int i, const Total& term) {
#pragma unroll
    for (int t = 0; t < kTerms; ++t) {
      T& total = totals[i % kChains][t];
      if constexpr (kOp == kSquares) {
        total = Fma(term[t], term[t], total);
      } else {
        total = Combine<kOp>(total, term[t]);
      }
    }
  }

  __device__ __forceinline__ void Add(int i, const Products<T, kTerms>& term) {
    static_assert(kOp == kSum);
#pragma unroll
    for (int t = 0; t < kTerms; ++t) {
      T& total = totals[i % kChains][t];
      total = WithTerm(total, term, t);
    }
  }

  __device__ __forceinline__ Total Sum() {
#pragma unroll
    for (int half = kChains / 2; half > 0; half /= 2)
#pragma unroll
      for (int i = 0; i < half; ++i)
#pragma unroll
        for (int t = 0; t < kTerms; ++t)
          totals[i][t] = Combine<kOp>(totals[i][t], totals[i + half][t]);
    return totals[0];
  }
};

// Ends both phases of F::kMoments with the sum of a row's values and that of their squares. These
// cancel only where most of them belong to the mean; then the second phase must run: false.
template <class F, class T>
__device__ __forceinline__ bool FinishMoments(F* functor, const Values<T, 2>& totals) {
  const T sum = totals[0], all = totals[1];
  functor->Finish(Phase<0>{}, Values<T, 1>{{sum}});
  Values<T, kRowInputs<F>> zero = {};
  const T minus_mean = functor->Term(Phase<1>{}, zero, {})[0];
  const T left = Fma(sum, minus_mean, all);
  constexpr float kMostCancelled = 64;  // 6 of 24 bits
  // False for NaN. The squares of large bfloat16 numbers may be infinite.
  if (!(Unwrap(all) <= kMostCancelled * Unwrap(left) && Unwrap(all) < INFINITY)) return false;
  functor->Finish(Phase<1>{}, Values<T, 1>{{left}});
  return true;
}

// Reduces over kLanes neighbouring lanes. All of them get the result.
template <int kLanes, Reduction kOp, class T, int N>
__device__ __forceinline__ Values<T, N> ReduceLanes(Values<T, N> value) {
#pragma unroll
  for (int i = 0; i < N; ++i)
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2)
      value[i] =
          Combine<kOp>(value[i], T(__shfl_xor_sync(0xFFFFFFFFu, Unwrap(value[i]), distance)));
  return value;
}

// Reduces kCount totals over a warp at once: lane i gets that of values[i % kCount]. Even lanes add
// the first of two totals, odd lanes the second, as if each were alone. This takes five shuffles
// for two totals instead of ten, but more registers.
template <Reduction kOp, class T, int kCount>
__device__ __forceinline__ T ReduceWarp(T (&values)[kCount], unsigned lane) {
  static_assert(kCount <= 2);
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const bool odd = (lane & distance) != 0;
#pragma unroll
    for (int i = 0; i < (kCount + 2 * distance - 1) / (2 * distance); ++i) {
      const bool paired = 2 * distance <= kCount;
      T& first = values[paired ? 2 * i : i];
      T& second = values[paired ? 2 * i + 1 : i];
      const T given = odd ? first : second, kept = odd ? second : first;
      values[i] = Combine<kOp>(kept, T(__shfl_xor_sync(0xFFFFFFFFu, Unwrap(given), distance)));
    }
  }
  return values[0];
}

// A place for the total, or two totals, of each warp.
template <class T>
struct BlockStorage {
  static constexpr int kPlaces = 32;
  static constexpr int kPer = 16 / sizeof(T);  // of one access
  alignas(16) T values[2][kPlaces];

  // Fills the places behind the totals of `count` warps that are read as well.
  template <Reduction kOp>
  __device__ __forceinline__ void Pad(unsigned thread, unsigned count) {
    if (thread >= count && thread < min(32u, count + kPer - 1)) {
#pragma unroll
      for (auto& value : values) value[thread] = Start<kOp, T>();
    }
  }
};

// Reduces over a group of `threads` threads of the block (a multiple of 32), which share a barrier.
// All of them get the result. Thread i with two totals has those of threads i and i + threads of a
// group of twice as many with one: the order of additions and the bits are the same. Each thread
// reads the totals of all warps, a broadcast, which takes 100 cycles less than a second round of
// shuffles. `kPadded`: the storage is padded, and there is one total.
template <Reduction kOp, bool kPadded = false, class T, int N, int kTotals>
__device__ __forceinline__ Values<T, N> ReduceBlock(const Values<T, N> (&totals)[kTotals],
                                                    int thread, int threads, int barrier,
                                                    BlockStorage<T>* storage) {
  static_assert(kTotals <= (kPadded ? 1 : 2));
  constexpr int kPer = 16 / sizeof(T);
  const unsigned lane = static_cast<unsigned>(thread) % 32;
  const unsigned warp = static_cast<unsigned>(thread) / 32;
  const unsigned warps = static_cast<unsigned>(threads) / 32;
  const unsigned count = kTotals * warps;
  Values<T, N> value = totals[0];
  if constexpr (kPadded) {
    T sums[N];
#pragma unroll
    for (int i = 0; i < N; ++i) sums[i] = value[i];
    const T sum = ReduceWarp<kOp>(sums, lane);
    if (lane < N) storage->values[lane][warp] = sum;
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      // Even lanes add the first of two totals, odd lanes the second.
      const T given = kTotals == 2 && lane % 2 == 0 ? totals[kTotals - 1][i] : value[i];
      if (kTotals == 2 && lane % 2 == 1) value[i] = totals[kTotals - 1][i];
      value[i] = Combine<kOp>(value[i], T(__shfl_xor_sync(0xFFFFFFFFu, Unwrap(given), 1)));
#pragma unroll
      for (int distance = 2; distance < 32; distance *= 2)
        value[i] =
            Combine<kOp>(value[i], T(__shfl_xor_sync(0xFFFFFFFFu, Unwrap(value[i]), distance)));
      if (lane < kTotals) storage->values[i][warp + lane * warps] = value[i];
      if (warp == 0 && lane >= count && lane < count + kPer - 1)
        storage->values[i][lane] = Start<kOp, T>();
    }
  }
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
  struct alignas(16) Part {
    T values[kPer];
  };
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const Part* const parts = reinterpret_cast<const Part*>(storage->values[i]);
    Part sum = parts[0];
    const auto add = [&](unsigned j) {
      if (j * kPer >= count) return;
#pragma unroll
      for (int k = 0; k < kPer; ++k)
        sum.values[k] = Combine<kOp>(sum.values[k], parts[j].values[k]);
    };
    add(1);
    if (count > 2 * kPer) {
      add(2);
      add(3);
    }
    if (count > 4 * kPer) {
#pragma unroll
      for (unsigned j = 4; j < storage->kPlaces / kPer; ++j) add(j);
    }
    value[i] = Combine<kOp>(sum.values[0], sum.values[1]);
    if constexpr (kPer == 4)
      value[i] = Combine<kOp>(value[i], Combine<kOp>(sum.values[2], sum.values[3]));
  }
  return value;
}

template <Reduction kOp, class T, int N>
__device__ __forceinline__ Values<T, N> ReduceBlock(const Values<T, N>& total, int thread,
                                                    int threads, int barrier,
                                                    BlockStorage<T>* storage) {
  const Values<T, N> totals[] = {total};
  return ReduceBlock<kOp>(totals, thread, threads, barrier, storage);
}

// What the blocks of a cluster send each other: two slots for each phase, for this row and the
// next.
template <class T, int kPhaseCount>
struct ClusterExchange {
  alignas(8) hopper::Barrier arrived[2][kPhaseCount];
  alignas(16) T totals[2][kPhaseCount][2][kMaxCluster];
};

// Reduces over the blocks of a cluster, each with a total of its own: every block sends it to every
// other, and all add them in the order of the ranks. `row_count` counts the rows. A slot is used
// again two rows later; by then each block has received the totals of the row between from all
// others.
template <int kPhase, Reduction kOp, class T, int kPhaseCount, int N>
__device__ __forceinline__ Values<T, N> ReduceCluster(Values<T, N> total, std::uint32_t row_count,
                                                      int thread, int rank, int blocks,
                                                      ClusterExchange<T, kPhaseCount>* storage) {
  const int slot = row_count & 1;
  hopper::Barrier* const arrived = &storage->arrived[slot][kPhase];
  auto& totals = storage->totals[slot][kPhase];
  if (thread == 0) hopper::ArriveExpecting(arrived, blocks * N * sizeof(T));
  if (thread < blocks) {
#pragma unroll
    for (int i = 0; i < N; ++i) hopper::Send(total[i], &totals[i][rank], arrived, thread);
  }
  hopper::WaitForCluster(arrived, (row_count >> 1) & 1);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    T all[kMaxCluster];  // loaded at once
#pragma unroll
    for (int other = 0; other < kMaxCluster; ++other) all[other] = totals[i][other];
    total[i] = all[0];
#pragma unroll
    for (int other = 1; other < kMaxCluster; ++other)
      if (other < blocks) total[i] = Combine<kOp>(total[i], all[other]);
  }
  return total;
}

}  // namespace twinop::rowwise
