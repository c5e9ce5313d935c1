// The phases of a row on the CPU. Each phase is a pass over the elements of one row, or of several
// interleaved rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "twinop/rowwise/cpu_lanes.h"

namespace twinop::rowwise {

// Copies fewer than kLanes elements. std::copy_n would compile to a call, which costs more than the
// copy.
template <class S>
TWINOP_INLINE void CopyShort(const S* from, S* to, std::int64_t count) {
  constexpr std::int64_t kVector = 64 / sizeof(S);
  std::int64_t i = 0;
  for (; i + kVector <= count; i += kVector) std::memcpy(to + i, from + i, 64);
  for (; i < count; ++i) {
    to[i] = from[i];
    asm volatile("");  // keeps the compiler from replacing the loop with a call
  }
}

// ---------------------------------------------------------------------------------- a row

// Defaults for absent inputs, and memory for outputs that are not wanted. They also stage elements
// that are not contiguous groups of kLanes: the tail of a row, and the elements of a strided row.
template <class F, class S, class W>
struct StagingBuffers {
  alignas(64) S in[kRowInputs<F>][kLanes];
  alignas(64) S tail_in[kRowInputs<F>][kLanes];
  alignas(64) W columns[kColumnInputs<F> + 1][kLanes];
  alignas(64) W tail_columns[kColumnInputs<F> + 1][kLanes];
  alignas(64) S out[F::kRowOutputs][kLanes];
  alignas(64) Compute<S> sums[F::kColumnReductions + 1][kLanes];
  alignas(64) Compute<S> tail_sums[F::kColumnReductions + 1][kLanes];
  alignas(64) Compute<S> tail_mask[kLanes];
  alignas(64) Compute<S> tail_buffer[kRowInputs<F>][kLanes];
};

template <class F, class S, class W>
struct RowWorker {
  using T = Compute<S>;
  using Tensors = Arguments<F, S, W>;
  static constexpr int kInputs = kRowInputs<F>;
  // If this is false, the stride is the constant 1.
  static constexpr bool kSupportsInterleaved = kColumnInputs<F> == 0 && F::kColumnReductions == 0;

  const F& initial;
  const Tensors& arguments;
  T* sums;          // kColumnReductions rows of column sums, or null
  T* stack_buffer;  // kBufferBytes for the row's values; null: the output's row is the buffer
  StagingBuffers<F, S, W>& staging;
  // The distance between the elements of a row, and the numbers of its elements after and in the
  // full chunks.
  const std::int64_t stride, tail, body;

  // The start of the current row, or of the first of the current interleaved rows.
  const S* in[kInputs];
  const W* columns[kColumnInputs<F> + 1];
  S* out[F::kRowOutputs];
  T* row_buffer;
  const S* limits[kInputs];  // the end of this thread's rows

  TWINOP_INLINE RowWorker(const F& functor, const Tensors& tensors, T* column_sums, T* buffer,
                          StagingBuffers<F, S, W>& staging_buffers, std::int64_t end)
      : initial(functor),
        arguments(tensors),
        sums(column_sums),
        stack_buffer(buffer),
        staging(staging_buffers),
        stride(kSupportsInterleaved ? tensors.rows.inner : 1),
        tail(tensors.rows.columns % kLanes),
        body(tensors.rows.columns - tail) {
    for (int j = 0; j < kInputs; ++j) {
      limits[j] = arguments.inputs[j];
      if (limits[j] != nullptr) limits[j] += LastRow(j, end) * arguments.strides[j] + body + tail;
      std::fill_n(staging.in[j], kLanes, S{});
      std::fill_n(staging.tail_in[j], kLanes, S{});
    }
    for (int j = 0; j < kColumnInputs<F>; ++j) {
      W neutral;
      Round(initial.ColumnDefault(j), &neutral);
      std::fill_n(staging.columns[j], kLanes, neutral);
      std::fill_n(staging.tail_columns[j], kLanes, neutral);
    }
    SetColumns(0);
    for (int s = 0; s < F::kColumnReductions; ++s) {
      std::fill_n(staging.sums[s], kLanes, T(0));
      std::fill_n(staging.tail_sums[s], kLanes, T(0));
    }
    for (std::int64_t i = 0; i < kLanes; ++i) staging.tail_mask[i] = i < tail ? T(1) : T(0);
  }

  // The last row of an input that this thread may read. (Nobody writes to a table meanwhile.)
  TWINOP_INLINE std::int64_t LastRow(int j, std::int64_t end) const {
    if constexpr (F::kGathers) return arguments.input_rows[j] - 1;
    return end - 1;
  }
  TWINOP_INLINE void SetColumns(std::int64_t row) {
    for (int j = 0; j < kColumnInputs<F>; ++j) {
      columns[j] = arguments.Column(j, row);
      if (columns[j] != nullptr) std::copy_n(columns[j] + body, tail, staging.tail_columns[j]);
    }
  }

  TWINOP_INLINE void Finish() const {
    if (sums == nullptr) return;
    for (int s = 0; s < F::kColumnReductions; ++s)
      std::copy_n(staging.tail_sums[s], tail, sums + s * arguments.rows.columns + body);
  }

  TWINOP_INLINE void Begin(std::int64_t row) {
    const Rows& rows = arguments.rows;
    const std::int64_t dense =
        stride == 1 ? row * rows.columns : row / stride * rows.columns * stride + row % stride;
    for (int j = 0; j < kInputs; ++j) {
      in[j] = arguments.inputs[j];
      if (in[j] != nullptr)
        in[j] += stride == 1 ? arguments.InputRow(j, row) * arguments.strides[j] : dense;
    }
    for (int k = 0; k < F::kRowOutputs; ++k) {
      out[k] = arguments.outputs[k];
      if (out[k] != nullptr) out[k] += dense;
    }
    if constexpr (F::kColumnsOfBatch) SetColumns(row);
    row_buffer = stack_buffer;
    if constexpr (std::is_same_v<S, T>)
      if (stack_buffer == nullptr) row_buffer = out[0];
  }

  // Copies elements c to c + count - 1 of a row.
  TWINOP_INLINE void Gather(const S* from, S* to, std::int64_t c, std::int64_t count) const {
    if (stride == 1) {
      CopyShort(from + c, to, count);
    } else {
      for (std::int64_t i = 0; i < count; ++i) to[i] = from[(c + i) * stride];
    }
  }
  TWINOP_INLINE void Scatter(std::int64_t c, std::int64_t count) const {
    for (int k = 0; k < F::kRowOutputs; ++k) {
      if (arguments.outputs[k] == nullptr) continue;
      if (stride == 1) {
        CopyShort(staging.out[k], out[k] + c, count);
      } else {
        for (std::int64_t i = 0; i < count; ++i) out[k][(c + i) * stride] = staging.out[k][i];
      }
    }
  }

  // Elements c to c + kLanes - 1 of the row. kRead: the inputs are read.
  template <bool kRead>
  TWINOP_INLINE Window<F, S, W> ChunkWindow(std::int64_t c) const {
    Window<F, S, W> window{};
    for (int j = 0; j < kInputs; ++j) {
      const bool direct = arguments.inputs[j] != nullptr && stride == 1;
      window.in[j] = direct ? in[j] + c : staging.in[j];
      if (kRead && stride != 1 && arguments.inputs[j] != nullptr)
        Gather(in[j], staging.in[j], c, kLanes);
      window.buffer[j] = row_buffer + j * body + c;
    }
    for (int j = 0; j < kColumnInputs<F>; ++j)
      window.columns[j] = columns[j] == nullptr ? staging.columns[j] : columns[j] + c;
    for (int k = 0; k < F::kRowOutputs; ++k)
      window.out[k] = arguments.outputs[k] == nullptr || stride != 1 ? staging.out[k] : out[k] + c;
    for (int s = 0; s < F::kColumnReductions; ++s)
      window.sums[s] = sums == nullptr ? staging.sums[s] : sums + s * arguments.rows.columns + c;
    return window;
  }

  // The elements after the last full chunk. If a full chunk at this position is within this
  // thread's rows, it is read in place. A vector load from a copy would wait for the copy's scalar
  // stores.
  template <bool kReadEarly, bool kReadLate>
  TWINOP_INLINE Window<F, S, W> TailWindow() const {
    Window<F, S, W> window{};
    for (int j = 0; j < kInputs; ++j) {
      window.in[j] = staging.tail_in[j];
      if (stride == 1 && arguments.inputs[j] != nullptr && limits[j] - in[j] >= body + kLanes) {
        window.in[j] = in[j] + body;
      } else if ((j < kEarlyInputs<F> ? kReadEarly : kReadLate) && arguments.inputs[j] != nullptr) {
        Gather(in[j], staging.tail_in[j], body, tail);
      }
      window.buffer[j] = staging.tail_buffer[j];
    }
    for (int j = 0; j < kColumnInputs<F>; ++j) window.columns[j] = staging.tail_columns[j];
    for (int k = 0; k < F::kRowOutputs; ++k) window.out[k] = staging.out[k];
    for (int s = 0; s < F::kColumnReductions; ++s) window.sums[s] = staging.tail_sums[s];
    return window;
  }

  template <int kPhase, bool kBuffered>
  TWINOP_INLINE void Reduce(F* functor) const {
    constexpr Reduction kOp = F::Phases::At(kPhase);
    constexpr int kCount = kTermCount<F, T, kPhase>;
    constexpr bool kRead = !kBuffered || kPhase <= kBufferPhase<F, S>;
    constexpr std::int64_t kBlockElements = kBlockTerms * kLanes;
    alignas(64) T totals[kCount][kLanes];
    Clear<kOp>(totals);
    const SharedFunctor<F> functors{*functor};
    std::int64_t c = 0;
    if (body >= 2 * kBlockElements) {
      alignas(64) T block[kCount][kLanes];
      for (; c + kBlockElements <= body; c += kBlockElements) {
        Clear<kOp>(block);
        for (std::int64_t i = c; i < c + kBlockElements; i += kLanes)
          AddTerms<kPhase, kBuffered>(functors, ChunkWindow<kRead>(i), kLanes, AllValid{}, block);
        Add<kOp>(totals, block);
      }
    }
    for (; c < body; c += kLanes)
      AddTerms<kPhase, kBuffered>(functors, ChunkWindow<kRead>(c), kLanes, AllValid{}, totals);
    if (tail > 0) {
      AddTerms<kPhase, kBuffered>(functors, TailWindow<kPhase == 0, false>(), kLanes,
                                  static_cast<const T*>(staging.tail_mask), totals);
    }
    Terms<F, T, kPhase> total;
    for (int t = 0; t < kCount; ++t) total[t] = FoldLanes<kOp>(totals[t]);
    functor->Finish(Phase<kPhase>{}, total);
  }

  template <bool kBuffered, int... P>
  TWINOP_INLINE void RunRow(std::int64_t row, std::integer_sequence<int, P...>) {
    Begin(row);
    constexpr bool kRead = !kBuffered || F::kEpilogueInputs > 0;
    F functor = arguments.FunctorOf(initial, row);
    (Reduce<P, kBuffered>(&functor), ...);
    const SharedFunctor<F> functors{functor};
    for (std::int64_t c = 0; c < body; c += kLanes) {
      WriteResults<kBuffered>(functors, ChunkWindow<kRead>(c), kLanes);
      if (stride != 1) Scatter(c, kLanes);
    }
    if (tail > 0) {
      WriteResults<kBuffered>(functors, TailWindow<false, true>(), kLanes);
      Scatter(body, tail);
    }
  }

  // -------------------------------------------------------------------------- interleaved rows

  // Element c of each of `count` interleaved rows.
  TWINOP_INLINE Window<F, S, W> InterleavedWindow(std::int64_t c, std::int64_t count) const {
    Window<F, S, W> window{};
    for (int j = 0; j < kInputs; ++j) {
      window.in[j] = arguments.inputs[j] == nullptr ? staging.in[j] : in[j] + c * stride;
      window.buffer[j] = stack_buffer + (j * arguments.rows.columns + c) * count;
    }
    for (int k = 0; k < F::kRowOutputs; ++k)
      window.out[k] = arguments.outputs[k] == nullptr ? staging.out[k] : out[k] + c * stride;
    return window;
  }

  template <int kPhase, bool kBuffered>
  TWINOP_INLINE void ReduceInterleaved(F (&functors)[kLanes], std::int64_t count) const {
    constexpr Reduction kOp = F::Phases::At(kPhase);
    constexpr int kCount = kTermCount<F, T, kPhase>;
    const std::int64_t columns = arguments.rows.columns;
    alignas(64) T totals[kCount][kLanes], block[kCount][kLanes];
    Clear<kOp>(totals);
    for (std::int64_t begin = 0; begin < columns; begin += kBlockTerms) {
      Clear<kOp>(block);
      for (std::int64_t c = begin; c < std::min(begin + kBlockTerms, columns); ++c)
        AddTerms<kPhase, kBuffered>(static_cast<const F*>(functors), InterleavedWindow(c, count),
                                    count, AllValid{}, block);
      Add<kOp>(totals, block);
    }
    for (std::int64_t i = 0; i < count; ++i) {
      Terms<F, T, kPhase> total;
      for (int t = 0; t < kCount; ++t) total[t] = totals[t][i];
      functors[i].Finish(Phase<kPhase>{}, total);
    }
  }

  template <bool kBuffered, int... P, int... I>
  TWINOP_INLINE void RunInterleaved(std::int64_t first, std::int64_t count,
                                    std::integer_sequence<int, P...>,
                                    std::integer_sequence<int, I...>) {
    Begin(first);
    F functors[kLanes] = {(static_cast<void>(I), initial)...};
    (ReduceInterleaved<P, kBuffered>(functors, count), ...);
    for (std::int64_t c = 0; c < arguments.rows.columns; ++c)
      WriteResults<kBuffered>(static_cast<const F*>(functors), InterleavedWindow(c, count), count);
  }
};

}  // namespace twinop::rowwise
