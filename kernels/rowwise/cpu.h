// Row-wise ops on the CPU. An op adds to a library its loop over contiguous rows of fp32, bf16 and
// fp64, and its steps over tiles of fp32 and fp64, for each instruction set. All ops share the
// other code (cpu.cpp, cpu_row.h): conversions of fp16, memory layouts, sums of columns, the
// framework's threads.
//
// A row belongs to one thread, which adds element c to sum c % kLanes. The compiler vectorises that
// without reordering a sum: neither the instruction set nor the number of threads changes a bit.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "kernels/primitives/cpu_features.h"
#include "kernels/rowwise/cpu_tiles.h"

namespace twinop::rowwise {

// What an op does with tiles.
enum class Step {
  kPrepare,  // stores the prepared value (Op::kPreparedOutput)
  kReduce,   // adds the terms of a phase to totals[kMaxTerms][kLanes]
  kFinish,   // hands the sums of a phase to the functors; overwrites totals
  kResult,   // computes the outputs, and adds to the column sums
};

// One step of one row, or of as many rows as tiles have lanes.
template <class T>
using StepFunction = void(Step step, int phase, bool lanes_are_rows, void* functors,
                          const Tiles<T>* tiles, T* totals);

// Rows whose elements are contiguous. Of the compute type except for the rows themselves.
template <class T>
struct ContiguousRows {
  std::int64_t count, columns;
  const void* inputs[kMaxOperands];      // null: absent
  std::int64_t strides[kMaxOperands];    // elements from row to row
  const T* column_inputs[kMaxOperands];  // null: absent
  const T* defaults;                     // of the column inputs
  void* outputs[kMaxOperands];           // null: not wanted
  T* sums;                               // `columns` of them for each column sum, or null
  T* stored;                             // for the values of a row, where the op stores them
};
template <class T>
using RowsFunction = void(const void* functor, const ContiguousRows<T>* rows);

// What the shared code knows of an op.
struct RowOp {
  int inputs, early_inputs, columns, outputs, sums, phases, prepared_output;
  bool stores_values;  // the last phase stores the row's values, and kResult reads them
  std::size_t functor_size;
  Reduction reductions[kMaxPhases];
  int terms[kMaxPhases];
  int row_inputs[kMaxOperands], column_inputs[kMaxOperands];  // their places among the op's inputs
};

// An op's code for the compute type T.
template <class T>
struct RowKernels {
  const RowOp& op;
  const ByLevel<StepFunction<T>>& step;
  const ByLevel<RowsFunction<T>>& rows;           // of T
  const ByLevel<RowsFunction<T>>* bfloat16_rows;  // null where T is double
};

// Runs an op. `defaults`: what an absent column input stands for.
template <class T>
Status RunRows(const Call& call, const RowKernels<T>& kernels, const Rows& rows,
               const void* functor, const T* defaults);
extern template Status RunRows(const Call&, const RowKernels<float>&, const Rows&, const void*,
                               const float*);
extern template Status RunRows(const Call&, const RowKernels<double>&, const Rows&, const void*,
                               const double*);

// ---------------------------------------------------------------------------------- tiles

// The steps of functor F in the compute type T.
template <class F, class T>
struct RowSteps {
  using Loops = TileLoops<F, T, T, false>;
  // The rows of an op with column inputs or column sums are never interleaved.
  static constexpr bool kMayInterleave = kColumnInputs<F> == 0 && F::kColumnSums == 0;

  template <Level kLevel>
  TWINOP_INLINE static void Run(Step step, int phase, bool lanes_are_rows, void* functors,
                                const Tiles<T>* tiles, T* totals) {
    using AllPhases = std::make_integer_sequence<int, kPhases<F>>;
    F* const functor = static_cast<F*>(functors);
    if constexpr (kMayInterleave) {
      if (lanes_are_rows)
        return RunTiles<FunctorPerLane<F>>(step, phase, functor, *tiles, totals, AllPhases{});
    }
    RunTiles<OneFunctor<F>>(step, phase, functor, *tiles, totals, AllPhases{});
  }

 private:
  template <class Functors, int... P>
  TWINOP_INLINE static void RunTiles(Step step, int phase, F* functor, const Tiles<T>& tiles,
                                     T* totals, std::integer_sequence<int, P...>) {
    if (step == Step::kFinish) {
      if constexpr (std::is_same_v<Functors, OneFunctor<F>>) {
        ((phase == P ? Loops::template Finish<P>(functor, totals) : void()), ...);
      } else {
        ((phase == P ? Loops::template FinishLanes<P>(functor, tiles.lanes, totals) : void()), ...);
      }
      return;
    }
    const Functors functors(functor);
    if (step == Step::kReduce) {
      ((phase == P ? Loops::template Reduce<P>(functors, tiles, 0, tiles.count, totals) : void()),
       ...);
    } else if (step == Step::kResult) {
      Loops::Result(functors, tiles, 0, tiles.count);
    } else if constexpr (F::kPreparedOutput >= 0) {
      Loops::Prepare(functors, tiles, 0, tiles.count);
    }
  }
};

// ---------------------------------------------------------------------------------- rows

// The loop of functor F over contiguous rows of S.
template <class F, class T, class S>
struct RowLoop {
  static_assert(std::is_trivially_copyable_v<F> && sizeof(F) <= kMaxFunctorBytes);
  static_assert(kRowInputs<F> <= kMaxOperands && kColumnInputs<F> <= kMaxOperands);
  static_assert(F::kRowOutputs <= kMaxOperands && F::kColumnSums <= kMaxOperands);
  static_assert(kPhases<F> <= kMaxPhases);
  using Loops = TileLoops<F, T, S, true>;

  template <Level kLevel>
  TWINOP_INLINE static void Run(const void* functor, const ContiguousRows<T>* rows) {
    const F initial = *static_cast<const F*>(functor);
    Buffers buffers;
    Tiles<T, S> whole, tail;
    SetColumns(*rows, &buffers, &whole, &tail);
    for (std::int64_t row = 0; row < rows->count; ++row) {
      SetRow(*rows, row, &buffers, &whole, &tail);
      F f = initial;
      ReduceAll(*rows, whole, tail, &f, std::make_integer_sequence<int, kPhases<F>>{});
      WriteResults(*rows, row, OneFunctor<F>(&f), whole, tail, buffers);
    }
    if (rows->sums == nullptr) return;
    const std::int64_t rest = rows->columns % kLanes;
    for (int s = 0; s < F::kColumnSums; ++s)
      CopyShort(buffers.tail_sums[s], rest, rows->sums + (s + 1) * rows->columns - rest);
  }

 private:
  // What stands in for operands that are absent, and for the tile behind a row's whole ones.
  struct Buffers {
    alignas(64) S zeros[kLanes];
    alignas(64) T defaults[kMaxOperands][kLanes];
    alignas(64) T unused_sums[kMaxOperands][kLanes];
    alignas(64) S tail_inputs[kMaxOperands][kLanes];
    alignas(64) T tail_columns[kMaxOperands][kLanes];
    alignas(64) S tail_outputs[kMaxOperands][kLanes];
    alignas(64) T tail_sums[kMaxOperands][kLanes];
    alignas(64) T tail_stored[kMaxOperands][kLanes];
  };

  template <class U>
  TWINOP_INLINE static void Fill(U (&to)[kLanes], U value) {
    for (U& lane : to) lane = value;
  }
  // Copies fewer than kLanes elements. A call of memcpy would take longer.
  template <class U>
  TWINOP_INLINE static void CopyShort(const U* from, std::int64_t count, U* to) {
    constexpr std::int64_t kVector = 64 / sizeof(U);
    std::int64_t i = 0;
    for (; i + kVector <= count; i += kVector) std::memcpy(to + i, from + i, 64);
    for (; i < count; ++i) {
      to[i] = from[i];
      asm volatile("");  // not a call
    }
  }

  // What is the same for all rows.
  TWINOP_INLINE static void SetColumns(const ContiguousRows<T>& rows, Buffers* buffers,
                                       Tiles<T, S>* whole, Tiles<T, S>* tail) {
    const std::int64_t rest = rows.columns % kLanes;
    Fill(buffers->zeros, S{});
    for (int j = 0; j < kRowInputs<F>; ++j) Fill(buffers->tail_inputs[j], S{});
    for (int j = 0; j < kColumnInputs<F>; ++j) {
      const T* const data = rows.column_inputs[j];
      Fill(buffers->defaults[j], rows.defaults[j]);
      Fill(buffers->tail_columns[j], rows.defaults[j]);
      whole->columns[j] = {buffers->defaults[j], 0};
      tail->columns[j] = {buffers->tail_columns[j], 0};
      if (data == nullptr) continue;
      whole->columns[j] = {data, kLanes};
      CopyShort(data + rows.columns - rest, rest, buffers->tail_columns[j]);
    }
    for (int s = 0; s < F::kColumnSums; ++s) {
      Fill(buffers->unused_sums[s], T(0));
      Fill(buffers->tail_sums[s], T(0));
      whole->sums[s] = {buffers->unused_sums[s], 0};
      if (rows.sums != nullptr) whole->sums[s] = {rows.sums + s * rows.columns, kLanes};
      tail->sums[s] = {buffers->tail_sums[s], 0};
    }
    whole->count = rows.columns / kLanes;
  }

  TWINOP_INLINE static void SetRow(const ContiguousRows<T>& rows, std::int64_t row,
                                   Buffers* buffers, Tiles<T, S>* whole, Tiles<T, S>* tail) {
    const std::int64_t rest = rows.columns % kLanes;
    const std::int64_t tail_begin = rows.columns - rest;
    for (int j = 0; j < kRowInputs<F>; ++j) {
      whole->inputs[j] = tail->inputs[j] = {buffers->zeros, 0};
      if (rows.inputs[j] == nullptr) continue;
      const S* const data = static_cast<const S*>(rows.inputs[j]) + row * rows.strides[j];
      whole->inputs[j] = {data, kLanes};
      // Of the tail the missing lanes are the next row's, if there is one: a copy would have to
      // wait for its single stores.
      const std::int64_t readable = (rows.count - 1 - row) * rows.strides[j] + rest;
      tail->inputs[j] = {data + tail_begin, 0};
      if (readable >= kLanes || rest == 0) continue;
      CopyShort(data + tail_begin, rest, buffers->tail_inputs[j]);
      tail->inputs[j] = {buffers->tail_inputs[j], 0};
    }
    for (int k = 0; k < F::kRowOutputs; ++k) {
      S* const data = static_cast<S*>(rows.outputs[k]);
      tail->outputs[k] = whole->outputs[k] = {buffers->tail_outputs[k], 0};
      if (data != nullptr) whole->outputs[k] = {data + row * rows.columns, kLanes};
    }
    if constexpr (F::kReplacesValues) {
      for (int j = 0; j < kEarlyInputs<F>; ++j) {
        T* const data = rows.stored + j * tail_begin;
        whole->stored[j] = {data, kLanes};
        if constexpr (std::is_same_v<S, T>)  // the output's own memory takes no cache beside it
          if (kEarlyInputs<F> == 1 && rows.outputs[0] != nullptr)
            whole->stored[j] = whole->outputs[0];
        tail->stored[j] = {buffers->tail_stored[j], 0};
      }
    }
  }

  template <int... P>
  TWINOP_INLINE static void ReduceAll(const ContiguousRows<T>& rows, const Tiles<T, S>& whole,
                                      const Tiles<T, S>& tail, F* functor,
                                      std::integer_sequence<int, P...>) {
    (ReducePhase<P>(rows, whole, tail, functor), ...);
  }

  // Adds up the row in parts: runs of a long row, the other whole tiles, the tail.
  template <int kPhase>
  TWINOP_INLINE static void ReducePhase(const ContiguousRows<T>& rows, const Tiles<T, S>& whole,
                                        const Tiles<T, S>& tail, F* functor) {
    constexpr Reduction kOp = F::Phases::At(kPhase);
    constexpr std::int64_t kCount = Loops::template kTerms<kPhase> * kLanes;
    alignas(64) T totals[kCount], part[kCount];
    Clear<kOp>(totals);
    const OneFunctor<F> functors(functor);
    const std::int64_t rest = rows.columns % kLanes;
    const bool has_runs = whole.count >= 2 * kRun;
    for (std::int64_t tile = 0; tile < whole.count + (rest > 0 ? 1 : 0);) {
      const bool is_tail = tile == whole.count;
      const bool is_run = has_runs && tile + kRun <= whole.count;
      const std::int64_t count = is_tail ? 1 : is_run ? kRun : whole.count - tile;
      if (is_run) Clear<kOp>(part);
      if (is_tail) std::memcpy(part, totals, sizeof(part));
      Loops::template Reduce<kPhase>(functors, is_tail ? tail : whole, tile, tile + count,
                                     is_run || is_tail ? part : totals);
      if (is_run)
        for (std::int64_t i = 0; i < kCount; ++i) totals[i] = Combine<kOp>(totals[i], part[i]);
      if (is_tail)
        for (std::int64_t i = 0; i < kCount; ++i)
          totals[i] = i % kLanes < rest ? part[i] : totals[i];
      tile += count;
    }
    Loops::template Finish<kPhase>(functor, totals);
  }

  TWINOP_INLINE static void WriteResults(const ContiguousRows<T>& rows, std::int64_t row,
                                         const OneFunctor<F>& functors, const Tiles<T, S>& whole,
                                         const Tiles<T, S>& tail, const Buffers& buffers) {
    const std::int64_t rest = rows.columns % kLanes;
    for (int part = 0; part < (rest > 0 ? 2 : 1); ++part)
      Loops::Result(functors, part == 0 ? whole : tail, 0, part == 0 ? whole.count : 1);
    for (int k = 0; k < F::kRowOutputs; ++k)
      if (rows.outputs[k] != nullptr)
        CopyShort(buffers.tail_outputs[k], rest,
                  static_cast<S*>(rows.outputs[k]) + (row + 1) * rows.columns - rest);
  }
};

// ---------------------------------------------------------------------------------- the launcher

template <class F, class T, class Op, int... P>
constexpr RowOp Describe(std::integer_sequence<int, P...>) {
  RowOp op{kRowInputs<F>,
           kEarlyInputs<F>,
           kColumnInputs<F>,
           F::kRowOutputs,
           F::kColumnSums,
           kPhases<F>,
           F::kPreparedOutput,
           F::kReplacesValues,
           sizeof(F),
           {F::Phases::At(P)...},
           {sizeof(Terms<F, T, P>) / sizeof(T)...},
           {},
           {}};
  for (int j = 0; j < op.inputs; ++j) op.row_inputs[j] = kRowIndices<F, Op>[j];
  for (int j = 0; j < op.columns; ++j) op.column_inputs[j] = kColumnIndices<F, Op>[j];
  return op;
}
template <class F, class T, class Op>
inline constexpr RowOp kRowOp = Describe<F, T, Op>(std::make_integer_sequence<int, kPhases<F>>{});

template <class F, class T, class Op>
constexpr RowKernels<T> KernelsOf() {
  const ByLevel<RowsFunction<T>>* bfloat16_rows = nullptr;
  if constexpr (std::is_same_v<T, float>)
    bfloat16_rows = &kByLevel<RowLoop<F, T, BFloat16>, RowsFunction<T>>;
  return {kRowOp<F, T, Op>, kByLevel<RowSteps<F, T>, StepFunction<T>>,
          kByLevel<RowLoop<F, T, T>, RowsFunction<T>>, bfloat16_rows};
}
template <class F, class T, class Op>
inline constexpr RowKernels<T> kRowKernels = KernelsOf<F, T, Op>();

template <class F, class T, class Op>
Status RunFunctor(const CallOf<Op>& call) {
  const Rows rows = RowsOf<F>(call);
  const F functor = MakeFunctor<F>(call, rows);
  T defaults[kMaxOperands] = {};
  for (int j = 0; j < kColumnInputs<F>; ++j) defaults[j] = functor.ColumnDefault(j);
  return RunRows<T>(call, kRowKernels<F, T, Op>, rows, &functor, defaults);
}

// The CPU launcher of functor F.
template <template <class> class F, class Op>
Status Cpu(const CallOf<Op>& call) {
  if (call.outputs[0].dtype == DType::kFloat64) return RunFunctor<F<double>, double>(call);
  return RunFunctor<F<float>, float>(call);
}

}  // namespace twinop::rowwise
