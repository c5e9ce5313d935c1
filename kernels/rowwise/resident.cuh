// Register-resident rows: a part of a warp, a warp or a block takes a row, loads all of it before
// the first use, reduces it and writes the results.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "twinop/primitives/l2_hints.cuh"
#include "twinop/primitives/launch.cuh"
#include "twinop/primitives/realigner.cuh"
#include "twinop/rowwise/float8.h"
#include "twinop/rowwise/reduce.cuh"

namespace twinop::rowwise {

// The template arguments of a register-resident kernel: types, and a line of kResidentChoices.
template <class Functor, class Storage, class ColumnStorage, int kRowLanes, int kThreadVectors,
          int kThreadTotals, Tuning kTunedFor, RowAccess kRowAccess, int kRegisterLimit>
struct ResidentTraits {
  using F = Functor;
  using S = Storage;                               // of rows
  using W = ColumnStorage;                         // of column inputs
  static constexpr int kLanes = kRowLanes;         // that share a row; 0: all threads of a block
  static constexpr int kVectors = kThreadVectors;  // of each row input, in a thread
  static constexpr int kTotals = kThreadTotals;
  static constexpr Tuning kTuning = kTunedFor;
  static constexpr RowAccess kAccess = kRowAccess;
  static constexpr int kGroups = kLanes > 0 ? kGroupThreads / kLanes : 1;
  static constexpr int kRegisters = kRegisterLimit;
};

template <class Traits>
class ResidentRows {
 public:
  using F = typename Traits::F;
  using S = typename Traits::S;
  using W = typename Traits::W;
  using T = ElementCompute<S>;
  using Sum = Compute<S>;
  static constexpr int kLanes = Traits::kLanes;
  static constexpr int kVectors = Traits::kVectors;
  static constexpr int kTotals = Traits::kTotals;
  static constexpr int kGroups = Traits::kGroups;
  static constexpr Tuning kTuning = Traits::kTuning;
  static constexpr RowAccess kAccess = Traits::kAccess;
  static constexpr bool kRaw16 = kTuning == Tuning::kRaw16;
  static constexpr int kWidth = kVectorBytes / sizeof(S);
  static constexpr int kInputs = kRowInputs<F>;
  static constexpr int kLoaded = kEarlyInputs<F>;
  static constexpr bool kFuses = F::kFusedSumOutput >= 0;
  static constexpr int kResident = kFuses ? 1 : kLoaded;
  static constexpr int kColumns = kColumnInputs<F>;
  static constexpr int kSums = F::kColumnReductions;
  static constexpr bool kPersists = IsPersistent(kTraitsOf<F, S, W>, kLanes, kVectors);
  static_assert(kInputs <= kLoaded + 1);
  static_assert(!kPersists || kPhases<F> > 0);  // whose barriers part the rows
  // Columns between a lane's elements. With kInterleaved a warp takes a part of the row, its lanes
  // take neighbouring elements, and one address serves all elements of a lane.
  static constexpr int kLaneStride = kAccess == RowAccess::kInterleaved ? 32 : 1;
  static_assert(kSums == 0 || kLaneStride == 1);  // a vector is of neighbouring columns
  static constexpr bool kDirect =                 // not through shared memory
      kAccess != RowAccess::kMisaligned || sizeof(S) > 2;
  static constexpr bool kOneByOne = kAccess != RowAccess::kVectors && kDirect;
  static constexpr bool kKeepsColumns = kPersists || kTuning == Tuning::kLatency;

  using MovedRow = MovedVectors<S, kVectors>;
  using ColumnVectors = Vector<W, kWidth>[kColumns + 1];
  using RowVectors = Vector<S, kWidth>[kVectors];
  using RawRow = MovedRow[kResident];
  using RowValues = Values<T, kInputs>[kVectors][kWidth];
  using Results = RowVectors[F::kRowOutputs];  // of a misaligned row

  __device__ ResidentRows(const F& functor, const Arguments<F, S, W>& arguments,
                          const L2ReadPolicy& reads, unsigned char* shared)
      : arguments_(arguments),
        reads_(reads),
        columns_(static_cast<int>(arguments.rows.columns)),
        lanes_(kLanes > 0 ? kLanes : BlockLanes()),
        lane_(static_cast<int>(kLanes > 0 ? threadIdx.x % kLanes : threadIdx.x)),
        group_(kLanes > 0 ? threadIdx.x / kLanes : 0),
        whole_(kAccess != RowAccess::kVectors &&
               __all_sync(0xFFFFFFFFu, Remaining(kVectors - 1) > kWholeRemaining)),
        shared_(Remembered(shared) + group_ * SharedBytesOf(lanes_)),
        functor_(functor) {}

  // Bytes of shared memory that each group of threads needs to realign a row.
  static constexpr __host__ __device__ int SharedBytesOf(int lanes) {
    return kDirect ? 0 : Realigner<S>::SharedVectors(lanes * kVectors) * kVectorBytes;
  }

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
    if constexpr (kFuses) {
      LoadFused(row, exists, &raw[0]);
    } else {
      if (exists) LoadRow(row, raw);
    }
    // Without this, the compiler would load the column inputs where they are used.
    if constexpr (kTuning == Tuning::kLatency) __syncwarp();
    Row(row, exists, raw, [] {});
  }

  // Takes rows until there are no more, and sums the columns on the way, if any. The next row is
  // loaded while this one is reduced.
  __device__ __forceinline__ void RunAll(Sum* partials) {
    KeepColumns(0);
    if constexpr (kSums > 0) BeginRows();
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
      if constexpr (kSums == 0) Forget(resident_columns_);
      Row(row, kLanes == 0 || row < count, raw, [&] {
        if (row + stride < count) LoadRow(row + stride, next);
      });
      if constexpr (kSums > 0) NextRow();
    }
    if constexpr (kSums > 0) WriteSums(partials);
  }

 private:
  // ---------------------------------------------------------------------------------- places

  // The column of the first element of this lane's k-th vector, and the elements of the row from
  // there on: none, or a whole vector where tensors are aligned.
  __device__ __forceinline__ int Column(int k) const {
    if constexpr (kAccess == RowAccess::kInterleaved)
      return (lane_ / kLaneStride * kVectors + k) * kLaneStride * kWidth + lane_ % kLaneStride;
    return (k * lanes_ + lane_) * kWidth;
  }
  __device__ __forceinline__ int Remaining(int k) const { return columns_ - Column(k); }
  __device__ __forceinline__ bool Has(int k, int i) const { return Remaining(k) > i * kLaneStride; }
  // Hides the origin of the address: the compiler would compute it again for each access.
  template <class U>
  static __device__ __forceinline__ U* Remembered(U* shared) {
    std::uint32_t address = hopper::SharedAddress(shared);
    asm("" : "+r"(address));
    return static_cast<U*>(__cvta_shared_to_generic(address));
  }

  // Unsigned, because an address from it is then one instruction.
  template <class U>
  __device__ __forceinline__ U* At(U* row, int k) const {
    if constexpr (kAccess == RowAccess::kInterleaved)
      return row + static_cast<std::uint32_t>(Column(0)) + k * kLaneStride * kWidth;
    return row + static_cast<std::uint32_t>(Column(k));
  }

  // Calls body(k, whole) for each vector that this thread has. `whole` says that all its elements
  // are the row's. Most warps of misaligned rows have whole vectors only, which spares them all
  // comparisons.
  template <class Body>
  __device__ __forceinline__ void ForEachVector(bool exists, const Body& body) const {
    if (kAccess != RowAccess::kVectors && whole_) {
#pragma unroll
      for (int k = 0; k < kVectors; ++k) body(k, std::true_type{});
    } else {
#pragma unroll
      for (int k = 0; k < kVectors; ++k)
        if (exists && HasVector(k)) body(k, std::bool_constant<kAccess == RowAccess::kVectors>{});
    }
  }

  __device__ __forceinline__ const S* Input(int j, std::int64_t row) const {
    const S* const input =
        Offset(arguments_.inputs[j], arguments_.InputRow(j, row) * arguments_.strides[j]);
    // The L2 hint slows down the reads of a realigned row.
    return kDirect ? reads_.Of(input) : input;
  }
  __device__ __forceinline__ S* Output(int o, std::int64_t row) const {
    return Offset(arguments_.outputs[o], row * arguments_.rows.columns);
  }

  // Loads the k-th vector of a row that has `count` elements.
  template <bool kUnchecked, class U>
  __device__ __forceinline__ void Load(const U* row, int k, int count,
                                       Vector<U, kWidth>* vector) const {
    if constexpr (kOneByOne) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i)
        if (kUnchecked || Column(k) + i * kLaneStride < count)
          vector->Set(i, At(row, k)[i * kLaneStride]);
    } else if constexpr (kAccess == RowAccess::kVectors) {
      if ((kHasFirst && k == 0 && count > 0) || Column(k) < count) LoadAligned(At(row, k), vector);
    } else if constexpr (kUnchecked) {
      LoadAligned(At(row, k), vector);
    } else {
      LoadAnywhere(At(row, k), count - Column(k), vector);
    }
  }

  // Where rows follow rows. A warp's misaligned vectors would spill.
  static constexpr bool kHidesAddresses = kPersists && (kLanes == 0 || kDirect);
  // Where rows follow rows in a block, its threads are no more than a row's vectors.
  static constexpr bool kHasFirst = F::kColumnReductions > 0 && kLanes == 0 && kDirect;
  __device__ __forceinline__ bool HasVector(int k) const {
    return (kHasFirst && k == 0) || Remaining(k) > 0;
  }
  // Whether to move a vector at all. Single elements are checked one by one.
  __device__ __forceinline__ bool NeedsAccess(int k) const { return kOneByOne || HasVector(k); }

  template <bool kUnchecked>
  __device__ __forceinline__ void Store(const Vector<S, kWidth>& vector, S* row, int k) const {
    if constexpr (kOneByOne) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i)
        if (kUnchecked || Has(k, i)) At(row, k)[i * kLaneStride] = vector.Get(i);
    } else {
      StoreAligned(vector, At(row, k));
    }
  }

  // Loads a row; a misaligned one as it lies in memory, for Realign.
  __device__ __forceinline__ void LoadInput(int j, std::int64_t row, MovedRow* pieces) const {
    if constexpr (kDirect) {
      // Hidden addresses are computed once. The compiler computes the others better where they are
      // used.
      const S* const start = Input(j, row);
#pragma unroll  // without a branch around all: each branch would wait for its own loads
      for (int k = 0; k < kVectors; ++k)
        if (NeedsAccess(k))
          Load<false>(kHidesAddresses ? start : Input(j, row), k, columns_, &pieces->vectors[k]);
    } else {
      RealignerOf(Input(j, row), true).Load(pieces);
    }
  }

  // Gives each thread its vectors of a misaligned row. `again`: the shared memory was in use
  // before.
  __device__ __forceinline__ void Realign(int j, std::int64_t row, bool exists, bool again,
                                          MovedRow* pieces) const {
    const Realigner<S> realigner = RealignerOf(Input(j, row), exists);
    if (again) SyncLanes();
    realigner.Put(*pieces);
    SyncLanes();
    realigner.Get(pieces);
  }

  // Loads two rows of which only F::FusedSum of each pair is needed, keeps that, and writes it at
  // once.
  __device__ __forceinline__ void LoadFused(std::int64_t row, bool exists, MovedRow* raw) const {
    static_assert(kEarlyInputs<F> == 2 && kAccess == RowAccess::kVectors);
    const F functor = arguments_.FunctorOf(functor_, row);
    if (!exists) return;
    LoadInput(0, row, raw);
    // With 8 vectors of a thread, registers are left for two vectors of the other row.
    constexpr int kChunk = kVectors > 4 ? 2 : kVectors;
#pragma unroll
    for (int first = 0; first < kVectors; first += kChunk) {
      Vector<S, kWidth> others[kChunk];
#pragma unroll
      for (int i = 0; i < kChunk; ++i)
        if (NeedsAccess(first + i)) Load<false>(Input(1, row), first + i, columns_, &others[i]);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        if (Remaining(first + i) <= 0) continue;
        auto& vector = raw->vectors[first + i];
        vector = FusedSum(functor, vector, others[i]);
        if (S* const output = arguments_.outputs[F::kFusedSumOutput])
          Store<false>(vector, Output(F::kFusedSumOutput, row), first + i);
      }
    }
  }

  __device__ __forceinline__ static Vector<S, kWidth> FusedSum(const F& functor,
                                                               const Vector<S, kWidth>& first,
                                                               const Vector<S, kWidth>& second) {
    ElementCompute<S> values[2][kWidth];
    Unpack(first, values[0]);
    Unpack(second, values[1]);
#pragma unroll
    for (int i = 0; i < kWidth; ++i)
      values[0][i] = functor.FusedSum({{values[0][i], values[1][i]}});
    return Pack<S>(values[0]);
  }

  __device__ __forceinline__ void StoreMisaligned(int o, std::int64_t row, bool exists, bool again,
                                                  RowVectors& vectors) const {
    const Realigner<S> realigner = RealignerOf(Output(o, row), exists);
    if (again) SyncLanes();
    realigner.PutOwned(vectors);
    SyncLanes();
    realigner.Store(vectors, Output(o, row));
  }

  // Whether this thread's part of the column inputs is loaded without checks.
  __device__ __forceinline__ bool UncheckedColumns(std::int64_t row) const {
    bool unchecked = kAccess == RowAccess::kVectors || whole_;
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      unchecked = unchecked && arguments_.Column(c, row) != nullptr;
    return unchecked;
  }

  template <bool kUnchecked>
  __device__ __forceinline__ void LoadColumns(const F& functor, std::int64_t row, int k,
                                              ColumnVectors& columns) const {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      int count = columns_;
      if constexpr (!kUnchecked) {
        columns[c] = DefaultColumn(functor, c);
        const bool present = arguments_.columns[c] != nullptr;
        if constexpr (kDirect) {
          // Hidden, so that the load is predicated. Behind a branch it would wait for the loads
          // before it.
          if (!present) count = 0;
          asm("" : "+r"(count));
        } else if (!present) {
          continue;
        }
      }
      Load<kUnchecked>(arguments_.Column(c, row), k, count, &columns[c]);
    }
  }

  // What replaces an absent column input.
  static __device__ __forceinline__ Vector<W, kWidth> DefaultColumn(const F& functor, int c) {
    ElementCompute<W> values[kWidth];
#pragma unroll
    for (auto& value : values) value = Unwrap(ElementCompute<S>(functor.ColumnDefault(c)));
    return Pack<W>(values);
  }

  // Hides the product: the compiler would compute it again for each access.
  template <class U>
  static __device__ __forceinline__ U* Offset(U* tensor, std::int64_t elements) {
    if constexpr (!kHidesAddresses) return tensor + elements;
    std::int64_t bytes = elements * static_cast<std::int64_t>(sizeof(S));
    asm("" : "+l"(bytes));
    using Byte = std::conditional_t<std::is_const_v<U>, const unsigned char, unsigned char>;
    return reinterpret_cast<U*>(reinterpret_cast<Byte*>(tensor) + bytes);
  }

  // Hidden as well: the compiler would load it again for each use.
  static __device__ __forceinline__ int BlockLanes() {
    int lanes = static_cast<int>(blockDim.x);
    asm("" : "+r"(lanes));
    return lanes;
  }

  __device__ __forceinline__ Realigner<S> RealignerOf(const S* row, bool exists) const {
    return {row, exists ? columns_ : 0, lane_, lanes_, whole_ && exists, shared_};
  }
  __device__ __forceinline__ void SyncLanes() const {
    if constexpr (kLanes > 0) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }

  // ---------------------------------------------------------------------------------- values

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
      if constexpr (kFuses) {
        ReplayPhases<kPhase>(functor, values[i], columns[i]);
      } else {
        Replay<kPhase, S>(functor, values[i], columns[i]);
      }
    }
  }

  // Hides that the words are the same as before, so that values are unpacked from them again.
  __device__ __forceinline__ static void Forget(RawRow& raw) {
    if constexpr (kRaw16) {
#pragma unroll
      for (auto& input : raw)
#pragma unroll
        for (auto& vector : input.vectors)
#pragma unroll
          for (auto& word : vector.words) asm volatile("" : "+r"(word));
    }
  }
  // The same of the column inputs: unpacked once for all rows, they would take twice the registers.
  __device__ __forceinline__ static void Forget(ColumnVectors (&columns)[kVectors]) {
#pragma unroll
    for (auto& vectors : columns)
#pragma unroll
      for (auto& vector : vectors)
#pragma unroll
        for (auto& word : vector.words) asm volatile("" : "+r"(word));
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
      storage_ = Remembered(storage);
      static_assert(F::Phases::At(0) == F::Phases::At(kPhases<F> - 1));
#pragma unroll
      for (int i = 0; i < 2; ++i)
        storage_[i].template Pad<F::Phases::At(0)>(threadIdx.x, blockDim.x / 32);
    }
  }
  __device__ __forceinline__ void NextRow() {
    if constexpr (kPhases<F> == 1) storage_index_ ^= 1;
  }

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
      if constexpr (kRaw16) VectorValues<kPhase>(*functor, raw, k, values[k]);
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

  // Runs both phases of F::kMoments at once, which takes one pass and one barrier. If the squares
  // cancel, the second phase runs after all.
  __device__ __forceinline__ void ReduceMoments(F* functor, RowValues& values, bool exists,
                                                RawRow& raw) {
    using One = Values<T, 1>;
    ThreadTotals<kSum, One, kChains> sums[kTotals];
    ThreadTotals<kSquares, One, kChains> squares[kTotals];
    Forget(raw);
    ForEachVector(exists, [&](int k, auto whole) {
      if constexpr (kRaw16) VectorValues<0>(*functor, raw, k, values[k]);
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
    if (FinishMoments(functor, totals[0])) {
      if constexpr (!kRaw16) {  // the values as the phase would leave them
#pragma unroll
        for (auto& vector : values)
#pragma unroll
          for (auto& value : vector) static_cast<void>(functor->Term(Phase<1>{}, value, {}));
      }
    } else {
      ReducePhase<1>(functor, values, exists, raw);
    }
  }

  // ---------------------------------------------------------------------------------- a row

  __device__ __forceinline__ void KeepColumns(std::int64_t row) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) LoadColumns<false>(functor_, row, k, resident_columns_[k]);
  }

  __device__ __forceinline__ void LoadRow(std::int64_t row, RawRow& raw) const {
#pragma unroll
    for (int j = 0; j < kResident; ++j) LoadInput(j, row, &raw[j]);
  }

  __device__ __forceinline__ bool IsWrittenLast(int o) const {
    return o != F::kFusedSumOutput && arguments_.outputs[o] != nullptr;
  }

  // load_next() runs once the row is in registers.
  template <class LoadNext>
  __device__ __forceinline__ void Row(std::int64_t row, bool exists, RawRow& raw,
                                      const LoadNext& load_next) {
    F functor = functor_;
    RowValues values;
    if constexpr (!kDirect) {
#pragma unroll
      for (int j = 0; j < kResident; ++j) Realign(j, row, exists, j > 0 || kSums > 0, &raw[j]);
    }
    if constexpr (!kRaw16) {
#pragma unroll
      for (int k = 0; k < kVectors; ++k) VectorValues<0>(functor, raw, k, values[k]);
      if constexpr (kHidesAddresses) Pin(values);
    }
    load_next();
    Reduce(&functor, values, exists, raw);
    Results results;
    if constexpr (kLoaded < kInputs) {
      if (arguments_.inputs[kLoaded] != nullptr) {
        Write<false, true>(functor, values, row, exists, raw, results);
      } else {
        Write<false, false>(functor, values, row, exists, raw, results);
      }
    } else if (!kKeepsColumns && !F::kQuantises && UncheckedColumns(row)) {
      Write<true, false>(functor, values, row, exists, raw, results);
    } else {
      Write<false, false>(functor, values, row, exists, raw, results);
    }
    if constexpr (F::kQuantises) Quantise(row, exists, results[0]);
    if constexpr (!kDirect) {
#pragma unroll
      for (int o = 0; o < F::kRowOutputs; ++o)
        if (IsWrittenLast(o))  // a block's reduction was a barrier
          StoreMisaligned(o, row, exists, o > 0 || kLanes > 0, results[o]);
    }
  }

  template <bool kUnchecked, bool kEpilogue>
  __device__ __forceinline__ void Write(const F& functor, RowValues& values, std::int64_t row,
                                        bool exists, RawRow& raw, Results& results) {
    Forget(raw);
    // The column inputs are loaded here, one vector ahead: registers for all of them would cost
    // rows in flight.
    ColumnVectors ahead[2];
    const auto load_ahead = [&](int k) {
      if (!kKeepsColumns && k < kVectors) LoadColumns<kUnchecked>(functor_, row, k, ahead[k % 2]);
    };
    load_ahead(0);
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if constexpr (kRaw16) VectorValues<kPhases<F>>(functor, raw, k, values[k]);
#pragma unroll
      for (int j = kLoaded; kEpilogue && j < kInputs; ++j) {
        if (!exists) continue;
        Vector<S, kWidth> input{};
        Load<false>(Input(j, row), k, columns_, &input);
        T unpacked[kWidth];
        Unpack(input, unpacked);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) values[k][i][j] = unpacked[i];
      }
      Values<T, kColumns> columns[kWidth];
      if constexpr (kKeepsColumns) {
        ColumnValues(resident_columns_[k], columns);
      } else {
        ColumnValues(ahead[k % 2], columns);
        load_ahead(k + 1);
      }
      T out[F::kRowOutputs][kWidth];
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const auto result = functor.Result(values[k][i], columns[i]);
#pragma unroll
        for (int o = 0; o < F::kRowOutputs; ++o) out[o][i] = result[o];
        if constexpr (kSums > 0) {
          if (exists) AddToSums(k, i, functor.ColumnTerm(values[k][i]));
        }
      }
      if constexpr (F::kQuantises) results[0][k] = Pack<S>(out[0]);
#pragma unroll
      for (int o = 0; o < F::kRowOutputs; ++o) {
        if (!IsWrittenLast(o)) continue;
        if constexpr (kDirect) {
          if (exists && NeedsAccess(k)) Store<kUnchecked>(Pack<S>(out[o]), Output(o, row), k);
        } else {
          results[o][k] = Pack<S>(out[o]);
        }
      }
    }
  }

  // Writes a row of results, which are 16-bit words, in 8 bits, and its scale.
  __device__ __forceinline__ void Quantise(std::int64_t row, bool exists,
                                           const RowVectors& results) const {
    static_assert(sizeof(S) == 2 && kLanes % 32 == 0 && kAccess == RowAccess::kVectors);
    std::uint32_t largest = 0;  // magnitudes of two, as integers: that of NaN is the largest
#pragma unroll
    for (int k = 0; k < kVectors; ++k)
      if (exists && HasVector(k))
#pragma unroll
        for (const std::uint32_t word : results[k].words)
          largest = __vmaxu2(largest, word & 0x7FFF7FFFu);
    largest = LargestOfLanes<kLanes>(max(largest & 0xFFFFu, largest >> 16));
    const float scale =
        ScaleOf(BitsOf(ToCompute(SameBits<S>(static_cast<std::uint16_t>(largest)))));
    const float inverse = InverseOf(scale);
    if (!exists) return;
    if (lane_ == 0) arguments_.scale[row] = scale;
#pragma unroll
    for (int k = 0; k < kVectors; ++k)
      if (HasVector(k))
        StoreFloat8(results[k], inverse, At(arguments_.q + row * arguments_.rows.columns, k));
  }

  // ---------------------------------------------------------------------------------- column sums

  // Adds the terms of the i-th element of the k-th vector to its columns' sums.
  template <class Term>
  __device__ __forceinline__ void AddToSums(int k, int i, const Term& term) {
#pragma unroll
    for (int s = 0; s < kSums; ++s) sums_[s][k][i] = Unwrap(WithTerm(T(sums_[s][k][i]), term, s));
  }

  // Writes partials[sum][block][column]. The groups of a block first add theirs up, one after the
  // other.
  __device__ __forceinline__ void WriteSums(Sum* partials) const {
    const std::int64_t columns = arguments_.rows.columns;
    if constexpr (kLanes > 0) {
      __shared__ Sum shared[kSums][kLanes * kVectors * kWidth];
      for (int g = 0; g < kGroups; ++g) {
        if (g == group_) PutSums(g > 0, [&](int s, int column) { return &shared[s][column]; });
        __syncthreads();
      }
      for (int s = 0; s < kSums; ++s)
        for (int c = threadIdx.x; c < columns; c += kGroupThreads)
          partials[(s * gridDim.x + blockIdx.x) * columns + c] = shared[s][c];
    } else {
      PutSums(false, [&](int s, int column) {
        return &partials[(s * gridDim.x + blockIdx.x) * columns + column];
      });
    }
  }

  template <class Place>
  __device__ __forceinline__ void PutSums(bool to_others, const Place& place) const {
#pragma unroll
    for (int s = 0; s < kSums; ++s)
#pragma unroll
      for (int k = 0; k < kVectors; ++k)
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          if (Remaining(k) <= i) continue;
          Sum* const sum = place(s, Column(k) + i);
          *sum = to_others ? *sum + sums_[s][k][i] : sums_[s][k][i];
        }
  }

  static constexpr int kChains = std::min(kWidth, 4);
  static constexpr int kWholeRemaining = kDirect ? (kWidth - 1) * kLaneStride : 2 * kWidth - 1;

  const Arguments<F, S, W>& arguments_;
  const L2ReadPolicy& reads_;
  const int columns_, lanes_, lane_, group_;
  // All threads of the warp have whole vectors; behind those of a realigned row lies another one.
  const bool whole_;
  unsigned char* const shared_;
  ColumnVectors resident_columns_[kVectors] = {};
  BlockStorage<T>* storage_;
  int storage_index_ = 0;
  const F& functor_;
  Sum sums_[kSums + 1][kVectors][kWidth] = {};
};

template <class Traits>
__global__ void __maxnreg__(Traits::kRegisters)
    ResidentKernel(typename Traits::F functor,
                   Arguments<typename Traits::F, typename Traits::S, typename Traits::W> arguments,
                   L2ReadPolicy reads, Compute<typename Traits::S>* partials) {
  extern __shared__ __align__(128) unsigned char memory[];
  if constexpr (Traits::kTuning == Tuning::kLatency && !Traits::F::kColumnsOfBatch) {
    const std::int64_t bytes =
        blockIdx.x > 0 ? 0 : arguments.rows.columns * sizeof(typename Traits::W);
#pragma unroll
    for (int c = 0; c < kColumnInputs<typename Traits::F>; ++c)
      if (arguments.columns[c] != nullptr) PrefetchL2(arguments.columns[c], bytes);
  }
  PdlTriggerAndWait();
  ResidentRows<Traits> rows(functor, arguments, reads, memory);
  if constexpr (ResidentRows<Traits>::kPersists) {
    rows.RunAll(partials);
  } else {
    rows.RunOnce();
  }
}

}  // namespace twinop::rowwise
