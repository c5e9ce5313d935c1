// Rows held in registers: a part of a warp, a warp or a block takes a row, loads all of it before
// the first use, reduces and writes.
#pragma once

#include <cstdint>

#include "kernels/rowwise_access.cuh"
#include "kernels/rowwise_reduce.cuh"

namespace twinop::rowwise {

// kLanes 0: a block a row, of as many threads as it is launched with. kPacked: the row is held as
// it is stored, a 16-bit one in half the registers, and its values are computed again for each
// phase.
template <class F, class S, class W, int kLanes, int kVectors, int kThreads, bool kPacked,
          bool kAligned>
class HeldRows {
 public:
  using T = ElementCompute<S>;
  using Sum = Compute<S>;
  static constexpr int kWidth = kVectorBytes / sizeof(S);
  static constexpr int kInputs = kRowInputs<F>;
  static constexpr int kHeld = kInputs - F::kLateInputs;
  static constexpr int kColumns = kColumnInputs<F>;
  static constexpr int kSums = F::kColumnSums;
  static constexpr int kGroups = kLanes > 0 ? kThreads / kLanes : 1;

  template <class U>
  using Loaded = std::conditional_t<kAligned, Vector<U, kWidth>, ShiftedVector<U, kWidth>>;
  using RawRow = Loaded<S>[kHeld][kVectors];
  using ColumnVectors = Loaded<W>[kColumns + 1];
  using RowValues = Values<T, kInputs>[kVectors][kWidth];

  __device__ HeldRows(const F& functor, const Arguments<F, S, W>& arguments)
      : functor_(functor),
        arguments_(arguments),
        columns_(static_cast<int>(arguments.rows.columns)),
        lanes_(kLanes > 0 ? kLanes : static_cast<int>(blockDim.x)),
        lane_(static_cast<int>(kLanes > 0 ? threadIdx.x % kLanes : threadIdx.x)),
        group_(kLanes > 0 ? threadIdx.x / kLanes : 0) {}

  // A row for each group of threads.
  __device__ __forceinline__ void RunOnce() {
    const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kGroups + group_;
    const bool exists = row < arguments_.rows.count;
    RawRow raw = {};
    if (exists) LoadRow(row, raw);
    Row(row, exists, raw, [] {});
  }

  // Rows until there are no more, the next one loaded while this one is reduced; sums of the
  // columns on the way.
  __device__ __forceinline__ void RunAndSum(Sum* partials) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) LoadColumns<false>(k, held_columns_[k]);
    const std::int64_t count = arguments_.rows.count;
    const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * kGroups;
    std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kGroups;
    RawRow next = {};
    if (first + group_ < count) LoadRow(first + group_, next);
    for (; first < count; first += stride) {
      const std::int64_t row = first + group_;
      RawRow raw;
#pragma unroll
      for (int j = 0; j < kHeld; ++j)
#pragma unroll
        for (int k = 0; k < kVectors; ++k) raw[j][k] = next[j][k];
      Row(row, row < count, raw, [&] {
        if (row + stride < count) LoadRow(row + stride, next);
      });
    }
    WriteSums(partials);
  }

 private:
  // The first element of this lane's k-th vector, and the elements of the row from there on: none,
  // or all where tensors are aligned.
  __device__ __forceinline__ int Column(int k) const { return (k * lanes_ + lane_) * kWidth; }
  __device__ __forceinline__ int Left(int k) const { return columns_ - Column(k); }
  __device__ __forceinline__ bool Has(int k, int i) const { return kAligned || Left(k) > i; }

  // A row, or a value for each column, of a tensor.
  template <class U>
  struct Place {
    const U* row;
    Span<U> tensor;
  };
  __device__ __forceinline__ Place<S> Input(int j, std::int64_t row) const {
    const S* const input = arguments_.inputs[j];
    const std::int64_t stride = arguments_.strides[j];
    return {input + row * stride, {input, input + (arguments_.rows.count - 1) * stride + columns_}};
  }
  __device__ __forceinline__ Place<W> ColumnInput(int c) const {
    const W* const column = arguments_.columns[c];
    return {column, {column, column + columns_}};
  }

  template <class U>
  __device__ __forceinline__ void Load(const Place<U>& place, int k, Loaded<U>* loaded) const {
    if constexpr (kAligned) {
      if (Left(k) > 0) LoadAligned(place.row + Column(k), loaded);
    } else {
      loaded->Load(place.row + Column(k), min(Left(k), kWidth), place.tensor);
    }
  }
  template <class U>
  __device__ __forceinline__ void Get(const Loaded<U>& loaded, const Place<U>& place, int left,
                                      int k, T (&values)[kWidth]) const {
    if constexpr (kAligned) {
      Unpack(loaded, values);
    } else {
      Unpack(loaded.Get(place.row + Column(k), min(left, kWidth), place.tensor), values);
    }
  }

  __device__ __forceinline__ void LoadRow(std::int64_t row, RawRow& raw) const {
#pragma unroll
    for (int k = 0; k < kVectors; ++k)
#pragma unroll
      for (int j = 0; j < kHeld; ++j) Load(Input(j, row), k, &raw[j][k]);
  }

  __device__ __forceinline__ bool AllPresent() const {
    bool present = true;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) present = present && arguments_.columns[c] != nullptr;
    return present;
  }

  template <bool kAllPresent>
  __device__ __forceinline__ void LoadColumns(int k, ColumnVectors& columns) const {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      columns[c] = {};
      if (kAllPresent || arguments_.columns[c] != nullptr) Load(ColumnInput(c), k, &columns[c]);
    }
  }

  template <bool kAllPresent>
  __device__ __forceinline__ void ColumnValues(const ColumnVectors& columns, int k,
                                               Values<T, kColumns> (&values)[kWidth]) const {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const bool absent = !kAllPresent && arguments_.columns[c] == nullptr;
      T unpacked[kWidth];
      Get(columns[c], ColumnInput(c), absent ? 0 : Left(k), k, unpacked);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) values[i][c] = absent ? T(functor_.Neutral(c)) : unpacked[i];
    }
  }

  // The values of the row's k-th vector as the phases before kPhase leave them.
  template <int kPhase>
  __device__ __forceinline__ void VectorValues(const F& functor, std::int64_t row, bool exists,
                                               const RawRow& raw, int k,
                                               Values<T, kInputs> (&values)[kWidth]) const {
#pragma unroll
    for (int j = 0; j < kInputs; ++j) {
      T unpacked[kWidth];
      if (j < kHeld)
        Get(raw[j < kHeld ? j : 0][k], Input(j, row), exists ? Left(k) : 0, k, unpacked);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) values[i][j] = j < kHeld ? unpacked[i] : T(0);
    }
    Values<T, kColumns> columns[kWidth] = {};
    if constexpr (kSums > 0) ColumnValues<false>(held_columns_[k], k, columns);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) Replay<kPhase, S>(functor, values[i], columns[i]);
  }

  // Hides that the words are what they were, so that values made of them are made again.
  __device__ __forceinline__ static void Forget(RawRow& raw) {
    if constexpr (kPacked) {
#pragma unroll
      for (auto& input : raw)
#pragma unroll
        for (auto& vector : input)
#pragma unroll
          for (auto& word : vector.words) asm volatile("" : "+r"(word));
    }
  }

  // load_next() runs once the row is in registers.
  template <class LoadNext>
  __device__ __forceinline__ void Row(std::int64_t row, bool exists, RawRow& raw,
                                      const LoadNext& load_next) {
    F functor = functor_;
    RowValues values;
    if constexpr (!kPacked) {
#pragma unroll
      for (int k = 0; k < kVectors; ++k) VectorValues<0>(functor, row, exists, raw, k, values[k]);
    }
    load_next();
    Reduce(&functor, values, row, exists, raw, std::make_index_sequence<kPhases<F>>{});
    // Without branches around the loads where there is nothing to ask.
    if (AllPresent()) {
      Write<true>(functor, values, row, exists, raw);
    } else {
      Write<false>(functor, values, row, exists, raw);
    }
  }

  template <std::size_t... kPhase>
  __device__ __forceinline__ void Reduce(F* functor, RowValues& values, std::int64_t row,
                                         bool exists, RawRow& raw, std::index_sequence<kPhase...>) {
    (ReducePhase<static_cast<int>(kPhase)>(functor, values, row, exists, raw), ...);
  }

  template <int kPhase>
  __device__ __forceinline__ void ReducePhase(F* functor, RowValues& values, std::int64_t row,
                                              bool exists, RawRow& raw) {
    constexpr Reduction kOp = F::Phases::At(kPhase);
    using Total = Terms<F, T, kPhase>;
    ThreadTotals<kOp, Total, kWidth> totals;
    Forget(raw);
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (!exists || Left(k) <= 0) continue;
      if constexpr (kPacked) VectorValues<kPhase>(*functor, row, exists, raw, k, values[k]);
      // Of the phases, only those of ops that sum columns look at the column inputs.
      Values<T, kColumns> columns[kWidth];
      if constexpr (kSums > 0) ColumnValues<false>(held_columns_[k], k, columns);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const Total term = functor->Term(Phase<kPhase>{}, values[k][i], columns[i]);
        if (Has(k, i)) totals.Add(i, term);
      }
    }
    Total total = totals.Sum();
    if constexpr (kLanes > 0) {
      total = ReduceLanes<kLanes, kOp>(total);
    } else {
      __shared__ BlockStorage<T> storage;
      total = ReduceBlock<kOp>(total, threadIdx.x, blockDim.x, 0, &storage);
    }
    functor->Finish(Phase<kPhase>{}, total);
  }

  template <bool kAllPresent>
  __device__ __forceinline__ void Write(const F& functor, RowValues& values, std::int64_t row,
                                        bool exists, RawRow& raw) {
    Forget(raw);
    // The column inputs are loaded here, one vector ahead: registers for all of them would cost
    // rows in flight.
    ColumnVectors next;
    if constexpr (kSums == 0) LoadColumns<kAllPresent>(0, next);
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if constexpr (kPacked) VectorValues<kPhases<F>>(functor, row, exists, raw, k, values[k]);
#pragma unroll
      for (int j = kHeld; j < kInputs; ++j) {
        if (arguments_.inputs[j] == nullptr || !exists) continue;
        Loaded<S> late{};
        Load(Input(j, row), k, &late);
        T unpacked[kWidth];
        Get(late, Input(j, row), Left(k), k, unpacked);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) values[k][i][j] = unpacked[i];
      }
      Values<T, kColumns> columns[kWidth];
      if constexpr (kSums > 0) {
        ColumnValues<false>(held_columns_[k], k, columns);
      } else {
        ColumnValues<kAllPresent>(next, k, columns);
        if (k + 1 < kVectors) LoadColumns<kAllPresent>(k + 1, next);
      }
      T out[F::kRowOutputs][kWidth];
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const auto result = functor.Result(values[k][i], columns[i]);
#pragma unroll
        for (int o = 0; o < F::kRowOutputs; ++o) out[o][i] = result[o];
        if constexpr (kSums > 0) {
          const auto term = functor.ColumnTerm(values[k][i]);
#pragma unroll
          for (int s = 0; s < kSums; ++s)
            sums_[s][k][i] = AddRounded(sums_[s][k][i], exists ? Plain(term[s]) : Sum(0));
        }
      }
#pragma unroll
      for (int o = 0; o < F::kRowOutputs; ++o) {
        if (arguments_.outputs[o] == nullptr) continue;
        S* const place = arguments_.outputs[o] + row * arguments_.rows.columns + Column(k);
        if constexpr (kAligned) {
          if (exists && Left(k) > 0) StoreAligned(Pack<S>(out[o]), place);
        } else {
          constexpr int kNeighbours = kLanes > 0 ? kLanes : 32;
          StoreShifted(Pack<S>(out[o]), place, exists ? Left(k) : 0, lane_ % kNeighbours,
                       kNeighbours);
        }
      }
    }
  }

  // partials[sum][block][column]. The groups of a block add theirs up first, in turn.
  __device__ __forceinline__ void WriteSums(Sum* partials) {
    const std::int64_t columns = arguments_.rows.columns;
    if constexpr (kLanes > 0) {
      __shared__ Sum shared[kSums][kLanes * kVectors * kWidth];
      for (int g = 0; g < kGroups; ++g) {
        if (g == group_) AddSums(g > 0, [&](int s, int column) { return &shared[s][column]; });
        __syncthreads();
      }
      for (int s = 0; s < kSums; ++s)
        for (int c = threadIdx.x; c < columns; c += kThreads)
          partials[(s * gridDim.x + blockIdx.x) * columns + c] = shared[s][c];
    } else {
      AddSums(false, [&](int s, int column) {
        return &partials[(s * gridDim.x + blockIdx.x) * columns + column];
      });
    }
  }

  template <class Place>
  __device__ __forceinline__ void AddSums(bool to_others, const Place& place) {
#pragma unroll
    for (int s = 0; s < kSums; ++s)
#pragma unroll
      for (int k = 0; k < kVectors; ++k)
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          if (Left(k) <= i) continue;
          Sum* const sum = place(s, Column(k) + i);
          *sum = to_others ? *sum + sums_[s][k][i] : sums_[s][k][i];
        }
  }

  const F& functor_;
  const Arguments<F, S, W>& arguments_;
  const int columns_, lanes_, lane_, group_;
  ColumnVectors held_columns_[kVectors] = {};
  Sum sums_[kSums + 1][kVectors][kWidth] = {};
};

template <class F, class S, class W, int kLanes, int kVectors, int kThreads, bool kPacked,
          bool kAligned>
__global__ void __launch_bounds__(kThreads, HeldThreads(F::kColumnSums > 0, kPacked) / kThreads)
    HeldKernel(F functor, Arguments<F, S, W> arguments, Compute<S>* partials) {
  HeldRows<F, S, W, kLanes, kVectors, kThreads, kPacked, kAligned> rows(functor, arguments);
  if constexpr (F::kColumnSums > 0) {
    rows.RunAndSum(partials);
  } else {
    rows.RunOnce();
  }
}

}  // namespace twinop::rowwise
