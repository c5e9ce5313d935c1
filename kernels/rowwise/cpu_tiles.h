// The arithmetic of row-wise ops on the CPU: loops over tiles, which the compiler vectorises for
// each instruction set.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

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

// The loops of functor F over the tiles from `begin` to `end`. kPrepares: the values are prepared
// here instead of before.
template <class F, class T, class S, bool kPrepares>
struct TileLoops {
  static constexpr int kInputs = kRowInputs<F>;
  static constexpr int kColumns = kColumnInputs<F>;
  using Row = Values<T, kInputs>;
  using Column = Values<T, kColumns>;
  template <int kPhase>
  static constexpr int kTerms = sizeof(Terms<F, T, kPhase>) / sizeof(T);

  template <class Functors>
  TWINOP_INLINE static void Prepare(const Functors& functors, const Tiles<T, S>& tiles,
                                    std::int64_t begin, std::int64_t end) {
    const std::int64_t lanes = Lanes(functors, tiles);
    for (std::int64_t tile = begin; tile < end; ++tile) {
      const InputTile in(tiles.inputs, tile);
      T* const prepared = tiles.stored[0].data + tile * tiles.stored[0].step;
#pragma GCC ivdep
      for (std::int64_t i = 0; i < lanes; ++i)
        prepared[i] = functors[i].Prepared(Read<false>(in, i, RowIndices{}));
    }
  }

  // Adds the terms of a phase to totals[kTerms][kLanes].
  template <int kPhase, class Functors>
  TWINOP_INLINE static void Reduce(const Functors& functors, const Tiles<T, S>& tiles,
                                   std::int64_t begin, std::int64_t end, T* totals) {
    constexpr Reduction kOp = F::Phases::At(kPhase);
    constexpr int kCount = kTerms<kPhase>;
    constexpr bool kStores = F::kReplacesValues && kPhase == kPhases<F> - 1;
    static_assert(kCount <= kMaxTerms);
    const std::int64_t lanes = Lanes(functors, tiles);
    alignas(64) T sums[kCount][kLanes];
    std::memcpy(sums, totals, sizeof(sums));
    for (std::int64_t tile = begin; tile < end; ++tile) {
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
  TWINOP_INLINE static void Result(const Functors& functors, const Tiles<T, S>& tiles,
                                   std::int64_t begin, std::int64_t end) {
    const std::int64_t lanes = Lanes(functors, tiles);
    for (std::int64_t tile = begin; tile < end; ++tile) {
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

}  // namespace twinop::rowwise
