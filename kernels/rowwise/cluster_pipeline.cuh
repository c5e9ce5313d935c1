// What the kernels for wide rows share: the rows and the slice of a group of threads, the pipeline
// of slices that bulk copies fill ahead in shared memory, and reductions over all threads that
// share a row. Without a pipeline and without clusters it serves GPUs before sm_90, too.
#pragma once

#include <cstdint>

#include "twinop/primitives/hopper.cuh"
#include "twinop/primitives/l2_hints.cuh"
#include "twinop/primitives/vector.cuh"
#include "twinop/rowwise/reduce.cuh"

namespace twinop::rowwise {

inline constexpr int kMaxBarriers = kMaxGroups * kMaxStages;

template <class F, class S>
struct SliceStorage {
  using T = ElementCompute<S>;
  alignas(8) hopper::Barrier full[kMaxBarriers];
  hopper::Barrier columns;
  ClusterExchange<T, kPhases<F>> cluster[kMaxGroups];
  BlockStorage<T> block[kMaxGroups][2];
};

// The position of a group in its rows and stages. Each group has stages of its own, because copies
// end in any order and a barrier distinguishes only its last two phases.
struct PipelineState {
  std::uint32_t count = 0;
  int stage = 0;
  std::uint32_t parity = 0;

  __device__ __forceinline__ void Advance(int stages) {
    ++count;
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

// How bulk copies fill the pipeline: not at all, with rows of whole aligned vectors, or with rows
// that start anywhere and share their first and last vectors with their neighbours.
enum class Pipeline { kNone, kAligned, kUnaligned };

template <class F, class S, class W, Pipeline kPipeline>
class RowSlices {
 public:
  using T = ElementCompute<S>;
  using Storage = SliceStorage<F, S>;
  static constexpr int kWidth = kVectorBytes / sizeof(S);
  static constexpr int kResident = kEarlyInputs<F>;
  static constexpr int kColumns = kColumnInputs<F>;
  static constexpr int kPhaseCount = kPhases<F>;

  __device__ RowSlices(const Arguments<F, S, W>& arguments, const ClusterSettings& settings,
                       const L2ReadPolicy& reads, Storage* storage, unsigned char* memory)
      : arguments_(arguments),
        settings_(settings),
        reads_(reads),
        storage_(storage),
        rank_(settings.cluster > 1 ? hopper::ClusterRank() : 0),
        threads_(settings.threads),
        group_(static_cast<int>(threadIdx.x) / threads_),
        thread_(static_cast<int>(threadIdx.x) % threads_) {
    const unsigned clusters = gridDim.x / settings.cluster;
    first_row_ = blockIdx.x / settings.cluster + std::int64_t{group_} * clusters;
    row_stride_ = std::int64_t{settings.groups} * clusters;
    const std::int64_t columns = arguments.rows.columns;
    slice_ = SliceVectors(columns, kWidth, settings.cluster) * kWidth;
    begin_ = min(slice_ * rank_, columns);
    length_ = min(slice_, columns - begin_);
    memory_ = memory;
    stages_ = memory + (kPipeline == Pipeline::kNone ? 0 : slice_ * kColumns * sizeof(W));
  }

 protected:
  __device__ __forceinline__ void Begin() const {
    if (kPipeline == Pipeline::kNone && settings_.cluster == 1) return;
    if (threadIdx.x == 0) {
      if constexpr (kPipeline != Pipeline::kNone) {
#pragma unroll 1
        for (int i = 0; i < settings_.groups * settings_.stages; ++i)
          hopper::Init(&storage_->full[i], 1);
        hopper::Init(&storage_->columns, 1);
      }
#pragma unroll 1
      for (int g = 0; g < settings_.groups; ++g)
        for (auto& slot : storage_->cluster[g].arrived)
          for (hopper::Barrier& barrier : slot) hopper::Init(&barrier, 1);
      hopper::FenceInit();
    }
    __syncthreads();
    if constexpr (kPipeline != Pipeline::kNone) {
      if (thread_ == Producer()) {
#pragma unroll 1
        for (int i = 0; i < settings_.stages; ++i) Produce(first_row_ + i * row_stride_, i);
      }
      if constexpr (kColumns > 0) LoadColumns();
    }
    if (settings_.cluster > 1) hopper::ClusterSync();
  }
  __device__ __forceinline__ void End() const {
    if (settings_.cluster > 1) hopper::ClusterSync();  // none leaves while another writes to it
  }

  // Loads the column inputs into shared memory, where they stay.
  __device__ __forceinline__ void LoadColumns() const {
    if (threadIdx.x == 0) {
      const std::uint32_t bytes = static_cast<std::uint32_t>(length_) * sizeof(W);
      std::uint32_t all = 0;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) all += arguments_.columns[c] != nullptr ? bytes : 0;
      hopper::ArriveExpecting(&storage_->columns, all);
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
        if (arguments_.columns[c] != nullptr && bytes > 0)
          hopper::BulkLoad(Column(c), arguments_.columns[c] + begin_, bytes, &storage_->columns,
                           reads_.Policy());
    }
    hopper::Wait(&storage_->columns, 0);
  }
  __device__ __forceinline__ W* Column(int c) const {
    return reinterpret_cast<W*>(memory_) + c * slice_;
  }

  // ---------------------------------------------------------------------------------- the pipeline

  // The thread of a group that starts its copies. It is not in the first warp, which sends totals.
  __device__ __forceinline__ int Producer() const { return threads_ - 32; }

  // Starts the copies of a row, if there is one.
  __device__ __forceinline__ void Produce(std::int64_t row, int stage) const {
    if (row >= arguments_.rows.count) return;
    hopper::Barrier* const full = Full(stage);
    std::uint32_t bytes = 0;
    if constexpr (kPipeline == Pipeline::kAligned) {
      bytes = static_cast<std::uint32_t>(length_) * sizeof(S);
      hopper::ArriveExpecting(full, kResident * bytes);
      if (bytes == 0) return;
#pragma unroll
      for (int j = 0; j < kResident; ++j)
        hopper::BulkLoad(Stage(stage, j), Input(j, row), bytes, full, reads_.Policy());
    } else {
#pragma unroll
      for (int j = 0; j < kResident; ++j) bytes += ProduceUnaligned(j, row, Stage(stage, j), full);
      hopper::ArriveExpecting(full, bytes);
    }
  }

  // Copies the aligned vectors that a slice lies in. Of vectors that reach out of the tensor it
  // copies the slice's elements one by one.
  __device__ __forceinline__ std::uint32_t ProduceUnaligned(int j, std::int64_t row, S* stage,
                                                            hopper::Barrier* full) const {
    if (length_ == 0) return 0;
    const S* const slice = Input(j, row);
    const S* const slice_end = slice + length_;
    const S* const start = slice - PastAligned(slice);
    const S* from = start;
    const S* to = start + (slice_end - start + kWidth - 1) / kWidth * kWidth;
    const S* const tensor = arguments_.inputs[j];
    const S* const tensor_end =
        tensor + (arguments_.rows.count - 1) * arguments_.strides[j] + arguments_.rows.columns;
    if (from < tensor || to > tensor_end) {
      const auto copy = [&](const S* first, const S* last) {
        for (const S* s = first; s < last; ++s) stage[s - start] = *s;
      };
      if (from < tensor) {
        from += kWidth;
        copy(slice, from < slice_end ? from : slice_end);
      }
      if (to > tensor_end && to > from) {
        to -= kWidth;
        copy(to > slice ? to : slice, slice_end);
      }
      hopper::FenceAsync();
    }
    const auto bytes = static_cast<std::uint32_t>((to - from) * sizeof(S));
    if (bytes > 0) hopper::BulkLoad(stage + (from - start), from, bytes, full, reads_.Policy());
    return bytes;
  }
  __device__ __forceinline__ static int PastAligned(const S* place) {
    return static_cast<int>(reinterpret_cast<std::uintptr_t>(place) % kVectorBytes / sizeof(S));
  }

  __device__ __forceinline__ void WaitForStage(const PipelineState& state) const {
    hopper::Wait(Full(state.stage), state.parity);
  }
  __device__ __forceinline__ hopper::Barrier* Full(int stage) const {
    return &storage_->full[group_ * settings_.stages + stage];
  }
  __device__ __forceinline__ std::int64_t StageElements() const {
    return slice_ + (kPipeline == Pipeline::kUnaligned ? kWidth : 0);
  }
  __device__ __forceinline__ S* StageOf(int group, int stage, int j) const {
    return reinterpret_cast<S*>(stages_) +
           ((group * settings_.stages + stage) * kResident + j) * StageElements();
  }
  __device__ __forceinline__ S* Stage(int stage, int j) const { return StageOf(group_, stage, j); }

  // ---------------------------------------------------------------------------------- a row

  __device__ __forceinline__ const S* Input(int j, std::int64_t row) const {
    return reads_.Of(arguments_.inputs[j] + arguments_.InputRow(j, row) * arguments_.strides[j] +
                     begin_);
  }
  __device__ __forceinline__ S* Output(int o, std::int64_t row) const {
    return arguments_.outputs[o] + row * arguments_.rows.columns + begin_;
  }

  __device__ __forceinline__ void SyncGroup() const {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + group_), "r"(threads_) : "memory");
  }

  // Reduces over all threads that share the row. between() runs when all threads of the group have
  // arrived.
  template <int kPhase, class Total, class Between>
  __device__ __forceinline__ Total Reduce(Total total, const PipelineState& state,
                                          const Between& between) const {
    constexpr Reduction kOp = F::Phases::At(kPhase);
    // Two places alternate: a fast warp's next reduction must not overwrite what a slow one reads.
    total = ReduceBlock<kOp>(total, thread_, threads_, 1 + group_,
                             &storage_->block[group_][(state.count * kPhaseCount + kPhase) & 1]);
    between();
    if (settings_.cluster > 1)
      total = ReduceCluster<kPhase, kOp>(total, state.count, thread_, rank_, settings_.cluster,
                                         &storage_->cluster[group_]);
    return total;
  }

  const Arguments<F, S, W>& arguments_;
  const ClusterSettings& settings_;
  const L2ReadPolicy& reads_;
  Storage* const storage_;
  const int rank_;
  int threads_;  // of a group
  const int group_;
  int thread_;                           // of its group's
  std::int64_t first_row_, row_stride_;  // the group's rows
  std::int64_t slice_, begin_, length_;  // elements: of a slice, before this block's, of this one
  unsigned char *memory_, *stages_;
};

}  // namespace twinop::rowwise
