// Row-wise ops on CUDA: which kernel takes which rows, and its launch.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/cuda_launch.cuh"
#include "kernels/rowwise_columns.cuh"
#include "kernels/rowwise_held.cuh"
#include "kernels/rowwise_settings.h"
#include "kernels/rowwise_wide.cuh"

namespace twinop::rowwise {

template <class F, class S, class W>
struct Launch {
  using T = Compute<S>;
  static constexpr int kWidth = kVectorBytes / sizeof(S);
  static constexpr int kHeld = kEarlyInputs<F>;
  static constexpr bool kSums = F::kColumnSums > 0;
  static constexpr HeldSettings kSettings = Held(kSums, kHeld == 1 && sizeof(S) == 4);
  // One 16-bit row, held in half the registers where that lets more blocks fit. Two that are both
  // needed to the end: their values spilled (softmax backward, float16, 32768 x 4096: 0.74 of the
  // copy's speed, packed 1.00).
  static constexpr bool kPackable = !kSums && kHeld == 1 && sizeof(S) == 2;
  static constexpr bool kPackTwo = !kSums && kHeld > F::kRowOutputs && sizeof(S) == 2;
  // A norm's misaligned row (bfloat16, 32768 x 4095, share of the copy's speed, packed / not: layer
  // norm 0.79 / 0.77, rms norm 0.93 / 0.91; but softmax 0.77 / 0.98).
  static constexpr bool kPackNorm = kPackable && kColumnInputs<F> > 0 && sizeof(W) == 2;

  const Call& call;
  const F& functor;
  const Arguments<F, S, W>& arguments;

  Status Run() const {
    const Rows& rows = arguments.rows;
    if (rows.count == 0 || rows.columns == 0) return FinishSums(0);
    if constexpr (kColumnInputs<F> == 0 && !kSums) {
      if (rows.inner != 1) return RunApart();
    }
    const bool aligned = Aligned();
    constexpr int kVectors = kSettings.vectors;
    switch (ChooseLayout(rows, kWidth, kSettings)) {
      case Layout::kPart:
        return aligned ? RunHeld<8, 1, true>() : RunHeld<8, 1, false>();
      case Layout::kShort:
        return aligned ? RunHeld<32, 1, true>() : RunHeld<32, 1, false>();
      case Layout::kWarp:
        return aligned ? RunHeld<32, kVectors, true, kPackTwo>()
                       : RunHeld<32, kVectors, false, kPackTwo>();
      case Layout::kBlock:
        if constexpr (kPackable) {
          if (aligned && BlockThreads(kVectors) >= kPackedThreads)
            return RunHeld<0, kVectors, true, true>();
        }
        return aligned ? RunHeld<0, kVectors, true, kPackTwo>()
                       : RunHeld<0, kVectors, false, kPackTwo || kPackNorm>();
      case Layout::kLong:
        if constexpr (kSettings.long_vectors > kVectors) {
          int architecture = 0;
          Status status = Architecture(&architecture);
          if (!status.ok()) return status;
          // (sm_75 has not the shared memory that a misaligned one goes through.)
          if (architecture >= 80)
            return aligned ? RunHeld<0, kSettings.long_vectors, true>()
                           : RunHeld<0, kSettings.long_vectors, false>();
        }
        break;
      case Layout::kWide:
        break;
    }
    return RunWide(aligned);
  }

  // Behind the rows' functors.
  T* Partials() const {
    return reinterpret_cast<T*>(static_cast<unsigned char*>(call.scratch) +
                                kMaxFunctorBytes * arguments.rows.count);
  }

  // Whether each vector is one access in all tensors. Chosen by alignment: it changes no sum.
  bool Aligned() const {
    const Rows& rows = arguments.rows;
    if (rows.columns % kWidth != 0) return false;
    bool aligned = true;
    for (int i = 0; i < kRowInputs<F>; ++i)
      aligned = aligned && IsAligned(arguments.inputs[i], kVectorBytes) &&
                (rows.count == 1 || arguments.strides[i] % kWidth == 0);
    for (int i = 0; i < kColumnInputs<F>; ++i)
      aligned = aligned && IsAligned(arguments.columns[i], kVectorBytes);
    for (int i = 0; i < F::kRowOutputs; ++i)
      aligned = aligned && IsAligned(arguments.outputs[i], kVectorBytes);
    return aligned;
  }

  template <int kLanes, int kVectors, bool kAligned, bool kPacked = false>
  Status RunHeld() const {
    constexpr int kThreads = kLanes > 0 ? kGroupThreads : kSettings.max_threads;
    constexpr int kGroups = kLanes > 0 ? kGroupThreads / kLanes : 1;
    const Rows& rows = arguments.rows;
    const int threads = kLanes > 0 ? kThreads : BlockThreads(kVectors);
    std::int64_t blocks = (rows.count + kGroups - 1) / kGroups;
    if constexpr (kSums) {
      constexpr std::int64_t kRoom = kPartials * 8 / sizeof(T);  // in scratch memory
      blocks = std::min({blocks, std::int64_t{SumBlocks(threads)}, kRoom});
    }
    using Held = HeldRows<F, S, W, kLanes, kVectors, kThreads, kPacked, kAligned>;
    const int bytes = kGroups * Held::RoomBytes(kLanes > 0 ? kLanes : threads);
    Status status = LaunchKernel(
        ChooseHeldKernel<F, S, W, kLanes, kVectors, kThreads, kPacked, kAligned>(),
        Overlapping({blocks, dim3(threads), 1, bytes}), call, functor, arguments, Partials());
    return status.ok() ? FinishSums(static_cast<int>(blocks)) : std::move(status);
  }

  // Of a block that takes a row.
  int BlockThreads(int vectors_each) const {
    const std::int64_t vectors = (arguments.rows.columns + kWidth - 1) / kWidth;
    const int warp = vectors_each * 32;
    return static_cast<int>((vectors + warp - 1) / warp * 32);
  }

  Status RunApart() const {
    if constexpr (kColumnInputs<F> == 0 && !kSums) {
      const Rows& rows = arguments.rows;
      unsigned across = 32;
      while (across > 1 && static_cast<std::int64_t>(across) / 2 >= rows.inner) across /= 2;
      const std::int64_t outer = rows.count / rows.inner;
      const std::int64_t blocks = outer * ((rows.inner + across - 1) / across);
      return LaunchKernel(ApartKernel<F, S>,
                          Overlapping({blocks, dim3(across, kApartThreads / across)}), call,
                          functor, arguments);
    }
    return {};
  }

  static Status Architecture(int* value) {
    return KernelArchitecture<WideKernel<F, S, W, Source::kRing, kSums>>(value);
  }

  // ---------------------------------------------------------------------------------- wide rows

  Status RunWide(bool aligned) const {
    int architecture = 0;
    Status status = Architecture(&architecture);
    if (!status.ok()) return status;
    WideSettings settings{1, 1, 0};
    if (architecture >= 90)
      settings = ChooseWide(arguments.rows.columns, kWidth, kHeld * sizeof(S),
                            kColumnInputs<F> * sizeof(W), kSums ? kWideSumVectors<S> : 0);
    if (settings.stages > 0) {
      if (aligned) return RunWideFrom<Source::kRing, kSums>(settings);
      return RunWideFrom<Source::kMisaligned, kSums>(settings);
    }
    if (aligned) return RunWideFrom<Source::kAligned, false>(settings);
    return RunWideFrom<Source::kMisaligned, false>(settings);
  }

  template <Source kSource, bool kSumOnTheWay>
  Status RunWideFrom(const WideSettings& settings) const {
    const Rows& rows = arguments.rows;
    F* states = nullptr;
    if constexpr (kSums) {
      static_assert(sizeof(F) <= kMaxFunctorBytes);
      states = static_cast<F*>(call.scratch);
    }
    std::int64_t bytes = 0;
    if (kSource == Source::kRing)
      bytes =
          SliceVectors(rows.columns, kWidth, settings.cluster) * kWidth *
          (kColumnInputs<F> * sizeof(W) + settings.groups * settings.stages * kHeld * sizeof(S));
    if (kSource == Source::kMisaligned)
      bytes = WideRows<F, S, W, kSource, kSumOnTheWay>::RoomBytes(settings);
    const auto kernel = WideKernel<F, S, W, kSource, kSumOnTheWay>;
    Grid grid{settings.cluster, dim3(kWideThreads), 1, static_cast<int>(bytes), settings.cluster};
    int clusters = SumClusters(settings.cluster);
    if (!kSumOnTheWay) {
      Status status = ResidentClusters(kernel, grid, &clusters);
      if (!status.ok()) return status;
    }
    grid.blocks = std::min<std::int64_t>(clusters, rows.count) * settings.cluster;
    Status launched = LaunchKernel(kernel, Overlapping(grid), call, functor, arguments, settings,
                                   states, Partials());
    if constexpr (kSumOnTheWay) {
      if (launched.ok())
        return FinishSums(static_cast<int>(grid.blocks / settings.cluster * settings.groups));
    } else if constexpr (kSums) {
      if (launched.ok() && (arguments.sums[0] != nullptr || arguments.sums[1] != nullptr))
        return kSource == Source::kMisaligned ? SumColumns<false>(states)
                                              : SumColumns<true>(states);
    }
    return launched;
  }

  template <bool kVectorised>
  Status SumColumns(const F* states) const {
    const std::int64_t per_block = kSumThreads * (kVectorised ? kWidth : 1);
    const std::int64_t across = (arguments.rows.columns + per_block - 1) / per_block;
    // The number of partial sums is the shape's alone.
    const std::int64_t vectors = (arguments.rows.columns + kWidth - 1) / kWidth;
    std::int64_t down = 4 * kPartials / ((vectors + kSumThreads - 1) / kSumThreads);
    if (down > kPartials) down = kPartials;
    if (down > arguments.rows.count) down = arguments.rows.count;
    if (down < 1) down = 1;
    Status status =
        LaunchKernel(ColumnSumsKernel<F, S, W, kVectorised>,
                     Overlapping({across, dim3(kSumThreads), static_cast<unsigned>(down)}), call,
                     arguments, states, Partials());
    return status.ok() ? FinishSums(static_cast<int>(down)) : std::move(status);
  }

  Status FinishSums(int count) const {
    if constexpr (kSums) {
      static_assert(F::kColumnSums == 2);
      const std::int64_t across = (arguments.rows.columns + 31) / 32;
      if (across == 0 || (arguments.sums[0] == nullptr && arguments.sums[1] == nullptr)) return {};
      return LaunchKernel(FinishSumsKernel<T, W>, Overlapping({across, dim3(32, kFinishSlices), 2}),
                          call, static_cast<const T*>(Partials()), count, arguments.rows.columns,
                          arguments.sums[0], arguments.sums[1]);
    }
    return {};
  }
};

template <class F, class S, class W>
Status Run(const Call& call, const F& functor, const Arguments<F, S, W>& arguments) {
  return Launch<F, S, W>{call, functor, arguments}.Run();
}

template <template <class> class F>
Status Cuda(const Call& call) {
  return DispatchRows<F>(call, [&](const auto& functor, const auto& arguments) {
    return Run(call, functor, arguments);
  });
}

}  // namespace twinop::rowwise
