// Row-wise ops on the CPU. One thread reduces each row, in kLanes independent partial sums. The
// compiler can therefore vectorise the loops for each instruction set without reordering a sum. The
// result is bitwise the same for every instruction set (chosen at run time) and every number of
// threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "twinop/primitives/cpu_features.h"
#include "twinop/rowwise/cpu_row.h"

namespace twinop::rowwise {

// The size of the stack buffer for the values of a row, in the compute type and for all inputs
// together. The buffer fits in the second-level cache. If a row is wider, each phase computes its
// values again.
inline constexpr std::int64_t kBufferBytes = 128 << 10;

// The smallest number of interleaved rows that are reduced together, one row in each lane.
inline constexpr std::int64_t kMinInterleavedRows = 16;

// Below this number of elements, a second thread costs more than it saves (elementwise/cpu.h).
inline constexpr std::int64_t kGrainElements = 1 << 15;

// Whether the values of a row are buffered. This pays only if they cost more than a read. (A
// bfloat16 number is widened by a shift. Two wide rows and the sums of their columns would not stay
// in the first-level cache.)
template <class F, class S>
inline constexpr bool kBuffersRows =
    F::kReplacesValues || std::is_same_v<S, Half> || (sizeof(S) == 2 && F::kColumnReductions > 0);

// ---------------------------------------------------------------------------------- many rows

// Whether rows are interleaved in memory and up to kLanes of them are processed together instead of
// one at a time.
inline bool UsesInterleavedRows(const Rows& rows) { return rows.inner >= kMinInterleavedRows; }

// Whether the output has the compute type, so that its own memory is the buffer. A separate buffer
// would occupy more of the cache.
template <class F, class S, class W>
TWINOP_INLINE bool BuffersInOutput(const Arguments<F, S, W>& arguments) {
  return std::is_same_v<S, Compute<S>> && kEarlyInputs<F> == 1 && arguments.rows.inner == 1 &&
         arguments.outputs[0] != nullptr;
}

template <class F, class S, class W>
TWINOP_INLINE bool FitsBuffer(const Arguments<F, S, W>& arguments) {
  const Rows& rows = arguments.rows;
  const std::int64_t elements = rows.columns * kEarlyInputs<F> *
                                (UsesInterleavedRows(rows) ? std::min(kLanes, rows.inner) : 1);
  return elements * static_cast<std::int64_t>(sizeof(Compute<S>)) <= kBufferBytes;
}

// The number of units of work. A unit is one row, or up to kLanes interleaved rows.
inline std::int64_t UnitCount(const Rows& rows) {
  if (!UsesInterleavedRows(rows)) return rows.count;
  return rows.count / rows.inner * ((rows.inner + kLanes - 1) / kLanes);
}

template <bool kBuffered, class F, class S, class W>
TWINOP_INLINE void RunUnits(const F& initial, const Arguments<F, S, W>& arguments,
                            std::int64_t begin, std::int64_t end, Compute<S>* sums) {
  using AllPhases = std::make_integer_sequence<int, kPhases<F>>;
  using Worker = RowWorker<F, S, W>;
  alignas(64) Compute<S> buffer[kBuffered ? kBufferBytes / sizeof(Compute<S>) : 1];
  StagingBuffers<F, S, W> staging;
  Worker worker(initial, arguments, sums,
                kBuffered && !BuffersInOutput(arguments) ? buffer : nullptr, staging, end);
  const Rows& rows = arguments.rows;
  if constexpr (Worker::kSupportsInterleaved) {
    if (UsesInterleavedRows(rows)) {
      const std::int64_t chunks = (rows.inner + kLanes - 1) / kLanes;
      for (std::int64_t unit = begin; unit < end; ++unit) {
        const std::int64_t first = unit % chunks * kLanes;
        worker.template RunInterleaved<kBuffered>(unit / chunks * rows.inner + first,
                                                  std::min(kLanes, rows.inner - first), AllPhases{},
                                                  std::make_integer_sequence<int, int{kLanes}>{});
      }
      return;
    }
  }
  for (std::int64_t i = begin; i < end; ++i) worker.template RunRow<kBuffered>(i, AllPhases{});
  worker.Finish();
}

template <class F, class S, class W>
TWINOP_INLINE void RunRows(const F& initial, const Arguments<F, S, W>& arguments,
                           std::int64_t begin, std::int64_t end, Compute<S>* sums) {
  if constexpr (kBuffersRows<F, S>) {
    if (BuffersInOutput(arguments) || FitsBuffer(arguments))
      return RunUnits<true>(initial, arguments, begin, end, sums);
  }
  RunUnits<false>(initial, arguments, begin, end, sums);
}

// The loops over rows, compiled once for each instruction set.
template <class F, class S, class W>
struct RowLoops {
  template <Level kLevel>
  TWINOP_INLINE static void Run(const F& initial, const Arguments<F, S, W>& arguments,
                                std::int64_t begin, std::int64_t end, Compute<S>* sums) {
    RunRows(initial, arguments, begin, end, sums);
  }
};
template <class F, class S, class W>
inline constexpr const auto& kRowLoops =
    kByLevel<RowLoops<F, S, W>,
             void(const F&, const Arguments<F, S, W>&, std::int64_t, std::int64_t, Compute<S>*)>;

// ---------------------------------------------------------------------------------- a call

inline std::int64_t Grain(std::int64_t elements) {
  return std::max(std::int64_t{1}, kGrainElements / std::max(std::int64_t{1}, elements));
}

// Each group of consecutive rows has its own partial sums. The partial sums are then added in the
// order of the groups. Only the shape determines this order.
template <class F, class S, class W>
void SumColumns(const Call& call, const F& functor, const Arguments<F, S, W>& arguments) {
  using T = Compute<S>;
  // A group's sums are written and read once more, so a group has at least this many rows.
  constexpr std::int64_t kMinRowsPerGroup = 16;
  constexpr std::int64_t kGroups = 128;
  static_assert(kGroups <= kPartials && sizeof(T) * F::kColumnReductions <= 16);
  const Rows& rows = arguments.rows;
  const std::int64_t groups = std::clamp(rows.count / kMinRowsPerGroup, std::int64_t{1}, kGroups);
  const std::int64_t size = F::kColumnReductions * rows.columns;
  T* const partials = static_cast<T*>(call.scratch);
  if (rows.count > 0) {
    call.context->ParallelFor(groups, Grain(rows.columns * (rows.count / groups)),
                              [&](std::int64_t begin, std::int64_t end) {
                                for (std::int64_t g = begin; g < end; ++g) {
                                  std::fill_n(partials + g * size, size, T(0));
                                  kRowLoops<F, S, W>(functor, arguments, rows.count * g / groups,
                                                     rows.count * (g + 1) / groups,
                                                     partials + g * size);
                                }
                              });
  }
  const std::int64_t chunks = (rows.columns + kLanes - 1) / kLanes;
  const std::int64_t terms = rows.count > 0 ? groups : 0;
  call.context->ParallelFor(chunks, Grain(kLanes * groups),
                            [&](std::int64_t begin, std::int64_t end) {
                              for (std::int64_t c = begin * kLanes;
                                   c < std::min(end * kLanes, rows.columns); c += kLanes) {
                                const std::int64_t count = std::min(kLanes, rows.columns - c);
                                for (int s = 0; s < F::kColumnReductions; ++s) {
                                  if (arguments.sums[s] == nullptr) continue;
                                  T totals[kLanes] = {};
                                  for (std::int64_t g = 0; g < terms; ++g)
                                    for (std::int64_t i = 0; i < count; ++i)
                                      totals[i] += partials[g * size + s * rows.columns + c + i];
                                  for (std::int64_t i = 0; i < count; ++i)
                                    Round(totals[i], &arguments.sums[s][c + i]);
                                }
                              }
                            });
}

template <class F, class S, class W>
Status RunOnPool(const Call& call, const F& functor, const Arguments<F, S, W>& arguments) {
  const Rows& rows = arguments.rows;
  if constexpr (F::kColumnReductions > 0) {
    bool wanted = false;
    for (int s = 0; s < F::kColumnReductions; ++s) wanted = wanted || arguments.sums[s] != nullptr;
    if (wanted) {
      SumColumns(call, functor, arguments);
      return {};
    }
  }
  if (rows.count == 0 || rows.columns == 0) return {};
  const std::int64_t units = UnitCount(rows);
  call.context->ParallelFor(units, Grain(rows.columns * (rows.count / units)),
                            [&](std::int64_t begin, std::int64_t end) {
                              kRowLoops<F, S, W>(functor, arguments, begin, end, nullptr);
                            });
  return {};
}

template <template <class> class F, class Op>
Status Cpu(const CallOf<Op>& call) {
  return DispatchRows<F>(call, [&call](const auto& functor, const auto& arguments) {
    return RunOnPool(call, functor, arguments);
  });
}

}  // namespace twinop::rowwise
