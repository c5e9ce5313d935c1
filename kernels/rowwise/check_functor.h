// The limits of the row-wise skeleton, as compile errors in words.
#pragma once

#include <algorithm>
#include <array>
#include <type_traits>
#include <utility>

#include "twinop/rowwise.h"

namespace twinop::rowwise {

template <class F, class T, int kPhase, class = void>
inline constexpr bool kHasPhase = false;
template <class F, class T, int kPhase>
inline constexpr bool kHasPhase<
    F, T, kPhase,
    std::void_t<Terms<F, T, kPhase>, decltype(std::declval<F&>().Finish(
                                         Phase<kPhase>{}, std::declval<Terms<F, T, kPhase>>()))>> =
    true;

template <class F, class T, class = void>
inline constexpr bool kHasResult = false;
template <class F, class T>
inline constexpr bool
    kHasResult<F, T,
               std::void_t<decltype(std::declval<const F&>().Result(
                   std::declval<const Values<T, kRowInputs<F>>&>(),
                   std::declval<const Values<T, kColumnInputs<F>>&>())[F::kRowOutputs - 1])>> =
        true;

template <std::size_t kCount>
constexpr bool AllFound(const std::array<int, kCount>& indices) {
  for (int index : indices)
    if (index < 0) return false;
  return true;
}

// Whether the rows and the results have one dtype that the skeleton has kernels for.
template <class F, class Op>
constexpr bool HaveOneType() {
  for (std::size_t i = 0; i < Op::kRecord.combination_count; ++i) {
    const DType type = Op::kRecord.output_types[i][0];
    if (type == DType::kFloat64 ? false : !IsStorage(type) || Info(type).size == 1) return false;
    for (int k = 0; k < kRowInputs<F>; ++k)
      if (Op::kRecord.input_types[i][kRowIndices<F, Op>[k]] != type) return false;
    for (int k = 0; k < F::kRowOutputs; ++k)
      if (Op::kRecord.output_types[i][k] != type) return false;
  }
  return true;
}

// Whether the rows that each call reads are no optional inputs.
template <class F, class Op>
constexpr bool AllGiven() {
  for (int k = 0; k < kRowInputs<F> - F::kEpilogueInputs; ++k)
    if (Op::kRecord.input(kRowIndices<F, Op>[k]).kind == Kind::kOptionalTensor) return false;
  return true;
}

// Checks a functor against its op's record and against the limits of the skeleton. The compiler's
// message names the functor and the op.
template <class F, class T, class Op>
constexpr bool CheckFunctor() {
  constexpr const OpSpec& kRecord = Op::kRecord;
  constexpr bool kSums = F::kColumnReductions > 0;
  static_assert(kRowInputs<F> > 0, "kRows names at least one input");
  static_assert(AllFound(kRowIndices<F, Op>), "kRows names an input that the schema does not have");
  static_assert(AllFound(kColumnIndices<F, Op>),
                "kColumns names an input that the schema does not have");
  static_assert(
      F::kRowOutputs + F::kColumnReductions == static_cast<int>(kRecord.output_count),
      "kRowOutputs and kColumnReductions together are the number of the schema's outputs");
  if constexpr (AllFound(kRowIndices<F, Op>)) {
    static_assert(AllGiven<F, Op>(), "rows are read in each call, so none is a Tensor?");
    static_assert(HaveOneType<F, Op>(),
                  "the rows and the results of a row-wise op have one dtype, float32, float16, "
                  "bfloat16 or float64. Write other dtypes in an op after it, which may be "
                  "elementwise, or in a launcher of your own");
  }
  static_assert(kRecord.rows.given, "the record of a row-wise op has .rows(...)");
  static_assert(kPhases<F> == 1 || kPhases<F> == 2, "Phases are one or two reductions");
  static_assert(kHasPhase<F, T, 0> && kHasPhase<F, T, kPhases<F> - 1>,
                "each phase has `Values<T, N> Term(Phase<i>, Values<T, rows>&, const Values<T, "
                "columns>&) const` and `void Finish(Phase<i>, const Values<T, N>& total)`");
  static_assert(kHasResult<F, T>,
                "`Values<T, kRowOutputs> Result(const Values<T, rows>&, const Values<T, columns>&) "
                "const` is missing");
  static_assert(!kSums || F::kColumnReductions == 2, "there are two column sums, or none");
  static_assert(!(F::kColumnsOfBatch && kSums), "column inputs of a batch have no column sums");
  static_assert(sizeof(F) <= kMaxFunctorBytes, "a row-wise functor has at most 64 bytes");
  static_assert(F::kEpilogueInputs == 0 || F::kEpilogueInputs == 1, "kEpilogueInputs is 0 or 1");
  static_assert(F::kFusedSumOutput < 0 || kRowInputs<F> == 2,
                "a functor with a fused sum has two row inputs");
  if constexpr (kHasPhase<F, T, 0> && kHasPhase<F, T, kPhases<F> - 1>) {
    constexpr std::size_t kTerms =
        std::max(sizeof(Terms<F, T, 0>), sizeof(Terms<F, T, kPhases<F> - 1>)) / sizeof(T);
    static_assert(kTerms <= 2, "a phase sums one or two terms");
    static_assert(kTerms == 1 || kColumnInputs<F> > 0 || kSums,
                  "a functor without column inputs sums one term in each phase");
  }
  // (The kernels for rows along an inner dimension have neither.)
  static_assert((kColumnInputs<F> == 0 && !kSums) || kRecord.rows.to_the_end ||
                    (kRecord.rows.attribute < 0 && kRecord.rows.value == -1),
                "an op with column inputs or column sums has .rows(\"axis:\") or .rows(\"-1\")");
  return true;
}

// Is compiled on the CPU, and never called (elementwise.h).
template <class F, class Op>
void CompileReduced(const CallOf<Op>& call, const Rows& rows) {
  using T = ApproxFloat;
  F functor = MakeFunctor<F>(call, rows);
  Values<T, kRowInputs<F>> row{};
  const Values<T, kColumnInputs<F>> column{};
  if constexpr (F::kFusedSumOutput >= 0) row[0] = functor.FusedSum(row);
  const auto reduce = [&](auto phase) {
    static_cast<void>(functor.Term(phase, row, column));
    functor.Finish(phase, Terms<F, T, decltype(phase)::value>{});
  };
  reduce(Phase<0>{});
  reduce(Phase<kPhases<F> - 1>{});
  if constexpr (F::kColumnReductions > 0) static_cast<void>(functor.ColumnTerm(row));
  static_cast<void>(functor.Result(row, column));
}

}  // namespace twinop::rowwise
