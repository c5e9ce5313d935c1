// Rows too wide for registers. On sm_90 a block, or a cluster of blocks that share each row, keeps
// a ring of rows in shared memory, filled by bulk copies rows ahead of the groups of threads that
// reduce and write, each group a row of its own, so that memory waits for no reduction. The column
// inputs stay in shared memory, sums of the columns in the groups' registers. Elsewhere, and where
// tensors are misaligned, the elements come from global memory, once for each phase, added in the
// same order.
#pragma once

#include <cstdint>

#include "kernels/cuda_launch.cuh"
#include "kernels/hopper.cuh"
#include "kernels/rowwise_access.cuh"
#include "kernels/rowwise_reduce.cuh"

namespace twinop::rowwise {

enum class Source { kRing, kAligned, kMisaligned };

inline constexpr int kMaxStages = 32;
inline constexpr int kMaxGroups = 8;

template <class F, class S, class W>
struct WideStorage {
  using T = ElementCompute<S>;
  alignas(8) hopper::Barrier full[kMaxStages];
  ClusterStorage<T, kPhases<F>> cluster[kMaxGroups];
  BlockStorage<T> block[kMaxGroups][2];
};

// kSums: of the columns, on the way. (Without, the rows' functors are kept for a second pass.)
template <class F, class S, class W, Source kSource, bool kSums>
class WideRows {
 public:
  using T = ElementCompute<S>;
  using Sum = Compute<S>;
  using Storage = WideStorage<F, S, W>;
  static constexpr int kWidth = kVectorBytes / sizeof(S);
  static constexpr int kInputs = kRowInputs<F>;
  static constexpr int kHeld = kEarlyInputs<F>;
  static constexpr int kColumns = kColumnInputs<F>;
  static constexpr int kPhaseCount = kPhases<F>;
  // Vectors of a thread. (With sums, which leave few registers and few batches, the last one is
  // full more often: layer norm backward, bfloat16, 16384 x 11008: 623 us, by two vectors 712 us.)
  static constexpr int kBatch = kSums ? 1 : kHeld == 1 ? 4 : 2;
  static constexpr int kSumBatches = kSums ? kWideSumVectors<S> / kBatch : 0;
  using BatchSums = Sum[F::kColumnSums + 1][kBatch][kWidth];

  __device__ WideRows(const F& functor, const Arguments<F, S, W>& arguments,
                      const WideSettings& settings, Storage* storage, unsigned char* memory)
      : functor_(functor),
        arguments_(arguments),
        settings_(settings),
        storage_(storage),
        rank_(settings.cluster > 1 ? hopper::ClusterRank() : 0),
        threads_(kWideThreads / settings.groups),
        group_(static_cast<int>(threadIdx.x) / threads_),
        thread_(static_cast<int>(threadIdx.x) % threads_) {
    // Slices of whole vectors.
    const std::int64_t columns = arguments.rows.columns;
    const std::int64_t slice = SliceVectors(columns, kWidth, settings.cluster) * kWidth;
    begin_ = min(slice * rank_, columns);
    length_ = min(slice, columns - begin_);
    columns_ = reinterpret_cast<W*>(memory);
    column_stride_ = slice;
    ring_ = memory + (kSource == Source::kRing ? slice * kColumns * sizeof(W) : 0);
    stage_elements_ = slice;
  }

  // Of shared memory, for misaligned rows: a batch of each group.
  static constexpr __host__ __device__ int RoomBytes(const WideSettings& settings) {
    const int vectors = kBatch * kWideThreads / settings.groups;
    return settings.groups * Stretch<S>::RoomVectors(vectors) * kVectorBytes;
  }

  __device__ __forceinline__ void Run(F* states, Sum* partials) {
    if (kSource == Source::kRing || settings_.cluster > 1) Begin();
    if (kSource == Source::kRing && thread_ == 0)
      for (int i = 0; i < settings_.stages; ++i) Fill(group_ + i * settings_.groups);
    std::uint32_t turn = 0;
    for (std::int64_t n = group_; RowOf(n) < arguments_.rows.count; n += settings_.groups)
      Row(n, turn++, states);
    if constexpr (kSums) WriteSums(partials);
    if (settings_.cluster > 1) hopper::ClusterSync();  // none leaves while another writes to it
  }

 private:
  // The n-th row of this block or cluster.
  __device__ __forceinline__ std::int64_t RowOf(std::int64_t n) const {
    return blockIdx.x / settings_.cluster + n * (gridDim.x / settings_.cluster);
  }

  __device__ __forceinline__ void Begin() {
    if (threadIdx.x == 0) {
      if constexpr (kSource == Source::kRing) {
        for (int i = 0; i < settings_.groups * settings_.stages; ++i)
          hopper::Init(&storage_->full[i], 1);
      }
      for (int g = 0; g < settings_.groups; ++g)
        for (auto& slot : storage_->cluster[g].arrived)
          for (hopper::Barrier& barrier : slot) hopper::Init(&barrier, 1);
      hopper::FenceInit();
    }
    if constexpr (kSource == Source::kRing) {
      for (int c = 0; c < kColumns; ++c) {
        const W* const column = arguments_.columns[c];
        if (column == nullptr) continue;
        for (std::int64_t i = threadIdx.x; i * kWidth < length_; i += blockDim.x)
          reinterpret_cast<Vector<W, kWidth>*>(columns_ + c * column_stride_)[i] =
              reinterpret_cast<const Vector<W, kWidth>*>(column + begin_)[i];
      }
    }
    __syncthreads();
    if (settings_.cluster > 1) hopper::ClusterSync();
  }

  // Starts the copies of the n-th row, if there is one.
  __device__ __forceinline__ void Fill(std::int64_t n) const {
    if (RowOf(n) >= arguments_.rows.count) return;
    const int stage = StageOf(n);
    const std::uint32_t bytes = static_cast<std::uint32_t>(length_) * sizeof(S);
    hopper::ArriveExpecting(&storage_->full[stage], kHeld * bytes);
    if (bytes == 0) return;
#pragma unroll
    for (int j = 0; j < kHeld; ++j)
      hopper::BulkLoad(Stage(stage, j), Input(j, RowOf(n)), bytes, &storage_->full[stage]);
  }

  // Each group has stages of its own and takes its rows in order: copies end in any order, and a
  // barrier tells only its last phase from the one before.
  __device__ __forceinline__ int StageOf(std::int64_t n) const {
    const int group = static_cast<int>(n % settings_.groups);
    return group * settings_.stages + static_cast<int>(n / settings_.groups % settings_.stages);
  }
  __device__ __forceinline__ std::uint32_t RoundOf(std::int64_t n) const {
    return static_cast<std::uint32_t>(n / settings_.groups / settings_.stages);
  }

  __device__ __forceinline__ S* Stage(int stage, int j) const {
    return reinterpret_cast<S*>(ring_) + (stage * kHeld + j) * stage_elements_;
  }
  __device__ __forceinline__ const S* Input(int j, std::int64_t row) const {
    return arguments_.inputs[j] + row * arguments_.strides[j] + begin_;
  }

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
            ring_ + group_ * Stretch<S>::RoomVectors(kBatch * threads_) * kVectorBytes};
  }
  __device__ __forceinline__ void SyncGroup() const {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + group_), "r"(threads_) : "memory");
  }

  __device__ __forceinline__ void LoadMisaligned(std::int64_t row, std::int64_t first,
                                                 Batch* batch) const {
    Pieces<S, kBatch> pieces[kHeld];
#pragma unroll
    for (int j = 0; j < kHeld; ++j) InRoom(Input(j, row), first, kWidth).Load(&pieces[j]);
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      const Stretch<S> stretch = InRoom(Input(j, row), first, kWidth);
      SyncGroup();
      stretch.Put(pieces[j]);
      SyncGroup();
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
        Load<kWhole>(static_cast<const S*>(Stage(stage, j)), first, batch.row[j]);
      } else if constexpr (kSource == Source::kAligned) {
        Load<kWhole>(Input(j, row), first, batch.row[j]);
      }
    }
    if constexpr (kSource == Source::kMisaligned) LoadMisaligned(row, first, &batch);
    if constexpr (kWithColumns) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const W* const column = arguments_.columns[c];
        if (column == nullptr) continue;
        if constexpr (kSource == Source::kRing) {
          Load<kWhole>(static_cast<const W*>(columns_ + c * column_stride_), first,
                       batch.columns[c]);
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

  __device__ __forceinline__ void Row(std::int64_t n, std::uint32_t turn, F* states) {
    F functor = functor_;
    const std::int64_t row = RowOf(n);
    int stage = 0;
    if constexpr (kSource == Source::kRing) {
      stage = StageOf(n);
      hopper::Wait(&storage_->full[stage], RoundOf(n) & 1);
    }
    ReducePhase<0>(&functor, row, stage, turn);
    // Its barrier says that all of the group are done with the row before.
    if (kSource == Source::kRing && thread_ == 0 && turn > 0)
      Fill(n + (settings_.stages - 1) * settings_.groups);
    if constexpr (kPhaseCount > 1) ReducePhase<1>(&functor, row, stage, turn);
    if constexpr (kPhaseCount > 2) ReducePhase<2>(&functor, row, stage, turn);
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

  template <int kPhase>
  __device__ __forceinline__ void ReducePhase(F* functor, std::int64_t row, int stage,
                                              std::uint32_t turn) {
    constexpr Reduction kOp = F::Phases::At(kPhase);
    using Total = Terms<F, T, kPhase>;
    ThreadTotals<kOp, Total, kWidth> totals;
    ForEachBatch([&](std::int64_t first, auto whole) {
      // Of the phases, only those of ops that sum columns look at the column inputs.
      const Batch batch = LoadBatch<whole, (F::kColumnSums > 0)>(row, stage, first);
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
    // Two places in turn: a fast warp's next reduction must not overwrite what a slow one reads.
    Total total = ReduceBlock<kOp>(totals.Sum(), thread_, threads_, 1 + group_,
                                   &storage_->block[group_][(turn * kPhaseCount + kPhase) & 1]);
    if (settings_.cluster > 1)
      total = ReduceCluster<kPhase, kOp>(total, turn, thread_, rank_, settings_.cluster,
                                         &storage_->cluster[group_]);
    functor->Finish(Phase<kPhase>{}, total);
  }

  template <bool kWhole>
  __device__ __forceinline__ void Write(const F& functor, std::int64_t row, int stage,
                                        std::int64_t first, BatchSums& sums) {
    const Batch batch = LoadBatch<kWhole, true>(row, stage, first);
    Vector<S, kWidth> late[F::kLateInputs + 1][kBatch] = {};
#pragma unroll
    for (int j = kHeld; j < kInputs; ++j)
      if (arguments_.inputs[j] != nullptr) Load<kWhole>(Input(j, row), first, late[j - kHeld]);
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
      S* const slice = arguments_.outputs[o] + row * arguments_.rows.columns + begin_;
      if constexpr (kSource == Source::kMisaligned) {
        Vector<S, kWidth> results[kBatch];
#pragma unroll
        for (int b = 0; b < kBatch; ++b) results[b] = Pack<S>(out[o][b]);
        const Stretch<S> stretch = InRoom(slice, first, 0);
        SyncGroup();
        stretch.PutOwned(results);
        SyncGroup();
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
  const Arguments<F, S, W>& arguments_;
  const WideSettings& settings_;
  Storage* const storage_;
  const int rank_, threads_, group_, thread_;
  std::int64_t begin_, length_, column_stride_, stage_elements_;
  W* columns_;
  unsigned char* ring_;
  BatchSums sums_[kSumBatches + 1] = {};
};

template <class F, class S, class W, Source kSource, bool kSums>
__global__ void __launch_bounds__(kWideThreads, 1)
    WideKernel(F functor, Arguments<F, S, W> arguments, WideSettings settings, F* states,
               Compute<S>* partials) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ WideStorage<F, S, W> storage;
  WaitForPreviousKernel();
  WideRows<F, S, W, kSource, kSums>(functor, arguments, settings, &storage, memory)
      .Run(states, partials);
}

}  // namespace twinop::rowwise
