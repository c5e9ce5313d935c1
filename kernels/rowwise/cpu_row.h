// A row on the CPU: phase after phase over its elements. A row as it lies in memory, or several
// that lie side by side.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/rowwise/cpu_lanes.h"

namespace twinop::rowwise {

// std::copy_n of less than kLanes elements would be a call, which costs more than the copy.
template <class S>
TWINOP_INLINE void CopyFew(const S* from, S* to, std::int64_t count) {
  constexpr std::int64_t kVector = 64 / sizeof(S);
  std::int64_t i = 0;
  for (; i + kVector <= count; i += kVector) std::memcpy(to + i, from + i, 64);
  for (; i < count; ++i) {
    to[i] = from[i];
    asm volatile("");  // not a call
  }
}

// ---------------------------------------------------------------------------------- a row

// What stands in for tensors that are absent or not wanted, and for elements that are not kLanes
// neighbours in memory: a row's last ones (the tail), and rows that lie apart.
template <class F, class S, class W>
struct StandIns {
  alignas(64) S in[kRowInputs<F>][kLanes];
  alignas(64) S tail_in[kRowInputs<F>][kLanes];
  alignas(64) W columns[kColumnInputs<F> + 1][kLanes];
  alignas(64) W tail_columns[kColumnInputs<F> + 1][kLanes];
  alignas(64) S out[F::kRowOutputs][kLanes];
  alignas(64) Compute<S> sums[F::kColumnSums + 1][kLanes];
  alignas(64) Compute<S> tail_sums[F::kColumnSums + 1][kLanes];
  alignas(64) Compute<S> tail_exist[kLanes];
  alignas(64) Compute<S> tail_held[kRowInputs<F>][kLanes];
};

template <class F, class S, class W>
struct Worker {
  using T = Compute<S>;
  using Tensors = Arguments<F, S, W>;
  static constexpr int kInputs = kRowInputs<F>;
  static constexpr bool kMayLieApart = kColumnInputs<F> == 0 && F::kColumnSums == 0;

  const F& initial;
  const Tensors& arguments;
  T* sums;  // kColumnSums rows of sums, or null
  T* held;  // where the row is held: kHeldBytes, or null for the output's row
  StandIns<F, S, W>& stand_ins;
  const std::int64_t step, tail, whole;  // of a row: from element to element; elements

  // Where the current row (or, lying apart, the first of the current rows) begins.
  const S* in[kInputs];
  S* out[F::kRowOutputs];
  T* row_held;
  const S* limits[kInputs];  // the end of this thread's rows

  TWINOP_INLINE Worker(const F& functor, const Tensors& tensors, T* column_sums, T* buffer,
                       StandIns<F, S, W>& others, std::int64_t end)
      : initial(functor),
        arguments(tensors),
        sums(column_sums),
        held(buffer),
        stand_ins(others),
        step(kMayLieApart ? tensors.rows.inner : 1),
        tail(tensors.rows.columns % kLanes),
        whole(tensors.rows.columns - tail) {
    for (int j = 0; j < kInputs; ++j) {
      limits[j] = arguments.inputs[j];
      if (limits[j] != nullptr) limits[j] += (end - 1) * arguments.strides[j] + whole + tail;
      std::fill_n(stand_ins.in[j], kLanes, S{});
      std::fill_n(stand_ins.tail_in[j], kLanes, S{});
    }
    for (int j = 0; j < kColumnInputs<F>; ++j) {
      W neutral;
      Round(initial.ColumnDefault(j), &neutral);
      std::fill_n(stand_ins.columns[j], kLanes, neutral);
      std::fill_n(stand_ins.tail_columns[j], kLanes, neutral);
      if (arguments.columns[j] != nullptr)
        std::copy_n(arguments.columns[j] + whole, tail, stand_ins.tail_columns[j]);
    }
    for (int s = 0; s < F::kColumnSums; ++s) {
      std::fill_n(stand_ins.sums[s], kLanes, T(0));
      std::fill_n(stand_ins.tail_sums[s], kLanes, T(0));
    }
    for (std::int64_t i = 0; i < kLanes; ++i) stand_ins.tail_exist[i] = i < tail ? T(1) : T(0);
  }

  TWINOP_INLINE void Finish() const {
    if (sums == nullptr) return;
    for (int s = 0; s < F::kColumnSums; ++s)
      std::copy_n(stand_ins.tail_sums[s], tail, sums + s * arguments.rows.columns + whole);
  }

  TWINOP_INLINE void Begin(std::int64_t row) {
    const Rows& rows = arguments.rows;
    const std::int64_t dense =
        step == 1 ? row * rows.columns : row / step * rows.columns * step + row % step;
    for (int j = 0; j < kInputs; ++j) {
      in[j] = arguments.inputs[j];
      if (in[j] != nullptr) in[j] += step == 1 ? row * arguments.strides[j] : dense;
    }
    for (int k = 0; k < F::kRowOutputs; ++k) {
      out[k] = arguments.outputs[k];
      if (out[k] != nullptr) out[k] += dense;
    }
    row_held = held;
    if constexpr (std::is_same_v<S, T>)
      if (held == nullptr) row_held = out[0];
  }

  // A copy of elements c ... c + count, `step` apart.
  TWINOP_INLINE void Gather(const S* from, S* to, std::int64_t c, std::int64_t count) const {
    if (step == 1) {
      CopyFew(from + c, to, count);
    } else {
      for (std::int64_t i = 0; i < count; ++i) to[i] = from[(c + i) * step];
    }
  }
  TWINOP_INLINE void Scatter(std::int64_t c, std::int64_t count) const {
    for (int k = 0; k < F::kRowOutputs; ++k) {
      if (arguments.outputs[k] == nullptr) continue;
      if (step == 1) {
        CopyFew(stand_ins.out[k], out[k] + c, count);
      } else {
        for (std::int64_t i = 0; i < count; ++i) out[k][(c + i) * step] = stand_ins.out[k][i];
      }
    }
  }

  // Elements c ... c + kLanes of the row. kRead: the inputs are looked at.
  template <bool kRead>
  TWINOP_INLINE Window<F, S, W> At(std::int64_t c) const {
    Window<F, S, W> window{};
    for (int j = 0; j < kInputs; ++j) {
      const bool direct = arguments.inputs[j] != nullptr && step == 1;
      window.in[j] = direct ? in[j] + c : stand_ins.in[j];
      if (kRead && step != 1 && arguments.inputs[j] != nullptr)
        Gather(in[j], stand_ins.in[j], c, kLanes);
      window.held[j] = row_held + j * whole + c;
    }
    for (int j = 0; j < kColumnInputs<F>; ++j)
      window.columns[j] =
          arguments.columns[j] == nullptr ? stand_ins.columns[j] : arguments.columns[j] + c;
    for (int k = 0; k < F::kRowOutputs; ++k)
      window.out[k] = arguments.outputs[k] == nullptr || step != 1 ? stand_ins.out[k] : out[k] + c;
    for (int s = 0; s < F::kColumnSums; ++s)
      window.sums[s] = sums == nullptr ? stand_ins.sums[s] : sums + s * arguments.rows.columns + c;
    return window;
  }

  // The elements behind the last kLanes. They are read with what lies behind them, if that is part
  // of this thread's rows; a copy of them has to wait for its single stores.
  template <bool kEarly, bool kLate>
  TWINOP_INLINE Window<F, S, W> Tail() const {
    Window<F, S, W> window{};
    for (int j = 0; j < kInputs; ++j) {
      window.in[j] = stand_ins.tail_in[j];
      if (step == 1 && arguments.inputs[j] != nullptr && limits[j] - in[j] >= whole + kLanes) {
        window.in[j] = in[j] + whole;
      } else if ((j < kEarlyInputs<F> ? kEarly : kLate) && arguments.inputs[j] != nullptr) {
        Gather(in[j], stand_ins.tail_in[j], whole, tail);
      }
      window.held[j] = stand_ins.tail_held[j];
    }
    for (int j = 0; j < kColumnInputs<F>; ++j) window.columns[j] = stand_ins.tail_columns[j];
    for (int k = 0; k < F::kRowOutputs; ++k) window.out[k] = stand_ins.out[k];
    for (int s = 0; s < F::kColumnSums; ++s) window.sums[s] = stand_ins.tail_sums[s];
    return window;
  }

  template <int kPhase, bool kHeld>
  TWINOP_INLINE void Reduce(F* functor) const {
    constexpr Reduction kOp = F::Phases::At(kPhase);
    constexpr int kCount = kTerms<F, T, kPhase>;
    constexpr bool kRead = !kHeld || kPhase <= kHoldPhase<F, S>;
    constexpr std::int64_t kLength = kRun * kLanes;
    alignas(64) T totals[kCount][kLanes];
    Clear<kOp>(totals);
    const OneFunctor<F> functors{*functor};
    std::int64_t c = 0;
    if (whole >= 2 * kLength) {
      alignas(64) T run[kCount][kLanes];
      for (; c + kLength <= whole; c += kLength) {
        Clear<kOp>(run);
        for (std::int64_t i = c; i < c + kLength; i += kLanes)
          AddTerms<kPhase, kHeld>(functors, At<kRead>(i), kLanes, AllExist{}, run);
        Add<kOp>(totals, run);
      }
    }
    for (; c < whole; c += kLanes)
      AddTerms<kPhase, kHeld>(functors, At<kRead>(c), kLanes, AllExist{}, totals);
    if (tail > 0) {
      AddTerms<kPhase, kHeld>(functors, Tail<kPhase == 0, false>(), kLanes,
                              static_cast<const T*>(stand_ins.tail_exist), totals);
    }
    Terms<F, T, kPhase> total;
    for (int t = 0; t < kCount; ++t) total[t] = Fold<kOp>(totals[t]);
    functor->Finish(Phase<kPhase>{}, total);
  }

  template <bool kHeld, int... P>
  TWINOP_INLINE void Row(std::int64_t row, std::integer_sequence<int, P...>) {
    Begin(row);
    constexpr bool kRead = !kHeld || F::kLateInputs > 0;
    F functor = initial;
    (Reduce<P, kHeld>(&functor), ...);
    const OneFunctor<F> functors{functor};
    for (std::int64_t c = 0; c < whole; c += kLanes) {
      WriteResults<kHeld>(functors, At<kRead>(c), kLanes);
      if (step != 1) Scatter(c, kLanes);
    }
    if (tail > 0) {
      WriteResults<kHeld>(functors, Tail<false, true>(), kLanes);
      Scatter(whole, tail);
    }
  }

  // ------------------------------------------------------------------------------ neighbouring
  // rows

  // Elements c of `count` neighbouring rows that lie apart.
  TWINOP_INLINE Window<F, S, W> Across(std::int64_t c, std::int64_t count) const {
    Window<F, S, W> window{};
    for (int j = 0; j < kInputs; ++j) {
      window.in[j] = arguments.inputs[j] == nullptr ? stand_ins.in[j] : in[j] + c * step;
      window.held[j] = held + (j * arguments.rows.columns + c) * count;
    }
    for (int k = 0; k < F::kRowOutputs; ++k)
      window.out[k] = arguments.outputs[k] == nullptr ? stand_ins.out[k] : out[k] + c * step;
    return window;
  }

  template <int kPhase, bool kHeld>
  TWINOP_INLINE void ReduceAcross(F (&functors)[kLanes], std::int64_t count) const {
    constexpr Reduction kOp = F::Phases::At(kPhase);
    constexpr int kCount = kTerms<F, T, kPhase>;
    const std::int64_t columns = arguments.rows.columns;
    alignas(64) T totals[kCount][kLanes], run[kCount][kLanes];
    Clear<kOp>(totals);
    for (std::int64_t begin = 0; begin < columns; begin += kRun) {
      Clear<kOp>(run);
      for (std::int64_t c = begin; c < std::min(begin + kRun, columns); ++c)
        AddTerms<kPhase, kHeld>(static_cast<const F*>(functors), Across(c, count), count,
                                AllExist{}, run);
      Add<kOp>(totals, run);
    }
    for (std::int64_t i = 0; i < count; ++i) {
      Terms<F, T, kPhase> total;
      for (int t = 0; t < kCount; ++t) total[t] = totals[t][i];
      functors[i].Finish(Phase<kPhase>{}, total);
    }
  }

  template <bool kHeld, int... P, int... I>
  TWINOP_INLINE void Neighbours(std::int64_t first, std::int64_t count,
                                std::integer_sequence<int, P...>,
                                std::integer_sequence<int, I...>) {
    Begin(first);
    F functors[kLanes] = {(static_cast<void>(I), initial)...};
    (ReduceAcross<P, kHeld>(functors, count), ...);
    for (std::int64_t c = 0; c < arguments.rows.columns; ++c)
      WriteResults<kHeld>(static_cast<const F*>(functors), Across(c, count), count);
  }
};

}  // namespace twinop::rowwise
