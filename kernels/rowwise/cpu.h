// Row-wise ops on the CPU. What an op adds to a library is its arithmetic over tiles, of kLanes
// values of fp32 or fp64, for each instruction set. All ops share the other code (cpu.cpp,
// cpu_row.h): storage types, memory layouts, sums of columns, the framework's threads.
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

// Consecutive tiles of all operands.
template <class T>
struct Tiles {
  Operand<const T> inputs[kMaxOperands];
  Operand<const T> columns[kMaxOperands];
  Operand<T> outputs[kMaxOperands];
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

// What the shared code knows of an op.
struct RowOp {
  int inputs, early_inputs, columns, outputs, sums, phases, prepared_output;
  bool stores_values;  // the last phase stores the row's values, and kResult reads them
  std::size_t functor_size;
  Reduction reductions[kMaxPhases];
  int terms[kMaxPhases];
  int row_inputs[kMaxOperands], column_inputs[kMaxOperands];  // their places among the op's inputs
};

// Runs an op. `defaults`: what an absent column input stands for.
template <class T>
Status RunRows(const Call& call, const RowOp& op, const ByLevel<StepFunction<T>>& step,
               const Rows& rows, const void* functor, const T* defaults);
extern template Status RunRows(const Call&, const RowOp&, const ByLevel<StepFunction<float>>&,
                               const Rows&, const void*, const float*);
extern template Status RunRows(const Call&, const RowOp&, const ByLevel<StepFunction<double>>&,
                               const Rows&, const void*, const double*);

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

// Adds up the lanes, in pairs.
template <Reduction kOp, std::int64_t kHalf = kLanes / 2, class T>
TWINOP_INLINE T Fold(T* lanes) {
  for (std::int64_t i = 0; i < kHalf; ++i) {
    const T a = lanes[i], b = lanes[i + kHalf];
    lanes[i] = kOp == kMax ? (b > a ? b : a) : a + b;
  }
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

// The steps of functor F in the compute type T.
template <class F, class T>
struct RowSteps {
  static constexpr int kInputs = kRowInputs<F>;
  static constexpr int kColumns = kColumnInputs<F>;
  // The rows of an op with column inputs or column sums are never interleaved.
  static constexpr bool kMayInterleave = kColumns == 0 && F::kColumnSums == 0;
  using Row = Values<T, kInputs>;
  using Column = Values<T, kColumns>;
  using AllPhases = std::make_integer_sequence<int, kPhases<F>>;
  template <int kPhase>
  static constexpr int kTerms = sizeof(Terms<F, T, kPhase>) / sizeof(T);

  static_assert(std::is_trivially_copyable_v<F> && sizeof(F) <= kMaxFunctorBytes);
  static_assert(kInputs <= kMaxOperands && kColumns <= kMaxOperands);
  static_assert(F::kRowOutputs <= kMaxOperands && F::kColumnSums <= kMaxOperands);
  static_assert(kPhases<F> <= kMaxPhases);

  template <Level kLevel>
  TWINOP_INLINE static void Run(Step step, int phase, bool lanes_are_rows, void* functors,
                                const Tiles<T>* tiles, T* totals) {
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
      ((phase == P ? Finish<P, Functors>(functor, tiles, totals) : void()), ...);
      return;
    }
    const Functors functors(functor);
    if (step == Step::kReduce) {
      ((phase == P ? Reduce<P>(functors, tiles, totals) : void()), ...);
    } else if (step == Step::kResult) {
      Result(functors, tiles);
    } else if constexpr (F::kPreparedOutput >= 0) {
      Prepare(functors, tiles);
    }
  }

  template <int kPhase, class Functors>
  TWINOP_INLINE static void Finish(F* functors, const Tiles<T>& tiles, T* totals) {
    Terms<F, T, kPhase> total;
    if constexpr (std::is_same_v<Functors, OneFunctor<F>>) {
      for (int t = 0; t < kTerms<kPhase>; ++t)
        total[t] = Fold<F::Phases::At(kPhase)>(totals + t * kLanes);
      functors->Finish(Phase<kPhase>{}, total);
    } else {
      for (std::int64_t i = 0; i < tiles.lanes; ++i) {
        for (int t = 0; t < kTerms<kPhase>; ++t) total[t] = totals[t * kLanes + i];
        functors[i].Finish(Phase<kPhase>{}, total);
      }
    }
  }

  // Operands of one tile.
  template <class U, int kCount>
  struct Tile {
    U* data[kCount > 0 ? kCount : 1];

    TWINOP_INLINE Tile(const Operand<U> (&operands)[kMaxOperands], std::int64_t tile) {
      for (int k = 0; k < kCount; ++k) data[k] = operands[k].data + tile * operands[k].step;
    }
    TWINOP_INLINE U* operator[](int k) const { return data[k]; }
  };
  using InputTile = Tile<const T, kInputs>;
  using ColumnTile = Tile<const T, kColumns>;

  TWINOP_INLINE static std::int64_t Lanes(const OneFunctor<F>&, const Tiles<T>&) { return kLanes; }
  TWINOP_INLINE static std::int64_t Lanes(const FunctorPerLane<F>&, const Tiles<T>& tiles) {
    return tiles.lanes;
  }

  template <int... J>
  TWINOP_INLINE static Column ColumnAt([[maybe_unused]] const ColumnTile& columns,
                                       [[maybe_unused]] std::int64_t i,
                                       std::integer_sequence<int, J...>) {
    return {{columns[J][i]...}};
  }
  TWINOP_INLINE static Column ColumnAt(const ColumnTile& columns, std::int64_t i) {
    return ColumnAt(columns, i, std::make_integer_sequence<int, kColumns>{});
  }

  // The row's values as the phases before kPhase leave them. Only Result sees late inputs.
  template <int kPhase, int... J>
  TWINOP_INLINE static Row RowAt(const F& functor, const InputTile& in, const Column& column,
                                 std::int64_t i, std::integer_sequence<int, J...>) {
    constexpr bool kIsResult = kPhase == kPhases<F>;
    Row row{{(J < kEarlyInputs<F> || kIsResult ? in[J][i] : T(0))...}};
    if constexpr (!(F::kReplacesValues && kIsResult)) ReplayPhases<kPhase>(functor, row, column);
    return row;
  }
  template <int kPhase>
  TWINOP_INLINE static Row RowAt(const F& functor, const InputTile& in, const Column& column,
                                 std::int64_t i) {
    return RowAt<kPhase>(functor, in, column, i, std::make_integer_sequence<int, kInputs>{});
  }

  template <class Functors>
  TWINOP_INLINE static void Prepare(const Functors& functors, const Tiles<T>& tiles) {
    const std::int64_t lanes = Lanes(functors, tiles);
    for (std::int64_t tile = 0; tile < tiles.count; ++tile) {
      const InputTile in(tiles.inputs, tile);
      T* const prepared = tiles.stored[0].data + tile * tiles.stored[0].step;
#pragma GCC ivdep
      for (std::int64_t i = 0; i < lanes; ++i)
        prepared[i] = functors[i].Prepared(RowAt<0>(functors[i], in, Column{}, i));
    }
  }

  template <int kPhase, class Functors>
  TWINOP_INLINE static void Reduce(const Functors& functors, const Tiles<T>& tiles, T* totals) {
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
        const Column column = ColumnAt(columns, i);
        Row row = RowAt<kPhase>(functors[i], in, column, i);
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

  template <class Functors>
  TWINOP_INLINE static void Result(const Functors& functors, const Tiles<T>& tiles) {
    const std::int64_t lanes = Lanes(functors, tiles);
    for (std::int64_t tile = 0; tile < tiles.count; ++tile) {
      const InputTile in(tiles.inputs, tile);
      const ColumnTile columns(tiles.columns, tile);
      const Tile<T, F::kRowOutputs> out(tiles.outputs, tile);
      [[maybe_unused]] const Tile<T, F::kColumnSums> sums(tiles.sums, tile);
#pragma GCC ivdep
      for (std::int64_t i = 0; i < lanes; ++i) {
        const Column column = ColumnAt(columns, i);
        const Row row = RowAt<kPhases<F>>(functors[i], in, column, i);
        const auto result = functors[i].Result(row, column);
        if constexpr (F::kColumnSums > 0) {
          const auto terms = functors[i].ColumnTerm(row);
          for (int s = 0; s < F::kColumnSums; ++s) sums[s][i] = WithTerm(sums[s][i], terms, s);
        }
        for (int k = 0; k < F::kRowOutputs; ++k) out[k][i] = result[k];
      }
      asm volatile("");
    }
  }

 public:
  template <int... P>
  static constexpr RowOp Describe(std::integer_sequence<int, P...>) {
    return {kInputs,
             kEarlyInputs<F>,
             kColumns,
             F::kRowOutputs,
             F::kColumnSums,
             kPhases<F>,
             F::kPreparedOutput,
             F::kReplacesValues,
             sizeof(F),
             {F::Phases::At(P)...},
             {kTerms<P>...},
             {},
             {}};
  }
  // Everything but the places of the inputs, which the op's schema knows.
  static constexpr RowOp kShape = Describe(AllPhases{});
};

template <class F, class T, class Op>
Status RunFunctor(const CallOf<Op>& call) {
  constexpr RowOp kOp = [] {
    RowOp op = RowSteps<F, T>::kShape;
    for (int j = 0; j < kRowInputs<F>; ++j) op.row_inputs[j] = kRowIndices<F, Op>[j];
    for (int j = 0; j < kColumnInputs<F>; ++j) op.column_inputs[j] = kColumnIndices<F, Op>[j];
    return op;
  }();
  const Rows rows = RowsOf<F>(call);
  const F functor = MakeFunctor<F>(call, rows);
  T defaults[kMaxOperands] = {};
  for (int j = 0; j < kColumnInputs<F>; ++j) defaults[j] = functor.Neutral(j);
  return RunRows<T>(call, kOp, kByLevel<RowSteps<F, T>, StepFunction<T>>, rows, &functor, defaults);
}

// The CPU launcher of functor F.
template <template <class> class F, class Op>
Status Cpu(const CallOf<Op>& call) {
  if (call.outputs[0].dtype == DType::kFloat64) return RunFunctor<F<double>, double>(call);
  return RunFunctor<F<float>, float>(call);
}

}  // namespace twinop::rowwise
