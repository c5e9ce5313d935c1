// Register-resident rows: which part of a row each thread has, and how it moves between registers
// and memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "twinop/primitives/l2_hints.cuh"
#include "twinop/primitives/realigner.cuh"
#include "twinop/rowwise/reduce.cuh"

namespace twinop::rowwise {

// The template arguments of a register-resident kernel.
template <class Functor, class Storage, class ColumnStorage, int kRowLanes, int kThreadVectors,
          int kThreadTotals, Tuning kTunedFor, RowAccess kRowAccess>
struct ResidentTraits {
  using F = Functor;
  using S = Storage;                               // of rows
  using W = ColumnStorage;                         // of column inputs
  static constexpr int kLanes = kRowLanes;         // that share a row; 0: all threads of a block
  static constexpr int kVectors = kThreadVectors;  // of each row input, in a thread
  // With two totals, a thread adds up what two threads with half its vectors would.
  static constexpr int kTotals = kThreadTotals;
  static constexpr Tuning kTuning = kTunedFor;
  static constexpr RowAccess kAccess = kRowAccess;
};

template <class Traits>
class ResidentAccess {
 public:
  using F = typename Traits::F;
  using S = typename Traits::S;
  using W = typename Traits::W;
  static constexpr int kLanes = Traits::kLanes;
  static constexpr int kVectors = Traits::kVectors;
  static constexpr RowAccess kAccess = Traits::kAccess;
  static constexpr int kWidth = kVectorBytes / sizeof(S);
  // Columns between a lane's elements. With kInterleaved a warp takes a part of the row, its lanes
  // take neighbouring elements, and one address serves all elements of a lane.
  static constexpr int kLaneStride = kAccess == RowAccess::kInterleaved ? 32 : 1;
  static constexpr bool kOneByOne =
      kAccess == RowAccess::kInterleaved || kAccess == RowAccess::kSingle;
  static constexpr bool kDirect = kAccess != RowAccess::kRealigned;  // not through shared memory
  static constexpr int kColumns = kColumnInputs<F>;
  static constexpr int kGroups = kLanes > 0 ? kGroupThreads / kLanes : 1;

  using MovedRow = MovedVectors<S, kVectors>;
  using ColumnVectors = Vector<W, kWidth>[kColumns + 1];
  using RowVectors = Vector<S, kWidth>[kVectors];

  __device__ ResidentAccess(const Arguments<F, S, W>& arguments, const Reads& reads,
                            unsigned char* shared)
      : arguments_(arguments),
        reads_(reads),
        columns_(static_cast<int>(arguments.rows.columns)),
        lanes_(kLanes > 0 ? kLanes : BlockLanes()),
        lane_(static_cast<int>(kLanes > 0 ? threadIdx.x % kLanes : threadIdx.x)),
        group_(kLanes > 0 ? threadIdx.x / kLanes : 0),
        whole_(kAccess != RowAccess::kVectors &&
               __all_sync(0xFFFFFFFFu, Left(kVectors - 1) > kWholeLeft)),
        shared_(Remembered(shared) + group_ * SharedBytesOf(lanes_)) {}

  // Bytes of shared memory that each group of threads needs to realign a row.
  static constexpr __host__ __device__ int SharedBytesOf(int lanes) {
    return kDirect ? 0 : Realigner<S>::SharedVectors(lanes * kVectors) * kVectorBytes;
  }

  // The column of the first element of this lane's k-th vector, and the elements of the row from
  // there on: none, or a whole vector where tensors are aligned.
  __device__ __forceinline__ int Column(int k) const {
    if constexpr (kAccess == RowAccess::kInterleaved)
      return (lane_ / kLaneStride * kVectors + k) * kLaneStride * kWidth + lane_ % kLaneStride;
    return (k * lanes_ + lane_) * kWidth;
  }
  __device__ __forceinline__ int Left(int k) const { return columns_ - Column(k); }
  __device__ __forceinline__ bool Has(int k, int i) const { return Left(k) > i * kLaneStride; }
  __device__ __forceinline__ int Group() const { return group_; }

 protected:
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
    // The L2 hint slows down the reads of one realigned row, and speeds up those of two.
    return kDirect || F::kPreparedOutput >= 0 ? reads_.Of(input) : input;
  }
  __device__ __forceinline__ S* Output(int o, std::int64_t row) const {
    return Offset(arguments_.outputs[o], row * arguments_.rows.columns);
  }

  // Loads the k-th vector of a row that has `count` elements.
  template <bool kPlain, class U>
  __device__ __forceinline__ void Load(const U* row, int k, int count,
                                       Vector<U, kWidth>* vector) const {
    if constexpr (kOneByOne) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i)
        if (kPlain || Column(k) + i * kLaneStride < count)
          vector->Set(i, At(row, k)[i * kLaneStride]);
    } else if constexpr (kAccess == RowAccess::kVectors) {
      if ((kHasFirst && k == 0 && count > 0) || Column(k) < count) LoadAligned(At(row, k), vector);
    } else if constexpr (kPlain) {
      LoadAligned(At(row, k), vector);
    } else {
      LoadAnywhere(At(row, k), count - Column(k), vector);
    }
  }

  // Where rows follow rows. A warp's misaligned vectors would spill.
  static constexpr bool kHidesAddresses = F::kColumnSums > 0 && (kLanes == 0 || kDirect);
  // Where rows follow rows in a block, its threads are no more than a row's vectors, except in
  // float64, whose blocks take rows of all widths.
  static constexpr bool kHasFirst = F::kColumnSums > 0 && kLanes == 0 && kDirect && sizeof(S) < 8;
  __device__ __forceinline__ bool HasVector(int k) const {
    return (kHasFirst && k == 0) || Left(k) > 0;
  }
  // Whether to move a vector at all. Single elements are checked one by one.
  __device__ __forceinline__ bool Asks(int k) const { return kOneByOne || HasVector(k); }

  template <bool kPlain>
  __device__ __forceinline__ void Store(const Vector<S, kWidth>& vector, S* row, int k) const {
    if constexpr (kOneByOne) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i)
        if (kPlain || Has(k, i)) At(row, k)[i * kLaneStride] = vector.Get(i);
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
        if (Asks(k))
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

  // Loads two rows of which only F::Prepared of each pair is needed, and keeps that. An aligned
  // result is written at once.
  __device__ __forceinline__ void LoadPrepared(std::int64_t row, bool exists, MovedRow* raw) const {
    static_assert(kEarlyInputs<F> == 2);
    if constexpr (kDirect) {
      if (exists) {
        LoadInput(0, row, raw);
        // With 8 vectors of a thread, registers are left for two vectors of the other row.
        constexpr int kChunk = kVectors > 4 ? 2 : kVectors;
#pragma unroll
        for (int first = 0; first < kVectors; first += kChunk) {
          Vector<S, kWidth> others[kChunk];
#pragma unroll
          for (int i = 0; i < kChunk; ++i)
            if (Asks(first + i)) Load<false>(Input(1, row), first + i, columns_, &others[i]);
#pragma unroll
          for (int i = 0; i < kChunk; ++i) {
            if (Left(first + i) <= 0) continue;
            auto& vector = raw->vectors[first + i];
            vector = Prepared(vector, others[i]);
            if (S* const output = arguments_.outputs[F::kPreparedOutput])
              Store<false>(vector, Output(F::kPreparedOutput, row), first + i);
          }
        }
      }
    } else {
      MovedRow pieces[2] = {};
#pragma unroll
      for (int j = 0; j < 2; ++j)
        if (exists) LoadInput(j, row, &pieces[j]);
#pragma unroll
      for (int j = 0; j < 2; ++j) Realign(j, row, exists, j > 0, &pieces[j]);
#pragma unroll
      for (int k = 0; k < kVectors; ++k)
        raw->vectors[k] = Prepared(pieces[0].vectors[k], pieces[1].vectors[k]);
    }
  }

  __device__ __forceinline__ static Vector<S, kWidth> Prepared(const Vector<S, kWidth>& first,
                                                               const Vector<S, kWidth>& second) {
    ElementCompute<S> values[2][kWidth];
    Unpack(first, values[0]);
    Unpack(second, values[1]);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) values[0][i] = F::Prepared({{values[0][i], values[1][i]}});
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
  __device__ __forceinline__ bool PlainColumns(std::int64_t row) const {
    bool plain = kAccess == RowAccess::kVectors || whole_;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const auto place = reinterpret_cast<std::uintptr_t>(arguments_.Column(c, row));
      plain = plain && place != 0 && (kDirect || place % kVectorBytes == 0);
    }
    return plain;
  }

  template <bool kPlain>
  __device__ __forceinline__ void LoadColumns(const F& functor, std::int64_t row, int k,
                                              ColumnVectors& columns) const {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      int count = columns_;
      if constexpr (!kPlain) {
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
      Load<kPlain>(arguments_.Column(c, row), k, count, &columns[c]);
    }
  }

  // What replaces an absent column input.
  static __device__ __forceinline__ Vector<W, kWidth> DefaultColumn(const F& functor, int c) {
    ElementCompute<W> values[kWidth];
#pragma unroll
    for (auto& value : values) value = Plain(ElementCompute<S>(functor.ColumnDefault(c)));
    return Pack<W>(values);
  }

  const Arguments<F, S, W>& arguments_;
  const Reads& reads_;
  const int columns_, lanes_, lane_, group_;
  // All threads of the warp have whole vectors; behind those of a realigned row lies another one.
  const bool whole_;

 private:
  static constexpr int kWholeLeft = kDirect ? (kWidth - 1) * kLaneStride : 2 * kWidth - 1;

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

  unsigned char* const shared_;
};

}  // namespace twinop::rowwise
