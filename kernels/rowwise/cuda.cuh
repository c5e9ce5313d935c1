// Row-wise ops on CUDA: launches the kernel that Choose names for the rows of a call.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>

#include "twinop/primitives/l2_hints.cuh"
#include "twinop/primitives/launch.cuh"
#include "twinop/rowwise/choose.h"
#include "twinop/rowwise/cluster.cuh"
#include "twinop/rowwise/column_sums.cuh"
#include "twinop/rowwise/resident.cuh"

namespace twinop::rowwise {

template <class F, class S, class W>
struct Launch {
  using T = Compute<S>;
  static constexpr OpTraits kOp = kTraitsOf<F, S, W>;

  const Call& call;
  const F& functor;
  const Arguments<F, S, W>& arguments;

  Status Run() const {
    const Rows& rows = arguments.rows;
    if (rows.count == 0 || rows.columns == 0) return FinishSums(0);
    if constexpr (kOp.IsPlain()) {
      if (rows.inner != 1) return RunStrided();
    }
    const Target* target = nullptr;
    TWINOP_RETURN_IF_ERROR(TargetOf(call, &target));
    const Choice choice = Choose(kOp, {rows.count, rows.columns, IsAligned()}, *target);
    if (__builtin_expect(kIsTraced, false))
      Trace("  %lld rows of %lld columns: %s, %s", static_cast<long long>(rows.count),
            static_cast<long long>(rows.columns), WhoTakesARow(choice), HowItMoves(choice));
    if (choice.line != nullptr) return RunResident(choice);
    switch (choice.source) {
      case Source::kRegisters:
        return RunCluster<Source::kRegisters>(choice.cluster, *target);
      case Source::kRegistersLong:
        return RunCluster<Source::kRegistersLong>(choice.cluster, *target);
      case Source::kRegistersUnaligned:
        return RunCluster<Source::kRegistersUnaligned>(choice.cluster, *target);
      case Source::kPipeline:
        return RunCluster<Source::kPipeline>(choice.cluster, *target);
      default:
        TWINOP_RETURN_IF_ERROR(RunCluster<Source::kGlobal>(choice.cluster, *target));
        return SumColumns(choice);
    }
  }

  // Also quantises the first result; sets `*done` to false, and does nothing, where no one kernel
  // does for these rows.
  Status RunQuantised(bool* done) const {
    const Rows& rows = arguments.rows;
    *done = QuantisesInOneKernel(rows.columns) && rows.inner == 1 && IsAligned() &&
            twinop::IsAligned(arguments.q, kOp.Width());
    if (!*done) return {};
    const Target* target = nullptr;
    TWINOP_RETURN_IF_ERROR(TargetOf(call, &target));
    return RunResident(Choose(kOp, {rows.count, rows.columns, true}, *target));
  }

  // Whether each vector is one access in all tensors.
  bool IsAligned() const {
    constexpr int kWidth = kOp.Width();
    const Rows& rows = arguments.rows;
    if (rows.columns % kWidth != 0) return false;
    bool aligned = true;
    for (int i = 0; i < kRowInputs<F>; ++i)
      aligned = aligned && twinop::IsAligned(arguments.inputs[i], kVectorBytes) &&
                ((rows.count == 1 && !F::kGathers) || arguments.strides[i] % kWidth == 0);
    for (int i = 0; i < kColumnInputs<F>; ++i)
      aligned = aligned && twinop::IsAligned(arguments.columns[i], kVectorBytes);
    if constexpr (F::kColumnsOfBatch)
      for (std::int64_t stride : arguments.column_strides)
        aligned = aligned && stride % kWidth == 0;
    for (int i = 0; i < F::kRowOutputs; ++i)
      aligned = aligned && twinop::IsAligned(arguments.outputs[i], kVectorBytes);
    return aligned;
  }

  L2ReadPolicy ReadPolicy() const {
    constexpr int kOperands = kRowInputs<F> + F::kRowOutputs;
    return L2ReadPolicy(arguments.rows.count * arguments.rows.columns * kOperands *
                        static_cast<std::int64_t>(sizeof(S)));
  }

  // The partial sums lie behind the rows' functors.
  T* Partials() const {
    return reinterpret_cast<T*>(
        static_cast<unsigned char*>(call.scratch) +
        FunctorsBytes(arguments.rows.count, arguments.rows.columns, kOp.bytes));
  }

  // ---------------------------------------------------------------------------------- registers

  // Launches the chosen kernel: each that the op has, by its line and access, and no other is
  // compiled.
  template <std::size_t kKernel = 0>
  Status RunResident(const Choice& choice) const {
    if constexpr (kKernel < 3 * std::size(kResidentChoices)) {
      constexpr const ResidentChoice& line = kResidentChoices[kKernel / 3];
      constexpr auto kAccess = static_cast<RowAccess>(kKernel % 3);
      if constexpr (HasKernel(kOp, line, kAccess)) {
        if (choice.line == &line && choice.access == kAccess)
          return LaunchResident<ResidentTraits<F, S, W, line.lanes, line.each, line.totals,
                                               line.tuning, kAccess, RegisterLimit(kOp, line)>>(
              choice.threads);
      }
      return RunResident<kKernel + 1>(choice);
    }
    return {};
  }

  template <class Traits>
  Status LaunchResident(int threads) const {
    std::int64_t blocks = (arguments.rows.count + Traits::kGroups - 1) / Traits::kGroups;
    if constexpr (kOp.sums) {
      constexpr std::int64_t kRoom = kPartials * 8 / sizeof(T);  // in scratch memory
      blocks = std::min({blocks, std::int64_t{SumBlocks(threads)}, kRoom});
    } else if constexpr (IsPersistent(kOp, Traits::kLanes, Traits::kVectors)) {
      const Target* target = nullptr;
      TWINOP_RETURN_IF_ERROR(TargetOf(call, &target));
      const int each = kBlockRegisters / (Traits::kRegisters * threads);
      blocks = std::min(blocks, std::int64_t{each} * target->multiprocessors);
    }
    const int lanes = Traits::kLanes > 0 ? Traits::kLanes : threads;
    const int bytes = Traits::kGroups * ResidentRows<Traits>::SharedBytesOf(lanes);
    TWINOP_RETURN_IF_ERROR(LaunchKernel(ResidentKernel<Traits>,
                                        WithPdl({blocks, dim3(threads), 1, bytes}), call, functor,
                                        arguments, ReadPolicy(), Partials()));
    return FinishSums(static_cast<int>(blocks));
  }

  // ---------------------------------------------------------------------------------- slices

  template <Source kSource>
  Status RunCluster(const ClusterSettings& settings, const Target& target) const {
    if constexpr (HasKernel(kOp, kSource)) {
      constexpr bool kSums = kOp.sums && kSource == Source::kPipeline;  // on the way
      const Rows& rows = arguments.rows;
      F* states = nullptr;
      if constexpr (kOp.sums) states = static_cast<F*>(call.scratch);
      const auto kernel = ClusterKernel<F, S, W, kSource>;
      Grid grid{settings.cluster, dim3(settings.groups * settings.threads), 1,
                static_cast<int>(SharedBytes(kOp, kSource, settings, rows.columns)),
                settings.cluster};
      int clusters = SumClusters(settings.cluster);
      if (!kSums)
        TWINOP_RETURN_IF_ERROR(ResidentClusters(reinterpret_cast<const void*>(kernel), grid,
                                                target.multiprocessors, &clusters));
      // One that the device does not hold is refused in words.
      clusters = static_cast<int>(std::clamp<std::int64_t>(rows.count, 1, std::max(clusters, 1)));
      grid.blocks = std::int64_t{clusters} * settings.cluster;
      TWINOP_RETURN_IF_ERROR(LaunchKernel(kernel, WithPdl(grid), call, functor, arguments, settings,
                                          ReadPolicy(), states, Partials()));
      if constexpr (kSums) return FinishSums(clusters * settings.groups);
    }
    return {};
  }

  Status RunStrided() const {
    const Rows& rows = arguments.rows;
    unsigned across = 32;
    while (across > 1 && static_cast<std::int64_t>(across) / 2 >= rows.inner) across /= 2;
    const std::int64_t outer = rows.count / rows.inner;
    const std::int64_t blocks = outer * ((rows.inner + across - 1) / across);
    return LaunchKernel(StridedRowsKernel<F, S>,
                        WithPdl({blocks, dim3(across, kStridedRowThreads / across)}), call, functor,
                        arguments);
  }

  // ---------------------------------------------------------------------------------- column sums

  // A second pass over rows that came from global memory sums the columns, in the order in which a
  // pipeline of these settings adds them, if there is one.
  Status SumColumns(const Choice& choice) const {
    if constexpr (kOp.sums) {
      if (!WantsSums()) return {};
      if constexpr (HasKernel(kOp, Source::kPipeline)) {
        if (choice.access == RowAccess::kVectors) return SumColumns<true>(choice.cluster);
      }
      return SumColumns<false>(choice.cluster);
    }
    return {};
  }

  template <bool kVectorised>
  Status SumColumns(const ClusterSettings& settings) const {
    constexpr int kWidth = kOp.Width();
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
                     WithPdl({across, dim3(kSumThreads), static_cast<unsigned>(down)}), call,
                     arguments, groups, static_cast<const F*>(call.scratch), Partials()));
    return FinishSums(static_cast<int>(down));
  }

  bool WantsSums() const { return arguments.sums[0] != nullptr || arguments.sums[1] != nullptr; }

  Status FinishSums(int count) const {
    if constexpr (kOp.sums) {
      const std::int64_t across = (arguments.rows.columns + 31) / 32;
      if (across == 0 || !WantsSums()) return {};
      return LaunchKernel(FinishSumsKernel<T, W>, WithPdl({across, dim3(32, kFinishSlices), 2}),
                          call, static_cast<const T*>(Partials()), count, arguments.rows.columns,
                          arguments.sums[0], arguments.sums[1]);
    }
    return {};
  }
};

template <class F, class S, class W>
Launch(const Call&, const F&, const Arguments<F, S, W>&) -> Launch<F, S, W>;

template <template <class> class F, class Op>
Status Run(const CallOf<Op>& call) {
  return DispatchRows<F>(call, [&](const auto& functor, const auto& arguments) {
    return Launch{call, functor, arguments}.Run();
  });
}

}  // namespace twinop::rowwise
