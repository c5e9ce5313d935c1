// Wide rows whose elements are read again for each phase: from a pipeline in shared memory, while
// the next rows are on their way, or from global memory. With a pipeline, the groups' registers sum
// the columns on the way; without, the rows' functors are stored for a second pass.
#pragma once

#include <algorithm>
#include <cstdint>

#include "twinop/rowwise/cluster_pipeline.cuh"

namespace twinop::rowwise {

template <class F, class S, class W, Source kSource>
class StreamedRows
    : RowSlices<F, S, W, kSource == Source::kPipeline ? Pipeline::kAligned : Pipeline::kNone> {
  using Base =
      RowSlices<F, S, W, kSource == Source::kPipeline ? Pipeline::kAligned : Pipeline::kNone>;
  using Base::arguments_, Base::settings_, Base::thread_, Base::threads_, Base::group_;
  using Base::begin_, Base::length_, Base::rank_, Base::storage_;
  using Base::kWidth, Base::kResident, Base::kColumns, Base::kPhaseCount;
  static constexpr int kInputs = kRowInputs<F>;
  static constexpr bool kSums = F::kColumnReductions > 0 && kSource == Source::kPipeline;
  static constexpr OpTraits kOp = kTraitsOf<F, S, W>;
  // Adds rows up in the order of ResidentRows, which takes the same rows where they are aligned.
  static constexpr bool kAsResident = !kOp.HasMisaligned();
  static constexpr int kChains = kAsResident ? std::min(kWidth, 4) : kWidth;
  static constexpr int kTotals = kAsResident ? kOp.Totals() : 1;
  static constexpr bool kMoments = kAsResident && F::kMoments && sizeof(S) == 2;
  // Vectors of a thread in a batch. With sums there are few registers and few batches; the last
  // batch is full more often with one.
  static constexpr bool kOneByOne = kSums || (kSource == Source::kGlobal && kEarlyInputs<F> > 1);
  static constexpr int kBatch = kOneByOne && !kAsResident ? 1 : 2;

 public:
  using typename Base::Storage;
  using typename Base::T;
  using Sum = Compute<S>;
  static constexpr int kSumBatches = kSums ? ClusterSumVectors(sizeof(S)) / kBatch : 0;
  using BatchSums = Sum[F::kColumnReductions + 1][kBatch][kWidth];

  __device__ StreamedRows(const F& functor, const Arguments<F, S, W>& arguments,
                          const ClusterSettings& settings, const L2ReadPolicy& reads,
                          Storage* storage, unsigned char* memory)
      : Base(arguments, settings, reads, storage, memory), functor_(functor) {}

  __device__ __forceinline__ void Run(F* states, Sum* partials) {
    Base::Begin();
    PipelineState state;
    for (std::int64_t row = Base::first_row_; row < arguments_.rows.count;
         row += Base::row_stride_) {
      Row(row, state, states);
      state.Advance(settings_.stages);
    }
    if constexpr (kSums) WriteSums(partials);
    Base::End();
  }

 private:
  // This thread's vectors of the slice, kBatch at a time. All of them are loaded before the first
  // use.
  struct Batch {
    Vector<S, kWidth> row[kResident][kBatch];
    Vector<W, kWidth> columns[kColumns + 1][kBatch];
  };

  // Calls body(first, whole) for each batch: the first of its vectors, and whether all threads have
  // all of them. Every thread of a warp takes part in every batch. Batches from global memory are
  // never `whole`: code for both cases would be twice as large.
  template <class Body>
  __device__ __forceinline__ void ForEachBatch(const Body& body) const {
    const std::int64_t vectors = (length_ + kWidth - 1) / kWidth;
    const int batch = kBatch * threads_;
    std::int64_t start = 0;
    if constexpr (kSource == Source::kPipeline)
      for (; start + batch <= vectors; start += batch) body(start + thread_, std::true_type{});
    for (; start < vectors; start += batch) body(start + thread_, std::false_type{});
  }

  // Does the same for the one batch that starts at this vector of a slice in the pipeline.
  template <class Body>
  __device__ __forceinline__ void AtBatch(int start, const Body& body) const {
    static_assert(kSource == Source::kPipeline);
    const int vectors = static_cast<int>((length_ + kWidth - 1) / kWidth);
    if (start + kBatch * threads_ <= vectors) {
      body(start + thread_, std::true_type{});
    } else if (start < vectors) {
      body(start + thread_, std::false_type{});
    }
  }

  // Elements of the slice from the batch's b-th vector on.
  __device__ __forceinline__ std::int64_t Remaining(std::int64_t first, int b) const {
    return length_ - (first + b * threads_) * kWidth;
  }

  template <class U>
  __device__ __forceinline__ static bool IsAligned(const U* slice) {
    return reinterpret_cast<std::uintptr_t>(slice) % alignof(Vector<U, kWidth>) == 0;
  }

  // Loads a batch of a slice that may start at any element. Each branch surrounds all loads of the
  // batch: behind a branch of its own, a load would wait for the one before it.
  template <bool kWhole, class U>
  __device__ __forceinline__ void Load(const U* slice, std::int64_t first,
                                       Vector<U, kWidth> (&vectors)[kBatch]) const {
    const auto place = [&](int b) { return slice + (first + b * threads_) * kWidth; };
    if constexpr (kSource == Source::kPipeline) {
#pragma unroll
      for (int b = 0; b < kBatch; ++b)
        if (kWhole || Remaining(first, b) > 0) LoadAligned(place(b), &vectors[b]);
      return;
    }
    const std::int64_t left = Remaining(first, kBatch - 1);
    if (kBatch > 1 && left >= kWidth && IsAligned(slice)) {
#pragma unroll
      for (int b = 0; b < kBatch; ++b) LoadAligned(place(b), &vectors[b]);
      return;
    }
    if constexpr (sizeof(Vector<U, kWidth>) == kVectorBytes && sizeof(U) < 8) {
      // The slice has a vector on both sides, so the aligned vectors belong to it.
      if (first > 0 && left >= 2 * kWidth && !IsAligned(slice)) {
#pragma unroll
        for (int b = 0; b < kBatch; ++b) vectors[b] = LoadShifted<Vector<U, kWidth>>(place(b));
        return;
      }
    }
    LoadAnywhere(slice, first, vectors);
  }
  template <class U>
  __device__ __forceinline__ void LoadAnywhere(const U* slice, std::int64_t first,
                                               Vector<U, kWidth> (&vectors)[kBatch]) const {
#pragma unroll
    for (int b = 0; b < kBatch; ++b)
      twinop::LoadAnywhere(slice + (first + b * threads_) * kWidth,
                           static_cast<int>(min(Remaining(first, b), std::int64_t{kWidth})),
                           &vectors[b]);
  }

  template <bool kWhole>
  __device__ __forceinline__ void Store(const Vector<S, kWidth>& vector, S* slice,
                                        std::int64_t first, int b) const {
    S* const place = slice + (first + b * threads_) * kWidth;
    if constexpr (kSource == Source::kPipeline) {
      if (kWhole || Remaining(first, b) > 0) StoreAligned(vector, place);
    } else if (Remaining(first, b) >= kWidth && IsAligned(slice)) {
      StoreAligned(vector, place);
    } else {
#pragma unroll
      for (int i = 0; i < kWidth; ++i)
        if (i < Remaining(first, b)) place[i] = vector.Get(i);
    }
  }

  template <bool kWhole, bool kWithColumns>
  __device__ __forceinline__ Batch LoadBatch(std::int64_t row, int stage,
                                             std::int64_t first) const {
    Batch batch = {};
#pragma unroll
    for (int j = 0; j < kResident; ++j) {
      if constexpr (kSource == Source::kPipeline) {
        Load<kWhole>(static_cast<const S*>(Base::Stage(stage, j)), first, batch.row[j]);
      } else {
        Load<kWhole>(Base::Input(j, row), first, batch.row[j]);
      }
    }
    if constexpr (kWithColumns) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const W* const column = arguments_.Column(c, row);
        if (column == nullptr) continue;
        if constexpr (kSource == Source::kPipeline) {
          Load<kWhole>(static_cast<const W*>(Base::Column(c)), first, batch.columns[c]);
        } else {
          LoadAnywhere(column + begin_, first, batch.columns[c]);
        }
      }
    }
    return batch;
  }

  // The values of the batch's b-th vector as the phases before kPhase leave them, and those of the
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
    for (int j = 0; j < kResident; ++j) {
      Unpack(batch.row[j][b], unpacked);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) values.row[i][j] = unpacked[i];
    }
#pragma unroll
    for (int j = kResident; j < kInputs; ++j)
#pragma unroll
      for (int i = 0; i < kWidth; ++i) values.row[i][j] = T(0);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      Unpack(batch.columns[c][b], unpacked);
#pragma unroll
      for (int i = 0; i < kWidth; ++i)
        values.columns[i][c] =
            arguments_.columns[c] != nullptr ? unpacked[i] : T(functor.ColumnDefault(c));
    }
#pragma unroll
    for (int i = 0; i < kWidth; ++i) Replay<kPhase, S>(functor, values.row[i], values.columns[i]);
    return values;
  }

  __device__ __forceinline__ void Row(std::int64_t row, const PipelineState& state, F* states) {
    F functor = arguments_.FunctorOf(functor_, row);
    const int stage = state.stage;
    if constexpr (kSource == Source::kPipeline) Base::WaitForStage(state);
    bool all_phases = false;
    if (kMoments && settings_.groups == 1) {
      if constexpr (kMoments) all_phases = ReduceMoments(&functor, row);
    } else {
      ReducePhase<0>(&functor, row, state, [&] {
        // All threads of the group are done with the row before.
        const int last = settings_.stages - 1;
        if (kSource == Source::kPipeline && thread_ == Base::Producer() && state.count > 0)
          Base::Produce(row + last * Base::row_stride_, stage == 0 ? last : stage - 1);
      });
    }
    if constexpr (kPhaseCount > 1) {
      if (!all_phases) ReducePhase<1>(&functor, row, state, [] {});
    }
    static_assert(kPhaseCount <= 2);
    if constexpr (kSums) {
#pragma unroll
      for (int n = 0; n < kSumBatches; ++n)
        AtBatch(n * kBatch * threads_, [&](std::int64_t first, auto whole) {
          Write<whole>(functor, row, stage, first, sums_[n]);
        });
    } else {
      if (F::kColumnReductions > 0 && rank_ == 0 && thread_ == 0) states[row] = functor;
      ForEachBatch([&](std::int64_t first, auto whole) {
        Write<whole>(functor, row, stage, first, sums_[0]);
      });
    }
  }

  template <int kPhase, class Between>
  __device__ __forceinline__ void ReducePhase(F* functor, std::int64_t row,
                                              const PipelineState& state, const Between& between) {
    using Total = Terms<F, T, kPhase>;
    ThreadTotals<F::Phases::At(kPhase), Total, kChains> totals[kTotals];
    ForEachBatch([&](std::int64_t first, auto whole) {
      // In the phases, only ops that sum columns look at the column inputs.
      const Batch batch = LoadBatch<whole, (F::kColumnReductions > 0)>(row, state.stage, first);
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        if (!whole && Remaining(first, b) <= 0) continue;
        VectorValues values = Read<kPhase>(*functor, batch, b);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          const auto term = functor->Term(Phase<kPhase>{}, values.row[i], values.columns[i]);
          if (kSource != Source::kPipeline && i >= Remaining(first, b)) continue;
          // The lanes of a warp have one total.
          if (kTotals > 1 && b > 0 && settings_.groups == 1) {
            totals[kTotals - 1].Add(i, term);
          } else {
            totals[0].Add(i, term);
          }
        }
      }
    });
    if constexpr (kAsResident) {
      Total sums[kTotals];
#pragma unroll
      for (int t = 0; t < kTotals; ++t) sums[t] = totals[t].Sum();
      functor->Finish(Phase<kPhase>{}, ReduceGroup<F::Phases::At(kPhase)>(sums));
    } else {
      functor->Finish(Phase<kPhase>{},
                      Base::template Reduce<kPhase>(totals[0].Sum(), state, between));
    }
  }

  // Runs both phases of F::kMoments at once, as ResidentRows does.
  __device__ __forceinline__ bool ReduceMoments(F* functor, std::int64_t row) {
    using One = Values<T, 1>;
    ThreadTotals<kSum, One, kChains> sums[kTotals];
    ThreadTotals<kSquares, One, kChains> squares[kTotals];
    ForEachBatch([&](std::int64_t first, auto whole) {
      const Batch batch = LoadBatch<whole, false>(row, 0, first);
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        if (Remaining(first, b) <= 0) continue;
        VectorValues values = Read<0>(*functor, batch, b);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          const One term = functor->Term(Phase<0>{}, values.row[i], values.columns[i]);
          if (i >= Remaining(first, b)) continue;
          sums[b % kTotals].Add(i, term);
          squares[b % kTotals].Add(i, term);
        }
      }
    });
    Values<T, 2> totals[kTotals];
#pragma unroll
    for (int t = 0; t < kTotals; ++t) totals[t] = {{sums[t].Sum()[0], squares[t].Sum()[0]}};
    return FinishMoments(functor, ReduceGroup<kSum>(totals));
  }

  // Two places alternate: a fast warp's next reduction must not overwrite what a slow one reads.
  template <Reduction kOp, int N>
  __device__ __forceinline__ Values<T, N> ReduceGroup(const Values<T, N> (&totals)[kTotals]) {
    reduction_ ^= 1;
    return ReduceBlock<kOp>(totals, thread_, threads_, 1 + group_,
                            &storage_->block[group_][reduction_]);
  }

  template <bool kWhole>
  __device__ __forceinline__ void Write(const F& functor, std::int64_t row, int stage,
                                        std::int64_t first, BatchSums& sums) {
    const Batch batch = LoadBatch<kWhole, true>(row, stage, first);
    Vector<S, kWidth> inputs[F::kEpilogueInputs + 1][kBatch] = {};
#pragma unroll
    for (int j = kResident; j < kInputs; ++j)
      if (arguments_.inputs[j] != nullptr)
        Load<kWhole>(Base::Input(j, row), first, inputs[j - kResident]);
    T out[F::kRowOutputs][kBatch][kWidth];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      VectorValues values = Read<kPhaseCount>(functor, batch, b);
#pragma unroll
      for (int j = kResident; j < kInputs; ++j) {
        T unpacked[kWidth];
        Unpack(inputs[j - kResident][b], unpacked);
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
          for (int s = 0; s < F::kColumnReductions; ++s)
            sums[s][b][i] = Unwrap(WithTerm(T(sums[s][b][i]), term, s));
        }
      }
    }
#pragma unroll
    for (int o = 0; o < F::kRowOutputs; ++o) {
      if (arguments_.outputs[o] == nullptr) continue;
      S* const slice = Base::Output(o, row);
#pragma unroll
      for (int b = 0; b < kBatch; ++b) Store<kWhole>(Pack<S>(out[o][b]), slice, first, b);
    }
  }

  // Writes partials[sum][group of all blocks][column].
  __device__ __forceinline__ void WriteSums(Sum* partials) const {
    constexpr int kPer = kVectorBytes / sizeof(Sum);
    const std::int64_t count = gridDim.x / settings_.cluster * settings_.groups;
    const std::int64_t group = blockIdx.x / settings_.cluster * settings_.groups + group_;
#pragma unroll
    for (int s = 0; s < F::kColumnReductions; ++s) {
      Sum* const slice = partials + (s * count + group) * arguments_.rows.columns + begin_;
#pragma unroll
      for (int k = 0; k < kSumBatches * kBatch; ++k) {
        const auto& sums = sums_[k / kBatch][s][k % kBatch];
        const int first = (k * threads_ + thread_) * kWidth;
#pragma unroll
        for (int i = 0; i < kWidth; i += kPer) {
          if (first + i >= length_) continue;
          Vector<Sum, kPer> vector;
#pragma unroll
          for (int j = 0; j < kPer; ++j) vector.Set(j, sums[i + j]);
          StoreAligned(vector, slice + first + i);
        }
      }
    }
  }

  const F& functor_;
  int reduction_ = 0;
  BatchSums sums_[kSumBatches + 1] = {};
};

}  // namespace twinop::rowwise
