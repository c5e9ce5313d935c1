// Wide rows whose elements are read again for each phase: from a pipeline in shared memory, while
// the next rows are on their way, or from global memory. With a pipeline, the groups' registers sum
// the columns on the way.
#pragma once

#include <cstdint>

#include "twinop/rowwise/cluster_batches.cuh"

namespace twinop::rowwise {

// Vectors of a thread in a batch. With sums there are few registers and few batches; the last batch
// is full more often with one.
template <class F, Source kSource, bool kSums>
inline constexpr int kRereadBatch =
    kSums || (kSource == Source::kGlobal && kEarlyInputs<F> > 1) ? 1 : 2;

// kSums: sums the columns on the way. Without, the rows' functors are stored for a second pass.
template <class F, class S, class W, Source kSource, bool kSums>
class RereadSlices : SliceBatches<F, S, W, kSource, kRereadBatch<F, kSource, kSums>> {
  static constexpr int kBatch = kRereadBatch<F, kSource, kSums>;
  using Base = SliceBatches<F, S, W, kSource, kBatch>;
  using Base::arguments_, Base::settings_, Base::thread_, Base::threads_, Base::group_;
  using Base::AtBatch, Base::ForEachBatch, Base::Left;
  using Base::begin_, Base::length_, Base::rank_;
  using Base::kWidth, Base::kInputs, Base::kResident, Base::kPhaseCount;
  using typename Base::Batch;
  using typename Base::VectorValues;

 public:
  using typename Base::Storage;
  using typename Base::T;
  using Sum = Compute<S>;
  using Base::SharedBytes;
  static constexpr int kSumBatches = kSums ? kClusterSumVectors<S> / kBatch : 0;
  using BatchSums = Sum[F::kColumnSums + 1][kBatch][kWidth];

  __device__ RereadSlices(const F& functor, const Arguments<F, S, W>& arguments,
                          const ClusterSettings& settings, const Reads& reads, Storage* storage,
                          unsigned char* memory)
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
  __device__ __forceinline__ void Row(std::int64_t row, const PipelineState& state, F* states) {
    F functor = functor_;
    const int stage = state.stage;
    if constexpr (kSource == Source::kPipeline) Base::WaitForStage(state);
    ReducePhase<0>(&functor, row, state, [&] {
      // All threads of the group are done with the row before.
      const int last = settings_.stages - 1;
      if (kSource == Source::kPipeline && thread_ == Base::Producer() && state.count > 0)
        Base::Produce(row + last * Base::row_stride_, stage == 0 ? last : stage - 1);
    });
    if constexpr (kPhaseCount > 1) ReducePhase<1>(&functor, row, state, [] {});
    if constexpr (kPhaseCount > 2) ReducePhase<2>(&functor, row, state, [] {});
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
  __device__ __forceinline__ void ReducePhase(F* functor, std::int64_t row,
                                              const PipelineState& state, const Between& between) {
    using Total = Terms<F, T, kPhase>;
    ThreadTotals<F::Phases::At(kPhase), Total, kWidth> totals;
    ForEachBatch([&](std::int64_t first, auto whole) {
      // In the phases, only ops that sum columns look at the column inputs.
      const Batch batch =
          Base::template LoadBatch<whole, (F::kColumnSums > 0)>(row, state.stage, first);
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        if (!whole && Left(first, b) <= 0) continue;
        VectorValues values = Base::template Read<kPhase>(*functor, batch, b);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          const auto term = functor->Term(Phase<kPhase>{}, values.row[i], values.columns[i]);
          if (kSource == Source::kPipeline || i < Left(first, b)) totals.Add(i, term);
        }
      }
    });
    functor->Finish(Phase<kPhase>{}, Base::template Reduce<kPhase>(totals.Sum(), state, between));
  }

  template <bool kWhole>
  __device__ __forceinline__ void Write(const F& functor, std::int64_t row, int stage,
                                        std::int64_t first, BatchSums& sums) {
    const Batch batch = Base::template LoadBatch<kWhole, true>(row, stage, first);
    Vector<S, kWidth> late[F::kLateInputs + 1][kBatch] = {};
#pragma unroll
    for (int j = kResident; j < kInputs; ++j)
      if (arguments_.inputs[j] != nullptr)
        Base::template Load<kWhole>(Base::Input(j, row), first, late[j - kResident]);
    T out[F::kRowOutputs][kBatch][kWidth];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      VectorValues values = Base::template Read<kPhaseCount>(functor, batch, b);
#pragma unroll
      for (int j = kResident; j < kInputs; ++j) {
        T unpacked[kWidth];
        Unpack(late[j - kResident][b], unpacked);
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
            sums[s][b][i] = Plain(WithTerm(T(sums[s][b][i]), term, s));
        }
      }
    }
#pragma unroll
    for (int o = 0; o < F::kRowOutputs; ++o) {
      if (arguments_.outputs[o] == nullptr) continue;
      S* const slice = Base::Output(o, row);
#pragma unroll
      for (int b = 0; b < kBatch; ++b)
        Base::template Store<kWhole>(Pack<S>(out[o][b]), slice, first, b);
    }
  }

  // Writes partials[sum][group of all blocks][column].
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
  BatchSums sums_[kSumBatches + 1] = {};
};

}  // namespace twinop::rowwise
