// Register-resident rows: a part of a warp, a warp or a block takes a row, loads all of it before
// the first use, reduces it and writes the results.
#pragma once

#include <cstdint>

#include "twinop/primitives/launch.cuh"
#include "twinop/rowwise/resident_sums.cuh"
#include "twinop/rowwise/resident_values.cuh"

namespace twinop::rowwise {

template <class Traits>
class ResidentRows : ResidentValues<Traits> {
 public:
  using Base = ResidentValues<Traits>;
  using F = typename Traits::F;
  using S = typename Traits::S;
  using W = typename Traits::W;
  static constexpr int kLanes = Traits::kLanes;
  static constexpr int kVectors = Traits::kVectors;
  static constexpr Tuning kTuning = Traits::kTuning;
  using Access = typename Base::Access;
  using T = ElementCompute<S>;
  using Sum = Compute<S>;
  using Base::kColumns;
  using Base::kInputs;
  using Base::kPacked;
  using Base::kPrepares;
  using Base::kResident;
  using Base::kSums;
  using Base::kWidth;
  static constexpr int kLoaded = kEarlyInputs<F>;
  static_assert(kInputs <= kLoaded + 1);
  static constexpr bool kKeepsColumns = kSums > 0 || kTuning == Tuning::kLatency;

  using typename Base::ColumnVectors;
  using typename Base::RawRow;
  using typename Base::RowValues;
  using Results = typename Access::RowVectors[F::kRowOutputs];  // of a misaligned row

  using Access::SharedBytesOf;

  __device__ ResidentRows(const F& functor, const Arguments<F, S, W>& arguments, const Reads& reads,
                          unsigned char* shared)
      : Base(arguments, reads, shared), functor_(functor) {}

  // Takes one row with each group of threads.
  __device__ __forceinline__ void RunOnce() {
    const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kGroups + group_;
    // The row of a block exists. Where column inputs are loaded, the compiler makes better use of
    // the registers if it does not know that.
    constexpr bool kKnown =
        kLanes == 0 &&
        (kColumns == 0 || Traits::kAccess != RowAccess::kVectors || kTuning == Tuning::kLatency);
    const bool exists = kKnown || row < arguments_.rows.count;
    RawRow raw = {};
    if constexpr (kKeepsColumns) KeepColumns(row);
    if constexpr (kPrepares) {
      Access::LoadPrepared(row, exists, &raw[0]);
    } else {
      if (exists) LoadRow(row, raw);
    }
    // Without this, the compiler would load the column inputs where they are used.
    if constexpr (kTuning == Tuning::kLatency) __syncwarp();
    Row(row, exists, raw, [] {});
  }

  // Takes rows until there are no more, and sums the columns on the way. The next row is loaded
  // while this one is reduced.
  __device__ __forceinline__ void RunAndSum(Sum* partials) {
    KeepColumns(0);
    Base::BeginRows();
    const std::int64_t count = arguments_.rows.count;
    const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * kGroups;
    std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kGroups;
    RawRow next = {};
    if (first + group_ < count) LoadRow(first + group_, next);
    for (; first < count; first += stride) {
      const std::int64_t row = first + group_;
      RawRow raw;
#pragma unroll
      for (int j = 0; j < kResident; ++j) raw[j] = next[j];
      Row(row, kLanes == 0 || row < count, raw, [&] {
        if (row + stride < count) LoadRow(row + stride, next);
      });
      Base::NextRow();
    }
    sums_.Write(*this, arguments_.rows.columns, partials);
  }

 private:
  using Access::arguments_;
  using Access::Asks;
  using Access::group_;
  using Access::Input;
  using Access::kDirect;
  using Access::kGroups;
  using Access::LoadInput;
  using Access::Output;
  using Access::PlainColumns;
  using Access::Realign;
  using Access::StoreMisaligned;
  using Base::ColumnValues;
  using Base::Forget;
  using Base::resident_columns_;

  __device__ __forceinline__ void KeepColumns(std::int64_t row) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k)
      Access::template LoadColumns<false>(functor_, row, k, resident_columns_[k]);
  }

  __device__ __forceinline__ void LoadRow(std::int64_t row, RawRow& raw) const {
#pragma unroll
    for (int j = 0; j < kResident; ++j) LoadInput(j, row, &raw[j]);
  }

  __device__ __forceinline__ bool IsWrittenLast(int o) const {
    return (!kDirect || o != F::kPreparedOutput) && arguments_.outputs[o] != nullptr;
  }

  // load_next() runs once the row is in registers.
  template <class LoadNext>
  __device__ __forceinline__ void Row(std::int64_t row, bool exists, RawRow& raw,
                                      const LoadNext& load_next) {
    F functor = functor_;
    RowValues values;
    if constexpr (!kDirect && !kPrepares) {
#pragma unroll
      for (int j = 0; j < kResident; ++j) Realign(j, row, exists, j > 0 || kSums > 0, &raw[j]);
    }
    if constexpr (!kPacked) {
#pragma unroll
      for (int k = 0; k < kVectors; ++k) Base::template VectorValues<0>(functor, raw, k, values[k]);
      if constexpr (Access::kHidesAddresses) Base::Pin(values);
    }
    load_next();
    Base::Reduce(&functor, values, exists, raw);
    Results results;
    if constexpr (kLoaded < kInputs) {
      if (arguments_.inputs[kLoaded] != nullptr) {
        Write<false, true>(functor, values, row, exists, raw, results);
      } else {
        Write<false, false>(functor, values, row, exists, raw, results);
      }
    } else if (!kKeepsColumns && PlainColumns(row)) {
      Write<true, false>(functor, values, row, exists, raw, results);
    } else {
      Write<false, false>(functor, values, row, exists, raw, results);
    }
    if constexpr (!kDirect) {
#pragma unroll
      for (int o = 0; o < F::kRowOutputs; ++o)
        if (IsWrittenLast(o))  // a block's reduction was a barrier
          StoreMisaligned(o, row, exists, o > 0 || kLanes > 0, results[o]);
    }
  }

  template <bool kPlain, bool kLate>
  __device__ __forceinline__ void Write(const F& functor, RowValues& values, std::int64_t row,
                                        bool exists, RawRow& raw, Results& results) {
    Forget(raw);
    // The column inputs are loaded here, one vector ahead: registers for all of them would cost
    // rows in flight.
    ColumnVectors ahead[2];
    const auto load_ahead = [&](int k) {
      if (!kKeepsColumns && k < kVectors)
        Access::template LoadColumns<kPlain>(functor_, row, k, ahead[k % 2]);
    };
    load_ahead(0);
    // The next vector is loaded before this one is unpacked: over the branches of a misaligned
    // load, unpacked values take more registers than words.
    constexpr bool kBeforeUnpacking = !kDirect && sizeof(S) == 2;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if constexpr (kBeforeUnpacking) load_ahead(k + 1);
      if constexpr (kPacked) Base::template VectorValues<kPhases<F>>(functor, raw, k, values[k]);
#pragma unroll
      for (int j = kLoaded; kLate && j < kInputs; ++j) {
        if (!exists) continue;
        Vector<S, kWidth> late{};
        Access::template Load<false>(Input(j, row), k, Access::columns_, &late);
        T unpacked[kWidth];
        Unpack(late, unpacked);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) values[k][i][j] = unpacked[i];
      }
      Values<T, kColumns> columns[kWidth];
      if constexpr (kKeepsColumns) {
        ColumnValues(resident_columns_[k], columns);
      } else {
        ColumnValues(ahead[k % 2], columns);
        if constexpr (!kBeforeUnpacking) load_ahead(k + 1);
      }
      T out[F::kRowOutputs][kWidth];
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const auto result = functor.Result(values[k][i], columns[i]);
#pragma unroll
        for (int o = 0; o < F::kRowOutputs; ++o) out[o][i] = result[o];
        if constexpr (kSums > 0) {
          if (exists) sums_.Add(k, i, functor.ColumnTerm(values[k][i]));
        }
      }
#pragma unroll
      for (int o = 0; o < F::kRowOutputs; ++o) {
        if (!IsWrittenLast(o)) continue;
        if constexpr (kDirect) {
          if (exists && Asks(k)) Access::template Store<kPlain>(Pack<S>(out[o]), Output(o, row), k);
        } else {
          results[o][k] = Pack<S>(out[o]);
        }
      }
    }
  }

  const F& functor_;
  ResidentColumnSums<Traits> sums_;
};

// Addresses that depend on a table's ids or on a batch's entry take more registers. With kLatency
// a block of kLatencyThreads leaves no more.
template <class Traits>
constexpr int kRegisterLimit =
    ResidentRegisters(sizeof(typename Traits::S), Traits::F::kColumnSums > 0,
                      kEarlyInputs<typename Traits::F>,
                      kColumnInputs<typename Traits::F> > 0 ? sizeof(typename Traits::W) : 0,
                      Traits::kLanes, Traits::kVectors, Traits::kTuning, Traits::kAccess) +
    ((Traits::F::kGathers || Traits::F::kColumnsOfBatch) && Traits::kTuning != Tuning::kLatency
         ? 16
         : 0);

template <class Traits>
__global__ void __maxnreg__(kRegisterLimit<Traits>)
    ResidentKernel(typename Traits::F functor,
                   Arguments<typename Traits::F, typename Traits::S, typename Traits::W> arguments,
                   Reads reads, Compute<typename Traits::S>* partials) {
  extern __shared__ __align__(128) unsigned char memory[];
  WaitForPreviousKernel();
  ResidentRows<Traits> rows(functor, arguments, reads, memory);
  if constexpr (Traits::F::kColumnSums > 0) {
    rows.RunAndSum(partials);
  } else {
    rows.RunOnce();
  }
}

}  // namespace twinop::rowwise
