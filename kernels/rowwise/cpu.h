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
#include <limits>
#include <type_traits>
#include <utility>

#include "kernels/primitives/cpu_features.h"
#include "kernels/rowwise.h"

namespace twinop::rowwise {

// Values of a tile. A tile is a part of one row or, where neighbouring rows are interleaved in
// memory, one value of each of kLanes rows. Whole registers for every type, and enough of them to
// hide the latency of an addition.
inline constexpr std::int64_t kLanes = 64;

// Tiles of a long row whose terms are added one after another before they join the total: in one
// long sum digits would be lost.
inline constexpr std::int64_t kRun = 64;

// Limits of the skeleton.
inline constexpr int kMaxOperands = 4;  // row inputs; column inputs; row outputs; column sums
inline constexpr int kMaxPhases = 4;
inline constexpr int kMaxTerms = 4;

// Consecutive tiles of an operand: where the first is, and how far the next (0: the same again).
template <class T>
struct Operand {
  T* data;
  std::int64_t step;
};

// Consecutive tiles of all operands: rows of S, the others of the compute type.
template <class T, class S = T>
struct Tiles {
  Operand<const S> inputs[kMaxOperands];
  Operand<const T> columns[kMaxOperands];
  Operand<S> outputs[kMaxOperands];
  Operand<T> sums[kMaxOperands];    // sums over rows
  Operand<T> stored[kMaxOperands];  // the row's values for later phases
  std::int64_t count;               // tiles
  std::int64_t lanes;               // of each, where lanes are rows
};

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

// ---------------------------------------------------------------------------------- the arithmetic

template <Reduction kOp, class T, class Terms>
TWINOP_INLINE T AddTerm(T total, const Terms& terms, int t) {
  if constexpr (kOp == kSum) {
    return WithTerm(total, terms, t);
  } else if constexpr (kOp == kSquares) {
    return total + terms[t] * terms[t];
  } else {
    return terms[t] > total ? terms[t] : total;  // may lose a NaN: the sum that follows has it
  }
}

template <Reduction kOp, class T>
TWINOP_INLINE T Combine(T a, T b) {
  return kOp == kMax ? (b > a ? b : a) : a + b;
}

template <Reduction kOp, std::int64_t kCount, class T>
TWINOP_INLINE void Clear(T (&totals)[kCount]) {
  for (T& total : totals) total = kOp == kMax ? -std::numeric_limits<T>::infinity() : T(0);
}

// Adds up the lanes, in pairs.
template <Reduction kOp, std::int64_t kHalf = kLanes / 2, class T>
TWINOP_INLINE T Fold(T* lanes) {
  for (std::int64_t i = 0; i < kHalf; ++i) lanes[i] = Combine<kOp>(lanes[i], lanes[i + kHalf]);
  if constexpr (kHalf > 1) return Fold<kOp, kHalf / 2>(lanes);
  return lanes[0];
}

// One functor for all lanes of a tile.
template <class F>
struct OneFunctor {
  const F functor;
  TWINOP_INLINE explicit OneFunctor(const F* functors) : functor(*functors) {}
  TWINOP_INLINE const F& operator[](std::int64_t) const { return functor; }
};
// A functor for each lane.
template <class F>
struct FunctorPerLane {
  const F* functors;
  TWINOP_INLINE explicit FunctorPerLane(const F* array) : functors(array) {}
  TWINOP_INLINE const F& operator[](std::int64_t i) const { return functors[i]; }
};

// The loops of functor F over tiles. kPrepares: the values are prepared here instead of before.
template <class F, class T, class S, bool kPrepares>
struct TileLoops {
  static constexpr int kInputs = kRowInputs<F>;
  static constexpr int kColumns = kColumnInputs<F>;
  using Row = Values<T, kInputs>;
  using Column = Values<T, kColumns>;
  template <int kPhase>
  static constexpr int kTerms = sizeof(Terms<F, T, kPhase>) / sizeof(T);

  template <class Functors>
  TWINOP_INLINE static void Prepare(const Functors& functors, const Tiles<T, S>& tiles) {
    const std::int64_t lanes = Lanes(functors, tiles);
    for (std::int64_t tile = 0; tile < tiles.count; ++tile) {
      const InputTile in(tiles.inputs, tile);
      T* const prepared = tiles.stored[0].data + tile * tiles.stored[0].step;
#pragma GCC ivdep
      for (std::int64_t i = 0; i < lanes; ++i)
        prepared[i] = functors[i].Prepared(Read<false>(in, i, RowIndices{}));
    }
  }

  // Adds the terms of a phase to totals[kTerms][kLanes].
  template <int kPhase, class Functors>
  TWINOP_INLINE static void Reduce(const Functors& functors, const Tiles<T, S>& tiles, T* totals) {
    constexpr Reduction kOp = F::Phases::At(kPhase);
    constexpr int kCount = kTerms<kPhase>;
    constexpr bool kStores = F::kReplacesValues && kPhase == kPhases<F> - 1;
    static_assert(kCount <= kMaxTerms);
    const std::int64_t lanes = Lanes(functors, tiles);
    alignas(64) T sums[kCount][kLanes];
    std::memcpy(sums, totals, sizeof(sums));
    for (std::int64_t tile = 0; tile < tiles.count; ++tile) {
      const InputTile in(tiles.inputs, tile);
      const ColumnTile columns(tiles.columns, tile);
      const Tile<T, kStores ? kEarlyInputs<F> : 0> stored(tiles.stored, tile);
#pragma GCC ivdep
      for (std::int64_t i = 0; i < lanes; ++i) {
        const Column column = ColumnAt(columns, i, ColumnIndices{});
        Row row = RowBefore<kPhase>(functors[i], Read<false>(in, i, RowIndices{}), column);
        const auto terms = functors[i].Term(Phase<kPhase>{}, row, column);
        for (int t = 0; t < kCount; ++t) sums[t][i] = AddTerm<kOp>(sums[t][i], terms, t);
        if constexpr (kStores)
          for (int j = 0; j < kEarlyInputs<F>; ++j) stored[j][i] = row[j];
      }
      // GCC would merge consecutive iterations, and then not vectorise (-floop-unroll-and-jam).
      asm volatile("");
    }
    std::memcpy(totals, sums, sizeof(sums));
  }

  // Computes the outputs, and adds to the column sums.
  template <class Functors>
  TWINOP_INLINE static void Result(const Functors& functors, const Tiles<T, S>& tiles) {
    const std::int64_t lanes = Lanes(functors, tiles);
    for (std::int64_t tile = 0; tile < tiles.count; ++tile) {
      const InputTile in(tiles.inputs, tile);
      const ColumnTile columns(tiles.columns, tile);
      const Tile<S, F::kRowOutputs> out(tiles.outputs, tile);
      [[maybe_unused]] const Tile<T, F::kColumnSums> sums(tiles.sums, tile);
      const Tile<T, F::kReplacesValues ? kEarlyInputs<F> : 0> stored(tiles.stored, tile);
#pragma GCC ivdep
      for (std::int64_t i = 0; i < lanes; ++i) {
        const Column column = ColumnAt(columns, i, ColumnIndices{});
        Row row = Read<true>(in, i, RowIndices{});
        if constexpr (F::kReplacesValues) {
          for (int j = 0; j < kEarlyInputs<F>; ++j) row[j] = stored[j][i];
        } else {
          row = RowBefore<kPhases<F>>(functors[i], row, column);
        }
        const auto result = functors[i].Result(row, column);
        if constexpr (F::kColumnSums > 0) {
          const auto terms = functors[i].ColumnTerm(row);
          for (int s = 0; s < F::kColumnSums; ++s) sums[s][i] = WithTerm(sums[s][i], terms, s);
        }
        for (int k = 0; k < F::kRowOutputs; ++k) Round(result[k], &out[k][i]);
      }
      asm volatile("");
    }
  }

  // Hands the sums of a phase to the functors; overwrites totals.
  template <int kPhase>
  TWINOP_INLINE static void Finish(F* functor, T* totals) {
    Terms<F, T, kPhase> total;
    for (int t = 0; t < kTerms<kPhase>; ++t)
      total[t] = Fold<F::Phases::At(kPhase)>(totals + t * kLanes);
    functor->Finish(Phase<kPhase>{}, total);
  }
  template <int kPhase>
  TWINOP_INLINE static void FinishLanes(F* functors, std::int64_t lanes, const T* totals) {
    for (std::int64_t i = 0; i < lanes; ++i) {
      Terms<F, T, kPhase> total;
      for (int t = 0; t < kTerms<kPhase>; ++t) total[t] = totals[t * kLanes + i];
      functors[i].Finish(Phase<kPhase>{}, total);
    }
  }

 private:
  using RowIndices = std::make_integer_sequence<int, kInputs>;
  using ColumnIndices = std::make_integer_sequence<int, kColumns>;

  // Operands of one tile.
  template <class U, int kCount>
  struct Tile {
    U* data[kCount > 0 ? kCount : 1];

    TWINOP_INLINE Tile(const Operand<U> (&operands)[kMaxOperands], std::int64_t tile) {
      for (int k = 0; k < kCount; ++k) data[k] = operands[k].data + tile * operands[k].step;
    }
    TWINOP_INLINE U* operator[](int k) const { return data[k]; }
  };
  using InputTile = Tile<const S, kInputs>;
  using ColumnTile = Tile<const T, kColumns>;

  TWINOP_INLINE static std::int64_t Lanes(const OneFunctor<F>&, const Tiles<T, S>&) {
    return kLanes;
  }
  TWINOP_INLINE static std::int64_t Lanes(const FunctorPerLane<F>&, const Tiles<T, S>& tiles) {
    return tiles.lanes;
  }

  template <int... J>
  TWINOP_INLINE static Column ColumnAt([[maybe_unused]] const ColumnTile& columns,
                                       [[maybe_unused]] std::int64_t i,
                                       std::integer_sequence<int, J...>) {
    return {{columns[J][i]...}};
  }

  // The row's values as they are in memory. Only the result depends on late inputs.
  template <bool kForResult, int... J>
  TWINOP_INLINE static Row Read(const InputTile& in, std::int64_t i,
                                std::integer_sequence<int, J...>) {
    return {{(J < kEarlyInputs<F> || kForResult ? ToCompute(in[J][i]) : T(0))...}};
  }
  // The row's values as the phases before kPhase leave them.
  template <int kPhase>
  TWINOP_INLINE static Row RowBefore(const F& functor, Row row, const Column& column) {
    if constexpr (kPrepares) {
      Replay<kPhase, S>(functor, row, column);
    } else {
      ReplayPhases<kPhase>(functor, row, column);
    }
    return row;
  }
};

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
      ((phase == P ? Loops::template Reduce<P>(functors, tiles, totals) : void()), ...);
    } else if (step == Step::kResult) {
      Loops::Result(functors, tiles);
    } else if constexpr (F::kPreparedOutput >= 0) {
      Loops::Prepare(functors, tiles);
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
  template <class U>
  TWINOP_INLINE static void CopyShort(const U* from, std::int64_t count, U* to) {
    for (std::int64_t i = 0; i < count; ++i) {
      to[i] = from[i];
      asm volatile("");  // a call of memcpy would take longer
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
    tail->count = 1;
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
      Tiles<T, S> tiles = is_tail ? tail : whole;
      if (!is_tail) Advance(tile, is_run ? kRun : whole.count - tile, &tiles);
      if (is_run) Clear<kOp>(part);
      if (is_tail) std::memcpy(part, totals, sizeof(part));
      Loops::template Reduce<kPhase>(functors, tiles, is_run || is_tail ? part : totals);
      if (is_run)
        for (std::int64_t i = 0; i < kCount; ++i) totals[i] = Combine<kOp>(totals[i], part[i]);
      if (is_tail)
        for (std::int64_t i = 0; i < kCount; ++i)
          totals[i] = i % kLanes < rest ? part[i] : totals[i];
      tile += tiles.count;
    }
    Loops::template Finish<kPhase>(functor, totals);
  }

  TWINOP_INLINE static void Advance(std::int64_t tile, std::int64_t count, Tiles<T, S>* tiles) {
    for (int j = 0; j < kRowInputs<F>; ++j) tiles->inputs[j].data += tile * tiles->inputs[j].step;
    for (int j = 0; j < kColumnInputs<F>; ++j)
      tiles->columns[j].data += tile * tiles->columns[j].step;
    if constexpr (F::kReplacesValues)
      for (int j = 0; j < kEarlyInputs<F>; ++j)
        tiles->stored[j].data += tile * tiles->stored[j].step;
    tiles->count = count;
  }

  TWINOP_INLINE static void WriteResults(const ContiguousRows<T>& rows, std::int64_t row,
                                         const OneFunctor<F>& functors, const Tiles<T, S>& whole,
                                         const Tiles<T, S>& tail, const Buffers& buffers) {
    const std::int64_t rest = rows.columns % kLanes;
    for (int part = 0; part < (rest > 0 ? 2 : 1); ++part)
      Loops::Result(functors, part == 0 ? whole : tail);
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
