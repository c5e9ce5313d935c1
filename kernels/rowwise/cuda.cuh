// Row-wise ops on CUDA: chooses the kernel for the rows of a call and launches it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "twinop/primitives/l2_hints.cuh"
#include "twinop/primitives/launch.cuh"
#include "twinop/rowwise/cluster.cuh"
#include "twinop/rowwise/column_sums.cuh"
#include "twinop/rowwise/launch_settings.h"
#include "twinop/rowwise/resident.cuh"

namespace twinop::rowwise {

template <class F, class S, class W>
struct Launch {
  using T = Compute<S>;
  static constexpr int kWidth = kVectorBytes / sizeof(S);
  static constexpr int kResident = kEarlyInputs<F>;
  static constexpr bool kSums = F::kColumnSums > 0;
  static constexpr int kRowBytes = kResident * sizeof(S);
  static constexpr int kColumnBytes = kColumnInputs<F> * sizeof(W);
  static constexpr bool kOneRow = kResident == 1 || F::kPreparedOutput >= 0;
  static constexpr bool kShortRow = !kSums && kResident == 1 && sizeof(S) == 2;
  static constexpr ResidentSettings kSettings =
      ChooseResident(kSums, kShortRow&& kColumnInputs<F> > 0, kOneRow, sizeof(S));
  // One column is a multiple of no vector's width.
  static constexpr bool kHasInterleaved = Interleaves(sizeof(S), kSums, 1);
  static constexpr RowAccess kMisaligned =
      sizeof(S) == 2 ? RowAccess::kRealigned : RowAccess::kSingle;
  static constexpr bool kHasWarps = sizeof(S) < 8;
  // The values of two 16-bit rows that are both needed to the end would spill.
  static constexpr Tuning kDefaultTuning =
      !kSums && !kOneRow && sizeof(S) == 2 ? Tuning::kPacked : Tuning::kThroughput;

  const Call& call;
  const F& functor;
  const Arguments<F, S, W>& arguments;

  Status Run() const {
    const Rows& rows = arguments.rows;
    if (rows.count == 0 || rows.columns == 0) return FinishSums(0);
    if constexpr (kColumnInputs<F> == 0 && !kSums) {
      if (rows.inner != 1) return RunStrided();
    }
    const RowAccess access = AccessOf();
    const RowMapping mapping = ChooseMapping(rows, kWidth, kSettings);
    if (__builtin_expect(kIsTraced, false))
      Trace("  %lld rows of %lld columns: %s, %s", static_cast<long long>(rows.count),
            static_cast<long long>(rows.columns), NameOf(mapping), NameOf(access));
    if (mapping == RowMapping::kCluster) return RunWide(access == RowAccess::kVectors);
    if constexpr (kSettings.HasLongRows()) {
      if (mapping == RowMapping::kLong) return RunBlock<kSettings.long_vectors>(access);
    }
    if constexpr (kHasWarps) {
      if (mapping != RowMapping::kBlock) return RunWarp(mapping, access);
    }
    return RunBlock<kSettings.vectors>(access);
  }

  // Rows that a warp, or a part of one, takes.
  Status RunWarp(RowMapping mapping, RowAccess access) const {
    const bool aligned = access == RowAccess::kVectors;
    if constexpr (kSums) {
      if (mapping == RowMapping::kPart) return RunLanes<8, 1, 1>(access);
    } else {
      if (mapping == RowMapping::kPart && aligned)
        return RunResident<8, 1, 1, Tuning::kThroughput, RowAccess::kVectors>(kGroupThreads);
    }
    if (mapping == RowMapping::kShort && aligned)
      return RunResident<32, 1, 1, Tuning::kThroughput, RowAccess::kVectors>(kGroupThreads);
    if constexpr (kColumnInputs<F> > 0 && !kSums) {
      if (aligned && arguments.rows.count <= FewRows(kSettings.vectors, 32))
        return RunResident<32, kSettings.vectors, 1, Tuning::kLatency, RowAccess::kVectors>(
            kGroupThreads);
    }
    // The misaligned rows of all three mappings share a kernel: a lane without a vector adds
    // nothing, so the bits are the same.
    return RunLanes<32, kSettings.vectors, 1, kDefaultTuning>(access);
  }

  Reads AllReads() const {
    constexpr int kOperands = kRowInputs<F> + F::kRowOutputs;
    return Reads(arguments.rows.count * arguments.rows.columns * kOperands *
                 static_cast<std::int64_t>(sizeof(S)));
  }

  // The partial sums lie behind the rows' functors.
  T* Partials() const {
    return reinterpret_cast<T*>(static_cast<unsigned char*>(call.scratch) +
                                kMaxFunctorBytes * arguments.rows.count);
  }

  RowAccess AccessOf() const {
    if (Interleaves(sizeof(S), kSums, arguments.rows.columns)) return RowAccess::kInterleaved;
    return Aligned() ? RowAccess::kVectors : kMisaligned;
  }

  // Whether each vector is one access in all tensors.
  bool Aligned() const {
    const Rows& rows = arguments.rows;
    if (rows.columns % kWidth != 0) return false;
    bool aligned = true;
    for (int i = 0; i < kRowInputs<F>; ++i)
      aligned = aligned && IsAligned(arguments.inputs[i], kVectorBytes) &&
                ((rows.count == 1 && !F::kGathers) || arguments.strides[i] % kWidth == 0);
    for (int i = 0; i < kColumnInputs<F>; ++i)
      aligned = aligned && IsAligned(arguments.columns[i], kVectorBytes);
    if constexpr (F::kColumnsOfBatch)
      for (std::int64_t stride : arguments.column_strides)
        aligned = aligned && stride % kWidth == 0;
    for (int i = 0; i < F::kRowOutputs; ++i)
      aligned = aligned && IsAligned(arguments.outputs[i], kVectorBytes);
    return aligned;
  }

  // Rows that a block takes.
  template <int kVectors>
  Status RunBlock(RowAccess access) const {
    constexpr bool kLong = kVectors > kSettings.vectors;
    constexpr bool kSplits = SplitsTotals(sizeof(S), kSums);
    constexpr int kTotals = kSplits ? 2 : 1;
    const int threads = BlockThreads(kVectors);
    const bool aligned = access == RowAccess::kVectors;
    const auto few = [&](int vectors, int row_threads) {
      return aligned && row_threads <= kLatencyThreads &&
             arguments.rows.count <= FewRows(vectors, row_threads);
    };
    if constexpr (kSplits) {
      if (few(kVectors / 2, 2 * threads))
        return RunResident<0, kVectors / 2, 1, Tuning::kLatency, RowAccess::kVectors>(2 * threads);
    }
    if constexpr (kHasInterleaved) {  // a block of up to 1024 threads for a long row
      if (access == RowAccess::kInterleaved)
        return RunResident<0, kSettings.vectors, 1, kDefaultTuning, RowAccess::kInterleaved>(
            BlockThreads(kSettings.vectors));
    }
    if constexpr (kShortRow) {
      if constexpr (kLong || kSettings.max_threads >= kPackedThreads) {
        if (aligned && (kLong || threads >= kPackedThreads))
          return RunResident<0, kVectors, kTotals, Tuning::kPacked, RowAccess::kVectors>(threads);
      }
      if constexpr (!kLong) {
        if (aligned)
          return RunResident<0, kVectors, kTotals, kDefaultTuning, RowAccess::kVectors>(threads);
      }
      // With 8 vectors of a thread a misaligned row spills. Twice the threads with one total each
      // give the same bits.
      constexpr int kHalves = kLong ? 2 : 1;
      return RunResident<0, kVectors / kHalves, kTotals / kHalves, Tuning::kPacked,
                         RowAccess::kRealigned>(kHalves * threads);
    } else {
      // Two rows that are both needed to the end get twice the threads, which give the same bits.
      // Aligned rows are faster without if that would be 1024 threads.
      if constexpr (kSplits && !kOneRow) {
        if (2 * threads <= kSettings.max_threads || !aligned)
          return RunLanes<0, kVectors / 2, 1, kDefaultTuning>(access, 2 * threads);
        return RunResident<0, kVectors, kTotals, kDefaultTuning, RowAccess::kVectors>(threads);
      } else {
        return RunLanes<0, kVectors, kTotals, kDefaultTuning>(access, threads);
      }
    }
  }

  template <int kLanes, int kVectors, int kTotals, Tuning kTuning = Tuning::kThroughput>
  Status RunLanes(RowAccess access, int threads = kGroupThreads) const {
    if constexpr (kHasInterleaved && kLanes > 0) {
      if (access == RowAccess::kInterleaved)
        return RunResident<kLanes, kVectors, kTotals, kTuning, RowAccess::kInterleaved>(threads);
    }
    return access == RowAccess::kVectors
               ? RunResident<kLanes, kVectors, kTotals, kTuning, RowAccess::kVectors>(threads)
               : RunResident<kLanes, kVectors, kTotals, kTuning, kMisaligned>(threads);
  }

  template <int kLanes, int kVectors, int kTotals, Tuning kTuning, RowAccess kAccess>
  Status RunResident(int threads) const {
    constexpr int kGroups = kLanes > 0 ? kGroupThreads / kLanes : 1;
    const Rows& rows = arguments.rows;
    std::int64_t blocks = (rows.count + kGroups - 1) / kGroups;
    if constexpr (kSums) {
      constexpr std::int64_t kRoom = kPartials * 8 / sizeof(T);  // in scratch memory
      blocks = std::min({blocks, std::int64_t{SumBlocks(threads)}, kRoom});
    }
    using Traits = ResidentTraits<F, S, W, kLanes, kVectors, kTotals, kTuning, kAccess>;
    const int bytes = kGroups * ResidentRows<Traits>::SharedBytesOf(kLanes > 0 ? kLanes : threads);
    TWINOP_RETURN_IF_ERROR(LaunchKernel(ResidentKernel<Traits>,
                                        Dependent({blocks, dim3(threads), 1, bytes}), call, functor,
                                        arguments, AllReads(), Partials()));
    return FinishSums(static_cast<int>(blocks));
  }

  // Threads of a block that takes a row.
  int BlockThreads(int vectors_each) const {
    const std::int64_t vectors = (arguments.rows.columns + kWidth - 1) / kWidth;
    const int warp = vectors_each * 32;
    return static_cast<int>((vectors + warp - 1) / warp * 32);
  }

  Status RunStrided() const {
    const Rows& rows = arguments.rows;
    unsigned across = 32;
    while (across > 1 && static_cast<std::int64_t>(across) / 2 >= rows.inner) across /= 2;
    const std::int64_t outer = rows.count / rows.inner;
    const std::int64_t blocks = outer * ((rows.inner + across - 1) / across);
    return LaunchKernel(StridedRowsKernel<F, S>,
                        Dependent({blocks, dim3(across, kStridedRowThreads / across)}), call,
                        functor, arguments);
  }

  // ---------------------------------------------------------------------------------- wide rows

  // Which of the sources for sm_90 have kernels. Norms have them for the widths of models. Only
  // rows over a vocabulary, which have no column inputs, are wider than registers, or wide and
  // misaligned. Wide float64 rows, and those of a table or with column inputs of a batch,
  // come from global memory.
  static constexpr bool kHasClusters = sizeof(S) < 8 && !F::kColumnsOfBatch && !F::kGathers;
  static constexpr bool kVocabulary = kColumnInputs<F> == 0 && !kSums;
  static constexpr bool kHasRegisters = kHasClusters && !kSums;
  static constexpr bool kHasRegistersLong = kVocabulary && kResident == 1 && sizeof(S) == 4;
  static constexpr bool kHasRegistersUnaligned = kHasClusters && kVocabulary;
  static constexpr bool kHasPipeline = kHasClusters && (kSums || (kVocabulary && kResident == 2));

  Status RunWide(bool aligned) const {
    int architecture = 0;
    TWINOP_RETURN_IF_ERROR(
        (KernelArchitecture<ClusterKernel<F, S, W, Source::kGlobal, false>>(&architecture)));
    const std::int64_t columns = arguments.rows.columns;
    ClusterSettings settings{1, 1, kClusterThreads, 0};
    if (architecture < 90 || !kHasClusters) return RunGlobal(settings, aligned);
    const DevicePolicy policy = PolicyOf(architecture);
    if constexpr (kHasRegisters) {
      const auto choose = [&](bool is_long) {
        return ChooseResidentCluster(policy, columns, kWidth, VectorsPerThread(kResident, is_long),
                                     kRowBytes, kColumnBytes);
      };
      const ClusterSettings resident = choose(false);
      if (resident.stages > 0) {
        if (aligned) return RunCluster<Source::kRegisters, false>(resident);
        if constexpr (kHasRegistersUnaligned) return RunRegistersUnaligned(policy, resident);
        return RunGlobal(resident, aligned);
      }
      if constexpr (kHasRegistersLong) {
        const ClusterSettings two_slices = choose(true);
        if (two_slices.stages > 0)
          return aligned ? RunCluster<Source::kRegistersLong, false>(two_slices)
                         : RunGlobal(two_slices, aligned);
      }
    }
    settings = ChoosePipelineCluster(policy, columns, kWidth, kRowBytes, kColumnBytes,
                                     kSums ? kClusterSumVectors<S> : 0);
    if constexpr (kHasPipeline) {
      if (settings.stages > 0 && aligned) return RunCluster<Source::kPipeline, kSums>(settings);
    }
    return RunGlobal(settings, aligned);
  }

  // Misaligned outputs go through shared memory, too: fewer stages are left, or none.
  Status RunRegistersUnaligned(const DevicePolicy& policy, const ClusterSettings& settings) const {
    using Slices = SlicesFrom<F, S, W, Source::kRegistersUnaligned, false>;
    for (ClusterSettings fewer = settings; fewer.stages > 0; --fewer.stages)
      if (Slices::SharedBytes(fewer, arguments.rows.columns) <= PipelineCapacity(policy, kWidth))
        return RunCluster<Source::kRegistersUnaligned, false>(fewer);
    return RunGlobal(settings, false);
  }

  template <Source kSource, bool kSumOnTheWay>
  Status RunCluster(const ClusterSettings& settings) const {
    const Rows& rows = arguments.rows;
    F* states = nullptr;
    if constexpr (kSums) {
      static_assert(sizeof(F) <= kMaxFunctorBytes);
      states = static_cast<F*>(call.scratch);
    }
    const std::int64_t bytes =
        SlicesFrom<F, S, W, kSource, kSumOnTheWay>::SharedBytes(settings, rows.columns);
    const auto kernel = ClusterKernel<F, S, W, kSource, kSumOnTheWay>;
    Grid grid{settings.cluster, dim3(settings.groups * settings.threads), 1,
              static_cast<int>(bytes), settings.cluster};
    int clusters = SumClusters(settings.cluster);
    if (!kSumOnTheWay) TWINOP_RETURN_IF_ERROR(ResidentClusters(kernel, grid, &clusters));
    clusters = static_cast<int>(std::min<std::int64_t>(clusters, rows.count));
    grid.blocks = std::int64_t{clusters} * settings.cluster;
    TWINOP_RETURN_IF_ERROR(LaunchKernel(kernel, Dependent(grid), call, functor, arguments, settings,
                                        AllReads(), states, Partials()));
    if constexpr (kSumOnTheWay) return FinishSums(clusters * settings.groups);
    return {};
  }

  // Takes the rows from global memory. A second pass then sums the columns, in the order in which a
  // pipeline of these settings adds them, if there is one.
  Status RunGlobal(const ClusterSettings& settings, bool aligned) const {
    TWINOP_RETURN_IF_ERROR((RunCluster<Source::kGlobal, false>(settings)));
    if constexpr (kSums) {
      if (arguments.sums[0] == nullptr && arguments.sums[1] == nullptr) return {};
      if constexpr (kHasClusters) {
        if (aligned) return SumColumns<true>(settings);
      }
      return SumColumns<false>(settings);
    }
    return {};
  }

  template <bool kVectorised>
  Status SumColumns(const ClusterSettings& settings) const {
    const std::int64_t per_block = kSumThreads * (kVectorised ? kWidth : 1);
    const std::int64_t across = (arguments.rows.columns + per_block - 1) / per_block;
    const std::int64_t count = arguments.rows.count;
    // The shape alone decides the number of partial sums.
    std::int64_t down;
    unsigned groups = 1;
    if (settings.stages > 0) {
      groups = static_cast<unsigned>(settings.groups);
      down = std::min<std::int64_t>(SumClusters(settings.cluster), count) * groups;
    } else {
      const std::int64_t vectors = (arguments.rows.columns + kWidth - 1) / kWidth;
      down = 4 * kPartials / ((vectors + kSumThreads - 1) / kSumThreads);
      down = std::max<std::int64_t>(1, std::min({down, std::int64_t{kPartials}, count}));
    }
    TWINOP_RETURN_IF_ERROR(
        LaunchKernel(ColumnSumsKernel<F, S, W, kVectorised>,
                     Dependent({across, dim3(kSumThreads), static_cast<unsigned>(down)}), call,
                     arguments, groups, static_cast<const F*>(call.scratch), Partials()));
    return FinishSums(static_cast<int>(down));
  }

  Status FinishSums(int count) const {
    if constexpr (kSums) {
      static_assert(F::kColumnSums == 2);
      const std::int64_t across = (arguments.rows.columns + 31) / 32;
      if (across == 0 || (arguments.sums[0] == nullptr && arguments.sums[1] == nullptr)) return {};
      return LaunchKernel(FinishSumsKernel<T, W>, Dependent({across, dim3(32, kFinishSlices), 2}),
                          call, static_cast<const T*>(Partials()), count, arguments.rows.columns,
                          arguments.sums[0], arguments.sums[1]);
    }
    return {};
  }
};

template <class F, class S, class W>
Launch(const Call&, const F&, const Arguments<F, S, W>&) -> Launch<F, S, W>;

template <template <class> class F, class Op>
Status Cuda(const CallOf<Op>& call) {
  return DispatchRows<F>(call, [&](const auto& functor, const auto& arguments) {
    return Launch{call, functor, arguments}.Run();
  });
}

}  // namespace twinop::rowwise
