// Row-wise ops on the CPU. A row belongs to one thread, which adds it up in kLanes sums side by
// side: loops that the compiler vectorises without reordering a sum, for each instruction set, so
// that neither that choice (made at run time) nor the number of threads changes a bit.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "kernels/primitives/cpu_features.h"
#include "kernels/rowwise/cpu_row.h"

namespace twinop::rowwise {

// Rows up to this size (in the compute type, all inputs together) are held on the stack, in what
// the second-level cache takes; a wider row's values are computed again for each phase.
inline constexpr std::int64_t kHeldBytes = 128 << 10;

// From so many neighbouring rows on, rows that lie apart are summed side by side, a lane each.
inline constexpr std::int64_t kNeighbours = 16;

// Elements below which a second thread costs more than it brings (elementwise/cpu.h).
inline constexpr std::int64_t kGrainElements = 1 << 15;

// Whether holding a row pays: where its values cost more than reading them.
template <class F, class S>
inline constexpr bool kHolds = F::kReplacesValues || sizeof(S) == 2;

// ---------------------------------------------------------------------------------- many rows

// Whether rows lie apart and are taken side by side, kLanes at most, instead of one by one.
inline bool SideBySide(const Rows& rows) { return rows.inner >= kNeighbours; }

// Where a row is held.
enum class Held { kNowhere, kBuffer, kOutput };

// In the output's own memory, of the compute type, the row costs no cache beside it.
template <class F, class S, class W>
TWINOP_INLINE Held WhereHeld(const Arguments<F, S, W>& arguments) {
  using T = Compute<S>;
  const Rows& rows = arguments.rows;
  if (!kHolds<F, S>) return Held::kNowhere;
  if (std::is_same_v<S, T> && kEarlyInputs<F> == 1 && rows.inner == 1 &&
      arguments.outputs[0] != nullptr)
    return Held::kOutput;
  const std::int64_t elements =
      rows.columns * kEarlyInputs<F> * (SideBySide(rows) ? std::min(kLanes, rows.inner) : 1);
  const auto bytes = elements * static_cast<std::int64_t>(sizeof(T));
  return bytes <= kHeldBytes ? Held::kBuffer : Held::kNowhere;
}

// What a thread takes at once: a row, or neighbouring rows.
inline std::int64_t Units(const Rows& rows) {
  if (!SideBySide(rows)) return rows.count;
  return rows.count / rows.inner * ((rows.inner + kLanes - 1) / kLanes);
}

template <Held kWhere, class F, class S, class W>
TWINOP_INLINE void RunUnits(const F& initial, const Arguments<F, S, W>& arguments,
                            std::int64_t begin, std::int64_t end, Compute<S>* sums) {
  using AllPhases = std::make_integer_sequence<int, kPhases<F>>;
  using Row = Worker<F, S, W>;
  constexpr bool kHeld = kWhere != Held::kNowhere;
  alignas(64) Compute<S> buffer[kWhere == Held::kBuffer ? kHeldBytes / sizeof(Compute<S>) : 1];
  StandIns<F, S, W> stand_ins;
  Row row(initial, arguments, sums, kWhere == Held::kBuffer ? buffer : nullptr, stand_ins, end);
  const Rows& rows = arguments.rows;
  if constexpr (Row::kMayLieApart && kWhere != Held::kOutput) {
    if (SideBySide(rows)) {
      const std::int64_t across = (rows.inner + kLanes - 1) / kLanes;
      for (std::int64_t unit = begin; unit < end; ++unit) {
        const std::int64_t first = unit % across * kLanes;
        row.template Neighbours<kHeld>(unit / across * rows.inner + first,
                                       std::min(kLanes, rows.inner - first), AllPhases{},
                                       std::make_integer_sequence<int, int{kLanes}>{});
      }
      return;
    }
  }
  for (std::int64_t i = begin; i < end; ++i) row.template Row<kHeld>(i, AllPhases{});
  row.Finish();
}

template <class F, class S, class W>
TWINOP_INLINE void RunRows(const F& initial, const Arguments<F, S, W>& arguments,
                           std::int64_t begin, std::int64_t end, Compute<S>* sums) {
  if constexpr (kHolds<F, S>) {
    const Held where = WhereHeld(arguments);
    if (where == Held::kBuffer)
      return RunUnits<Held::kBuffer>(initial, arguments, begin, end, sums);
    if constexpr (std::is_same_v<S, Compute<S>>)
      if (where == Held::kOutput)
        return RunUnits<Held::kOutput>(initial, arguments, begin, end, sums);
  }
  RunUnits<Held::kNowhere>(initial, arguments, begin, end, sums);
}

// The same loops, compiled once per instruction set.
template <class F, class S, class W>
using RowsFunction = void (*)(const F& initial, const Arguments<F, S, W>& arguments,
                              std::int64_t begin, std::int64_t end, Compute<S>* sums);

template <class F, class S, class W>
void RowsBaseline(const F& initial, const Arguments<F, S, W>& arguments, std::int64_t begin,
                  std::int64_t end, Compute<S>* sums) {
  RunRows(initial, arguments, begin, end, sums);
}
#if defined(__x86_64__)
template <class F, class S, class W>
TWINOP_TARGET_AVX2 void RowsAvx2(const F& initial, const Arguments<F, S, W>& arguments,
                                 std::int64_t begin, std::int64_t end, Compute<S>* sums) {
  RunRows(initial, arguments, begin, end, sums);
}
template <class F, class S, class W>
TWINOP_TARGET_AVX512 void RowsAvx512(const F& initial, const Arguments<F, S, W>& arguments,
                                     std::int64_t begin, std::int64_t end, Compute<S>* sums) {
  RunRows(initial, arguments, begin, end, sums);
}
#endif

template <class F, class S, class W>
RowsFunction<F, S, W> ChooseRows() {
#if defined(__x86_64__)
  if (CpuLevel() == Level::kAvx512) return RowsAvx512<F, S, W>;
  if (CpuLevel() == Level::kAvx2) return RowsAvx2<F, S, W>;
#endif
  return RowsBaseline<F, S, W>;
}

// For this processor; chosen when the library is loaded, so that a call only reads it.
template <class F, class S, class W>
inline const RowsFunction<F, S, W> kRowsFunction = ChooseRows<F, S, W>();

// ---------------------------------------------------------------------------------- a call

inline std::int64_t Grain(std::int64_t elements) {
  return std::max(std::int64_t{1}, kGrainElements / std::max(std::int64_t{1}, elements));
}

// The rows' sums go to `groups` partial sums, each of neighbouring rows, and then one by one to the
// result: an order that the shape alone decides.
template <class F, class S, class W>
void SumColumns(const Call& call, const F& functor, const Arguments<F, S, W>& arguments) {
  using T = Compute<S>;
  constexpr std::int64_t kRowsEach = 16;  // at least: a group's sums are written and read once more
  constexpr std::int64_t kGroups = 128;
  static_assert(kGroups <= kPartials && sizeof(T) * F::kColumnSums <= 16);
  const Rows& rows = arguments.rows;
  const std::int64_t groups = std::clamp(rows.count / kRowsEach, std::int64_t{1}, kGroups);
  const std::int64_t size = F::kColumnSums * rows.columns;
  T* const partials = static_cast<T*>(call.scratch);
  if (rows.count > 0) {
    call.context->ParallelFor(groups, Grain(rows.columns * (rows.count / groups)),
                              [&](std::int64_t begin, std::int64_t end) {
                                for (std::int64_t g = begin; g < end; ++g) {
                                  std::fill_n(partials + g * size, size, T(0));
                                  kRowsFunction<F, S, W>(
                                      functor, arguments, rows.count * g / groups,
                                      rows.count * (g + 1) / groups, partials + g * size);
                                }
                              });
  }
  const std::int64_t pieces = (rows.columns + kLanes - 1) / kLanes;
  const std::int64_t terms = rows.count > 0 ? groups : 0;
  call.context->ParallelFor(pieces, Grain(kLanes * groups),
                            [&](std::int64_t begin, std::int64_t end) {
                              for (std::int64_t c = begin * kLanes;
                                   c < std::min(end * kLanes, rows.columns); c += kLanes) {
                                const std::int64_t count = std::min(kLanes, rows.columns - c);
                                for (int s = 0; s < F::kColumnSums; ++s) {
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
  if constexpr (F::kColumnSums > 0) {
    bool wanted = false;
    for (int s = 0; s < F::kColumnSums; ++s) wanted = wanted || arguments.sums[s] != nullptr;
    if (wanted) {
      SumColumns(call, functor, arguments);
      return {};
    }
  }
  if (rows.count == 0 || rows.columns == 0) return {};
  const std::int64_t units = Units(rows);
  call.context->ParallelFor(units, Grain(rows.columns * (rows.count / units)),
                            [&](std::int64_t begin, std::int64_t end) {
                              kRowsFunction<F, S, W>(functor, arguments, begin, end, nullptr);
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
