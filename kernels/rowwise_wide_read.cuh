// Wide rows whose elements are read again for each phase: from a ring in shared memory, the next
// rows on their way while one is reduced and written (sums of the columns on the way in the groups'
// registers); or from global memory, on older GPUs, and where tensors are misaligned.
#pragma once

#include <cstdint>

#include "kernels/rowwise_wide_ring.cuh"

namespace twinop::rowwise {

// kSums: of the columns, on the way. (Without, the rows' functors are kept for a second pass.)
template <class F, class S, class W, Source kSource, bool kSums>
class ReadWideRows : WideSlices<F, S, W, kSource == Source::kRing ? Ring::kWhole : Ring::kNone> {
  using Base = WideSlices<F, S, W, kSource == Source::kRing ? Ring::kWhole : Ring::kNone>;
  using Base::arguments_, Base::settings_, Base::thread_, Base::threads_, Base::group_;
  using Base::begin_, Base::length_, Base::rank_, Base::ring_;

 public:
  using typename Base::Storage;
  using typename Base::T;
  using Sum = Compute<S>;
  static constexpr int kWidth = Base::kWidth;
  static constexpr int kInputs = kRowInputs<F>;
  static constexpr int kHeld = Base::kHeld;
  static constexpr int kColumns = Base::kColumns;
  static constexpr int kPhaseCount = Base::kPhaseCount;
  // Vectors of a thread. (With sums, which leave few registers and few batches, the last one is
  // full more often: layer norm backward, bfloat16, 16384 x 11008: 623 us, by two vectors 712 us.)
  static constexpr int kBatch = kSums ? 1 : kHeld == 1 ? 4 : 2;
  static constexpr int kSumBatches = kSums ? kWideSumVectors<S> / kBatch : 0;
  using BatchSums = Sum[F::kColumnSums + 1][kBatch][kWidth];

  __device__ ReadWideRows(const F& functor, const Arguments<F, S, W>& arguments,
                          const WideSettings& settings, const Reads& reads, Storage* storage,
                          unsigned char* memory)
      : Base(arguments, settings, reads, storage, memory), functor_(functor) {}

  static std::int64_t SharedBytes(const WideSettings& settings, std::int64_t columns) {
    const std::int64_t slice = SliceVectors(columns, kWidth, settings.cluster) * kWidth;
    return Base::RingBytes(settings, slice) + settings.groups * RoomBytes(settings.threads);
  }
  // For each group: a batch of a misaligned row.
  static constexpr __host__ __device__ int RoomBytes(int threads) {
    if (kSource != Source::kMisaligned) return 0;
    return Stretch<S>::RoomVectors(kBatch * threads) * kVectorBytes;
  }

  __device__ __forceinline__ void Run(F* states, Sum* partials) {
    Base::Begin();
    Turn turn;
    for (std::int64_t row = Base::first_row_; row < arguments_.rows.count;
         row += Base::row_stride_) {
      Row(row, turn, states);
      turn.Next(settings_.stages);
    }
    if constexpr (kSums) WriteSums(partials);
    Base::End();
  }

 private:
  // ---------------------------------------------------------------------------------- vectors

  // This thread's vectors of the slice, kBatch at a time, all of them loaded before the first is
  // used.
  struct Batch {
    Vector<S, kWidth> row[kHeld][kBatch];
    Vector<W, kWidth> columns[kColumns + 1][kBatch];
  };

  // body(first, whole): the first of the batch's vectors, and whether all threads have all of them.
  // Every thread of a warp takes part in every batch.
  template <class Body>
  __device__ __forceinline__ void ForEachBatch(const Body& body) const {
    const std::int64_t vectors = (length_ + kWidth - 1) / kWidth;
    const int batch = kBatch * threads_;
    std::int64_t start = 0;
    if (kSource != Source::kMisaligned)
      for (; start + batch <= vectors; start += batch) body(start + thread_, std::true_type{});
    for (; start < vectors; start += batch) body(start + thread_, std::false_type{});
  }

  // The same for the batch that starts at this vector of the slice, if there is one.
  template <class Body>
  __device__ __forceinline__ void AtBatch(int start, const Body& body) const {
    const int vectors = static_cast<int>((length_ + kWidth - 1) / kWidth);
    if (kSource != Source::kMisaligned && start + kBatch * threads_ <= vectors) {
      body(start + thread_, std::true_type{});
    } else if (start < vectors) {
      body(start + thread_, std::false_type{});
    }
  }

  // Elements of the slice from the batch's b-th vector on.
  __device__ __forceinline__ std::int64_t Left(std::int64_t first, int b) const {
    return length_ - (first + b * threads_) * kWidth;
  }

  template <bool kWhole, class U>
  __device__ __forceinline__ void Load(const U* slice, std::int64_t first,
                                       Vector<U, kWidth> (&vectors)[kBatch]) const {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const U* const place = slice + (first + b * threads_) * kWidth;
      if constexpr (kSource == Source::kMisaligned) {
        LoadAnywhere(place, static_cast<int>(min(Left(first, b), std::int64_t{kWidth})),
                     &vectors[b]);
      } else if (kWhole || Left(first, b) > 0) {
        LoadAligned(place, &vectors[b]);
      }
    }
  }

  // The batch's part of a misaligned row, in this group's share of shared memory. To be loaded, it
  // goes on for `ahead` elements: the last owned vector ends in the aligned one behind the batch.
  __device__ __forceinline__ Stretch<S> InRoom(const S* slice, std::int64_t first,
                                               int ahead) const {
    const std::int64_t left = length_ - (first - thread_) * kWidth;
    const int batch = kBatch * threads_ * kWidth;
    return {slice + (first - thread_) * kWidth,
            static_cast<int>(min(left, std::int64_t{batch + ahead})),
            thread_,
            threads_,
            left >= batch + kWidth,
            ring_ + group_ * RoomBytes(threads_)};
  }

  __device__ __forceinline__ void LoadMisaligned(std::int64_t row, std::int64_t first,
                                                 Batch* batch) const {
    Pieces<S, kBatch> pieces[kHeld];
#pragma unroll
    for (int j = 0; j < kHeld; ++j) InRoom(Base::Input(j, row), first, kWidth).Load(&pieces[j]);
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      const Stretch<S> stretch = InRoom(Base::Input(j, row), first, kWidth);
      Base::SyncGroup();
      stretch.Put(pieces[j]);
      Base::SyncGroup();
      stretch.Get(&pieces[j]);
#pragma unroll
      for (int b = 0; b < kBatch; ++b) batch->row[j][b] = pieces[j].vectors[b];
    }
  }

  template <bool kWhole, bool kWithColumns>
  __device__ __forceinline__ Batch LoadBatch(std::int64_t row, int stage,
                                             std::int64_t first) const {
    Batch batch = {};
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      if constexpr (kSource == Source::kRing) {
        Load<kWhole>(static_cast<const S*>(Base::Stage(stage, j)), first, batch.row[j]);
      } else if constexpr (kSource == Source::kAligned) {
        Load<kWhole>(Base::Input(j, row), first, batch.row[j]);
      }
    }
    if constexpr (kSource == Source::kMisaligned) LoadMisaligned(row, first, &batch);
    if constexpr (kWithColumns) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const W* const column = arguments_.columns[c];
        if (column == nullptr) continue;
        if constexpr (kSource == Source::kRing) {
          Load<kWhole>(static_cast<const W*>(Base::Column(c)), first, batch.columns[c]);
        } else {
          Load<kWhole>(column + begin_, first, batch.columns[c]);
        }
      }
    }
    return batch;
  }

  // The values of the batch's b-th vector as the phases before kPhase leave them, and of the
  // columns.
  struct VectorValues {
    Values<T, kInputs> row[kWidth];
    Values<T, kColumns> columns[kWidth];
  };

  template <int kPhase>
  __device__ __forceinline__ VectorValues Read(const F& functor, const Batch& batch, int b) const {
    VectorValues values;
    T unpacked[kWidth];
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      Unpack(batch.row[j][b], unpacked);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) values.row[i][j] = unpacked[i];
    }
#pragma unroll
    for (int j = kHeld; j < kInputs; ++j)
#pragma unroll
      for (int i = 0; i < kWidth; ++i) values.row[i][j] = T(0);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      Unpack(batch.columns[c][b], unpacked);
#pragma unroll
      for (int i = 0; i < kWidth; ++i)
        values.columns[i][c] =
            arguments_.columns[c] != nullptr ? unpacked[i] : T(functor.Neutral(c));
    }
#pragma unroll
    for (int i = 0; i < kWidth; ++i) Replay<kPhase, S>(functor, values.row[i], values.columns[i]);
    return values;
  }

  // ---------------------------------------------------------------------------------- a row

  __device__ __forceinline__ void Row(std::int64_t row, const Turn& turn, F* states) {
    F functor = functor_;
    const int stage = turn.stage;
    if constexpr (kSource == Source::kRing) Base::WaitUntilFull(turn);
    ReducePhase<0>(&functor, row, turn, [&] {
      // All of the group are done with the row before.
      const int last = settings_.stages - 1;
      if (kSource == Source::kRing && thread_ == Base::Filler() && turn.count > 0)
        Base::Fill(row + last * Base::row_stride_, stage == 0 ? last : stage - 1);
    });
    if constexpr (kPhaseCount > 1) ReducePhase<1>(&functor, row, turn, [] {});
    if constexpr (kPhaseCount > 2) ReducePhase<2>(&functor, row, turn, [] {});
    static_assert(kPhaseCount <= 3);
    if constexpr (kSums) {
#pragma unroll
      for (int n = 0; n < kSumBatches; ++n)
        AtBatch(n * kBatch * threads_, [&](std::int64_t first, auto whole) {
          Write<whole>(functor, row, stage, first, sums_[n]);
        });
    } else {
      if (F::kColumnSums > 0 && rank_ == 0 && thread_ == 0) states[row] = functor;
      ForEachBatch([&](std::int64_t first, auto whole) {
        Write<whole>(functor, row, stage, first, sums_[0]);
      });
    }
  }

  template <int kPhase, class Between>
  __device__ __forceinline__ void ReducePhase(F* functor, std::int64_t row, const Turn& turn,
                                              const Between& between) {
    using Total = Terms<F, T, kPhase>;
    ThreadTotals<F::Phases::At(kPhase), Total, kWidth> totals;
    ForEachBatch([&](std::int64_t first, auto whole) {
      // Of the phases, only those of ops that sum columns look at the column inputs.
      const Batch batch = LoadBatch<whole, (F::kColumnSums > 0)>(row, turn.stage, first);
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        if (!whole && Left(first, b) <= 0) continue;
        VectorValues values = Read<kPhase>(*functor, batch, b);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          const Total term = functor->Term(Phase<kPhase>{}, values.row[i], values.columns[i]);
          if (kSource != Source::kMisaligned || i < Left(first, b)) totals.Add(i, term);
        }
      }
    });
    functor->Finish(Phase<kPhase>{}, Base::template Reduce<kPhase>(totals.Sum(), turn, between));
  }

  template <bool kWhole>
  __device__ __forceinline__ void Write(const F& functor, std::int64_t row, int stage,
                                        std::int64_t first, BatchSums& sums) {
    const Batch batch = LoadBatch<kWhole, true>(row, stage, first);
    Vector<S, kWidth> late[F::kLateInputs + 1][kBatch] = {};
#pragma unroll
    for (int j = kHeld; j < kInputs; ++j)
      if (arguments_.inputs[j] != nullptr)
        Load<kWhole>(Base::Input(j, row), first, late[j - kHeld]);
    T out[F::kRowOutputs][kBatch][kWidth];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      VectorValues values = Read<kPhaseCount>(functor, batch, b);
#pragma unroll
      for (int j = kHeld; j < kInputs; ++j) {
        T unpacked[kWidth];
        Unpack(late[j - kHeld][b], unpacked);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) values.row[i][j] = unpacked[i];
      }
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const auto result = functor.Result(values.row[i], values.columns[i]);
#pragma unroll
        for (int o = 0; o < F::kRowOutputs; ++o) out[o][b][i] = result[o];
        if constexpr (kSums) {
          const auto term = functor.ColumnTerm(values.row[i]);
#pragma unroll
          for (int s = 0; s < F::kColumnSums; ++s)
            sums[s][b][i] = AddRounded(sums[s][b][i], Plain(term[s]));
        }
      }
    }
#pragma unroll
    for (int o = 0; o < F::kRowOutputs; ++o) {
      if (arguments_.outputs[o] == nullptr) continue;
      S* const slice = Base::Output(o, row);
      if constexpr (kSource == Source::kMisaligned) {
        Vector<S, kWidth> results[kBatch];
#pragma unroll
        for (int b = 0; b < kBatch; ++b) results[b] = Pack<S>(out[o][b]);
        const Stretch<S> stretch = InRoom(slice, first, 0);
        Base::SyncGroup();
        stretch.PutOwned(results);
        Base::SyncGroup();
        stretch.Store(results, slice + (first - thread_) * kWidth);
      } else {
#pragma unroll
        for (int b = 0; b < kBatch; ++b)
          if (kWhole || Left(first, b) > 0)
            StoreAligned(Pack<S>(out[o][b]), slice + (first + b * threads_) * kWidth);
      }
    }
  }

  // partials[sum][group of all blocks][column].
  __device__ __forceinline__ void WriteSums(Sum* partials) const {
    constexpr int kPer = kVectorBytes / sizeof(Sum);
    const std::int64_t count = gridDim.x / settings_.cluster * settings_.groups;
    const std::int64_t group = blockIdx.x / settings_.cluster * settings_.groups + group_;
#pragma unroll
    for (int s = 0; s < F::kColumnSums; ++s) {
      Sum* const slice = partials + (s * count + group) * arguments_.rows.columns + begin_;
#pragma unroll
      for (int k = 0; k < kSumBatches * kBatch; ++k) {
        const auto& sums = sums_[k / kBatch][s][k % kBatch];
        const int first = (k * threads_ + thread_) * kWidth;
#pragma unroll
        for (int i = 0; i < kWidth; i += kSource == Source::kMisaligned ? 1 : kPer) {
          if (first + i >= length_) continue;
          if constexpr (kSource == Source::kMisaligned) {
            slice[first + i] = sums[i];
          } else {
            Vector<Sum, kPer> vector;
#pragma unroll
            for (int j = 0; j < kPer; ++j) vector.Set(j, sums[i + j]);
            StoreAligned(vector, slice + first + i);
          }
        }
      }
    }
  }

  const F& functor_;
  BatchSums sums_[kSumBatches + 1] = {};
};

}  // namespace twinop::rowwise
