// Rows held in registers: a part of a warp, a warp or a block takes a row, loads all of it before
// the first use, reduces and writes.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/cuda_launch.cuh"
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
  static constexpr int kHeld = kEarlyInputs<F>;
  static constexpr int kColumns = kColumnInputs<F>;
  static constexpr int kSums = F::kColumnSums;
  static constexpr int kGroups = kLanes > 0 ? kThreads / kLanes : 1;

  using RawRow = Pieces<S, kVectors>[kHeld];
  using ColumnVectors = Vector<W, kWidth>[kColumns + 1];
  using RowValues = Values<T, kInputs>[kVectors][kWidth];
  using Results = Vector<S, kWidth>[F::kRowOutputs][kVectors];  // of a misaligned row

  __device__ HeldRows(const F& functor, const Arguments<F, S, W>& arguments, unsigned char* room)
      : functor_(functor),
        arguments_(arguments),
        columns_(static_cast<int>(arguments.rows.columns)),
        lanes_(kLanes > 0 ? kLanes : BlockLanes()),
        lane_(static_cast<int>(kLanes > 0 ? threadIdx.x % kLanes : threadIdx.x)),
        group_(kLanes > 0 ? threadIdx.x / kLanes : 0),
        whole_(!kAligned && __all_sync(0xFFFFFFFFu, Left(kVectors - 1) >= 2 * kWidth)),
        room_(Remembered(room) + group_ * RoomBytes(lanes_)) {}

  // Of shared memory, for each group of threads: one row at a time, where it is misaligned.
  static constexpr __host__ __device__ int RoomBytes(int lanes) {
    return kAligned ? 0 : Stretch<S>::RoomVectors(lanes * kVectors) * kVectorBytes;
  }

  // Hides what the address is made of: the compiler would make it anew for each access.
  static __device__ __forceinline__ unsigned char* Remembered(unsigned char* shared) {
    std::uint32_t address = hopper::SharedAddress(shared);
    asm("" : "+r"(address));
    return static_cast<unsigned char*>(__cvta_shared_to_generic(address));
  }

  // Hidden too: the compiler would load it again for each use.
  static __device__ __forceinline__ int BlockLanes() {
    int lanes = static_cast<int>(blockDim.x);
    asm("" : "+r"(lanes));
    return lanes;
  }

  // A row for each group of threads.
  __device__ __forceinline__ void RunOnce() {
    const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kGroups + group_;
    // A block's row exists. But where column inputs are loaded, knowing it costs registers
    // (float32, 8192 x 16384, share of the copy's speed: layer norm 0.92, not knowing it 0.98;
    // softmax 0.98, not knowing it 0.92).
    constexpr bool kKnown = kLanes == 0 && (kColumns == 0 || !kAligned);
    const bool exists = kKnown || row < arguments_.rows.count;
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
      for (int j = 0; j < kHeld; ++j) raw[j] = next[j];
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
  // (Unsigned: an address from it is one instruction.)
  template <class U>
  __device__ __forceinline__ U* At(U* row, int k) const {
    return row + static_cast<std::uint32_t>(Column(k));
  }

  // body(k, whole) for each vector that this thread has; whole: all its elements are the row's. Of
  // misaligned rows most warps have whole vectors only, which spares them all comparisons.
  template <class Body>
  __device__ __forceinline__ void ForEachVector(bool exists, const Body& body) const {
    if (!kAligned && whole_) {
#pragma unroll
      for (int k = 0; k < kVectors; ++k) body(k, std::true_type{});
    } else {
#pragma unroll
      for (int k = 0; k < kVectors; ++k)
        if (exists && Left(k) > 0) body(k, std::bool_constant<kAligned>{});
    }
  }

  __device__ __forceinline__ const S* Input(int j, std::int64_t row) const {
    return arguments_.inputs[j] + row * arguments_.strides[j];
  }
  __device__ __forceinline__ S* Output(int o, std::int64_t row) const {
    return arguments_.outputs[o] + row * arguments_.rows.columns;
  }

  template <bool kPlain, class U>
  __device__ __forceinline__ void Load(const U* row, int k, Vector<U, kWidth>* vector) const {
    if constexpr (kAligned) {
      if (Left(k) > 0) LoadAligned(At(row, k), vector);
    } else if constexpr (kPlain) {
      LoadAligned(At(row, k), vector);
    } else {
      LoadAnywhere(At(row, k), Left(k), vector);
    }
  }

  // A misaligned row as it lies in memory; Realign gives each thread its vectors.
  __device__ __forceinline__ void LoadRow(std::int64_t row, RawRow& raw) const {
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      if constexpr (kAligned) {
#pragma unroll  // (of two branches, each would wait for its loads)
        for (int k = 0; k < kVectors; ++k)
          if (Left(k) > 0) LoadAligned(At(Input(j, row), k), &raw[j].vectors[k]);
      } else {
        InRoom(Input(j, row), true).Load(&raw[j]);
      }
    }
  }

  __device__ __forceinline__ Stretch<S> InRoom(const S* row, bool exists) const {
    return {row, exists ? columns_ : 0, lane_, lanes_, whole_ && exists, room_};
  }
  __device__ __forceinline__ void SyncRoom() const {
    if constexpr (kLanes > 0) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }

  __device__ __forceinline__ void Realign(std::int64_t row, bool exists, RawRow& raw) const {
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      const Stretch<S> stretch = InRoom(Input(j, row), exists);
      if (j > 0 || kSums > 0) SyncRoom();
      stretch.Put(raw[j]);
      SyncRoom();
      stretch.Get(&raw[j]);
    }
  }

  // Whether there is nothing to ask before this thread's part of the column inputs is loaded.
  __device__ __forceinline__ bool PlainColumns() const {
    bool plain = kAligned || whole_;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const auto place = reinterpret_cast<std::uintptr_t>(arguments_.columns[c]);
      plain = plain && place != 0 && (kAligned || place % kVectorBytes == 0);
    }
    return plain;
  }

  template <bool kPlain>
  __device__ __forceinline__ void LoadColumns(int k, ColumnVectors& columns) const {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      columns[c] = {};
      if (kPlain || arguments_.columns[c] != nullptr)
        Load<kPlain>(arguments_.columns[c], k, &columns[c]);
    }
  }

  template <bool kPlain>
  __device__ __forceinline__ void ColumnValues(const ColumnVectors& columns,
                                               Values<T, kColumns> (&values)[kWidth]) const {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const bool absent = !kPlain && arguments_.columns[c] == nullptr;
      T unpacked[kWidth];
      Unpack(columns[c], unpacked);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) values[i][c] = absent ? T(functor_.Neutral(c)) : unpacked[i];
    }
  }

  // The values of the row's k-th vector as the phases before kPhase leave them.
  template <int kPhase>
  __device__ __forceinline__ void VectorValues(const F& functor, const RawRow& raw, int k,
                                               Values<T, kInputs> (&values)[kWidth]) const {
#pragma unroll
    for (int j = 0; j < kInputs; ++j) {
      T unpacked[kWidth];
      if (j < kHeld) Unpack(raw[j < kHeld ? j : 0].vectors[k], unpacked);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) values[i][j] = j < kHeld ? unpacked[i] : T(0);
    }
    Values<T, kColumns> columns[kWidth] = {};
    if constexpr (kSums > 0) ColumnValues<false>(held_columns_[k], columns);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) Replay<kPhase, S>(functor, values[i], columns[i]);
  }

  // Hides that the words are what they were, so that values made of them are made again.
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

  // load_next() runs once the row is in registers.
  template <class LoadNext>
  __device__ __forceinline__ void Row(std::int64_t row, bool exists, RawRow& raw,
                                      const LoadNext& load_next) {
    F functor = functor_;
    RowValues values;
    if constexpr (!kAligned) Realign(row, exists, raw);
    if constexpr (!kPacked) {
#pragma unroll
      for (int k = 0; k < kVectors; ++k) VectorValues<0>(functor, raw, k, values[k]);
    }
    load_next();
    Reduce(&functor, values, exists, raw, std::make_index_sequence<kPhases<F>>{});
    Results results;
    if (PlainColumns()) {
      Write<true>(functor, values, row, exists, raw, results);
    } else {
      Write<false>(functor, values, row, exists, raw, results);
    }
    if constexpr (!kAligned) StoreMisaligned(row, exists, results);
  }

  template <std::size_t... kPhase>
  __device__ __forceinline__ void Reduce(F* functor, RowValues& values, bool exists, RawRow& raw,
                                         std::index_sequence<kPhase...>) {
    (ReducePhase<static_cast<int>(kPhase)>(functor, values, exists, raw), ...);
  }

  template <int kPhase>
  __device__ __forceinline__ void ReducePhase(F* functor, RowValues& values, bool exists,
                                              RawRow& raw) {
    constexpr Reduction kOp = F::Phases::At(kPhase);
    using Total = Terms<F, T, kPhase>;
    ThreadTotals<kOp, Total, kWidth> totals;
    Forget(raw);
    ForEachVector(exists, [&](int k, auto whole) {
      if constexpr (kPacked) VectorValues<kPhase>(*functor, raw, k, values[k]);
      // Of the phases, only those of ops that sum columns look at the column inputs.
      Values<T, kColumns> columns[kWidth];
      if constexpr (kSums > 0) ColumnValues<false>(held_columns_[k], columns);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const Total term = functor->Term(Phase<kPhase>{}, values[k][i], columns[i]);
        if (whole || i < Left(k)) totals.Add(i, term);
      }
    });
    Total total = totals.Sum();
    if constexpr (kLanes > 0) {
      total = ReduceLanes<kLanes, kOp>(total);
    } else {
      __shared__ BlockStorage<T> storage;
      total = ReduceBlock<kOp>(total, threadIdx.x, blockDim.x, 0, &storage);
    }
    functor->Finish(Phase<kPhase>{}, total);
  }

  template <bool kPlain>
  __device__ __forceinline__ void Write(const F& functor, RowValues& values, std::int64_t row,
                                        bool exists, RawRow& raw, Results& results) {
    Forget(raw);
    // The column inputs are loaded here, one vector ahead: registers for all of them would cost
    // rows in flight.
    ColumnVectors next;
    if constexpr (kSums == 0) LoadColumns<kPlain>(0, next);
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if constexpr (kPacked) VectorValues<kPhases<F>>(functor, raw, k, values[k]);
#pragma unroll
      for (int j = kHeld; j < kInputs; ++j) {
        if (arguments_.inputs[j] == nullptr || !exists) continue;
        Vector<S, kWidth> late{};
        Load<false>(Input(j, row), k, &late);
        T unpacked[kWidth];
        Unpack(late, unpacked);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) values[k][i][j] = unpacked[i];
      }
      Values<T, kColumns> columns[kWidth];
      if constexpr (kSums > 0) {
        ColumnValues<false>(held_columns_[k], columns);
      } else {
        ColumnValues<kPlain>(next, columns);
        if (k + 1 < kVectors) LoadColumns<kPlain>(k + 1, next);
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
        if constexpr (kAligned) {
          if (exists && Left(k) > 0) StoreAligned(Pack<S>(out[o]), At(Output(o, row), k));
        } else {
          results[o][k] = Pack<S>(out[o]);
        }
      }
    }
  }

  __device__ __forceinline__ void StoreMisaligned(std::int64_t row, bool exists,
                                                  Results& results) const {
#pragma unroll
    for (int o = 0; o < F::kRowOutputs; ++o) {
      if (arguments_.outputs[o] == nullptr) continue;
      const Stretch<S> stretch = InRoom(Output(o, row), exists);
      if (o > 0 || kLanes > 0) SyncRoom();  // (a block's reduction was a barrier)
      stretch.PutOwned(results[o]);
      SyncRoom();
      stretch.Store(results[o], Output(o, row));
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
  // Misaligned: all threads of the warp have whole vectors, and another one follows each.
  const bool whole_;
  unsigned char* const room_;
  ColumnVectors held_columns_[kVectors] = {};
  Sum sums_[kSums + 1][kVectors][kWidth] = {};
};

// What a multiprocessor of sm_75 takes, and what the smallest of the later ones do.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
inline constexpr int kMostThreads = 1024;
#else
inline constexpr int kMostThreads = 1536;
#endif

template <class F, int kThreads, bool kPacked>
inline constexpr int kHeldBlocks =
    std::min(HeldThreads(F::kColumnSums > 0, kPacked && (kEarlyInputs<F> == 1)), kMostThreads) /
    kThreads;

template <class F, class S, class W, int kLanes, int kVectors, int kThreads, bool kPacked,
          bool kAligned>
__global__ void __launch_bounds__(kThreads, kHeldBlocks<F, kThreads, kPacked>)
    HeldKernel(F functor, Arguments<F, S, W> arguments, Compute<S>* partials) {
  extern __shared__ __align__(128) unsigned char memory[];
  WaitForPreviousKernel();
  HeldRows<F, S, W, kLanes, kVectors, kThreads, kPacked, kAligned> rows(functor, arguments, memory);
  if constexpr (F::kColumnSums > 0) {
    rows.RunAndSum(partials);
  } else {
    rows.RunOnce();
  }
}

// The same in the registers that kFewRegisters says: more rows in flight.
template <class F, class S, class W, int kVectors, int kThreads, bool kAligned>
__global__ void __maxnreg__(kFewRegisters)
    HeldFewKernel(F functor, Arguments<F, S, W> arguments, Compute<S>*) {
  extern __shared__ __align__(128) unsigned char memory[];
  WaitForPreviousKernel();
  HeldRows<F, S, W, 0, kVectors, kThreads, false, kAligned>(functor, arguments, memory).RunOnce();
}

template <class F, class S, class W, int kLanes, int kVectors, int kThreads, bool kPacked,
          bool kAligned>
constexpr auto ChooseHeldKernel() {
  if constexpr (FitsFewRegisters(F::kColumnSums > 0, kEarlyInputs<F> == 1 && sizeof(S) == 4, kLanes,
                                 kVectors, kAligned && kColumnInputs<F> > 0)) {
    return HeldFewKernel<F, S, W, kVectors, kThreads, kAligned>;
  } else {
    return HeldKernel<F, S, W, kLanes, kVectors, kThreads, kPacked, kAligned>;
  }
}

}  // namespace twinop::rowwise
