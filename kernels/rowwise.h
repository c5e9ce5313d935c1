// The row-wise skeleton: an op is a functor over compute types that says what is summed over a row
// and what each element becomes. The skeleton reads each row once and keeps it on the chip.
//
//   template <class T>
//   struct RmsNorm : rowwise::Defaults {
//     static constexpr auto kRows = Names("x");             // inputs that are rows
//     static constexpr auto kColumns = Names("weight");     // inputs with one value a column
//     using Phases = Reductions<kSquares>;                  // reductions, one after another
//
//     template <class Op>                                   // for attributes (record/arguments.h)
//     RmsNorm(const CallOf<Op>& call, const Rows& rows);
//     Values<T, 1> Term(Phase<0>, Values<T, 1>& x, const Values<T, 1>& weight) const;
//     void Finish(Phase<0>, const Values<T, 1>& total);
//     Values<T, 1> Result(const Values<T, 1>& x, const Values<T, 1>& weight) const;
//   };
//   TWINOP_ROWWISE(rms_norm, RmsNorm, Record("rms_norm(Tensor x, ...) -> Tensor").rows("-1")...)
//
// The values of an element have the order of kRows and kColumns. The record's `rows` says what a
// row of the first of kRows is. The op's first outputs are the results, and the others are column
// sums.
//
// Each row has its own copy of the functor. Finish keeps in its members what later phases need (a
// mean, a maximum). Term may replace the row's values (softmax stores the exponentials there). If a
// row is too wide to hold, the skeleton computes them again.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string_view>
#include <type_traits>
#include <utility>

#include "twinop/math/math.h"
#include "twinop/math/numeric.h"
#include "twinop/record/registry.h"
#include "twinop/rowwise/choices.h"

namespace twinop::rowwise {

// ---------------------------------------------------------------------------------- a functor

// The values of one element: one for each row input, column input, or result.
template <class T, int N>
struct Values {
  T values[N > 0 ? N : 1];

  TWINOP_INLINE T& operator[](int i) { return values[i]; }
  TWINOP_INLINE const T& operator[](int i) const { return values[i]; }
};

// Terms that are products. Each is added to its sum with one rounding.
template <class T, int N>
struct Products {
  Values<T, N> first, second;
};

// Adds the t-th term to its sum.
template <class T, int N>
TWINOP_INLINE T WithTerm(T sum, const Values<T, N>& terms, int t) {
  return sum + terms[t];
}
template <class T, int N>
TWINOP_INLINE T WithTerm(T sum, const Products<T, N>& terms, int t) {
  return Fma(terms.first[t], terms.second[t], sum);
}

// A value as a tensor of S stores it.
template <class S, class T>
TWINOP_INLINE T Rounded(T value) {
  S stored;
  Round(value, &stored);
  return ToCompute(stored);
}

enum class Reduction { kSum, kSquares, kMax };  // kSquares: the sum of the terms' squares
inline constexpr Reduction kSum = Reduction::kSum;
inline constexpr Reduction kSquares = Reduction::kSquares;
inline constexpr Reduction kMax = Reduction::kMax;

// Names of an op's inputs.
template <class... Texts>
constexpr std::array<std::string_view, sizeof...(Texts)> Names(Texts... texts) {
  return {std::string_view(texts)...};
}

template <Reduction... R>
struct Reductions {
  static constexpr int kCount = sizeof...(R);
  static constexpr Reduction At(int i) {
    constexpr Reduction values[] = {R...};
    return values[i];
  }
};

template <int I>
using Phase = std::integral_constant<int, I>;

// The rows of a tensor.
struct Rows {
  std::int64_t count = 0;    // rows
  std::int64_t columns = 0;  // elements of a row
  std::int64_t inner = 1;    // distance of a row's neighbouring elements
};

// A row lies along a dimension (softmax) or is, `to_the_end`, all dimensions from it on (layer
// norm).
inline Rows RowsAt(const Tensor& x, std::int64_t axis, bool to_the_end) {
  const std::int64_t rank = static_cast<std::int64_t>(x.rank);
  if (axis < 0) axis += rank;
  Rows rows{1, 1, 1};
  for (std::int64_t i = 0; i < rank; ++i) {
    const bool is_in_row = i == axis || (i > axis && to_the_end);
    (is_in_row ? rows.columns : rows.count) *= x.sizes[i];
    if (i > axis && !to_the_end) rows.inner *= x.sizes[i];
  }
  return rows;
}

// The defaults that a functor inherits.
struct Defaults {
  // Inputs with one value a column.
  static constexpr auto kColumns = Names();
  // Whether they have values for each entry of the tensor's first dimension: [B, columns].
  static constexpr bool kColumnsOfBatch = false;
  // Whether the first input is a table, whose rows an input `ids` [B, S] of int32 or int64 chooses.
  // The second one then is [1 or B, S, columns].
  static constexpr bool kGathers = false;
  static constexpr int kRowOutputs = 1;  // the op's first outputs
  // Sums over all rows, one a column: the op's last outputs (grad_weight, grad_bias).
  static constexpr int kColumnReductions = 0;
  // How many of the last of kRows only Result uses, the epilogue. They are read there and not held
  // through the reductions.
  static constexpr int kEpilogueInputs = 0;
  // Whether Term replaces the row's values by values that are expensive to compute again. (The CPU
  // reads other rows again instead of holding them.)
  static constexpr bool kReplacesValues = false;
  // Whether the phases are the sum of a value and the sum of squares of its deviations from the
  // mean.
  static constexpr bool kMoments = false;

  // Whether models have rows of all widths: of less than a warp's vectors, of a vocabulary, and of
  // an odd number of elements (softmax). CUDA kernels for these are compiled for such an op only.
  static constexpr bool kAnyWidth = false;

  // If all later steps use one value computed from an element's row inputs, and that value is an
  // output too (a residual sum): the output's index. FusedSum(row) computes the value. Rounded as
  // in the output, it then replaces the first of the row's values.
  static constexpr int kFusedSumOutput = -1;

  // Whether the first result is also written in 8 bits, with a scale a row (rowwise/quantised.h).
  static constexpr bool kQuantises = false;
  // Whether the two row inputs are the halves of the rows of one tensor.
  static constexpr bool kHalves = false;

  // The value of an absent column input. (An absent row input is zero.)
  TWINOP_INLINE static float ColumnDefault(int) { return 0; }
};

template <class F>
inline constexpr int kRowInputs = static_cast<int>(F::kRows.size());
template <class F>
inline constexpr int kEarlyInputs = kRowInputs<F> - F::kEpilogueInputs;
template <class F>
inline constexpr int kColumnInputs = static_cast<int>(F::kColumns.size());
template <class F>
inline constexpr int kPhases = F::Phases::kCount;

// The sums of a phase.
template <class T, int N>
Values<T, N> SumsOf(const Values<T, N>&);
template <class T, int N>
Values<T, N> SumsOf(const Products<T, N>&);
template <class F, class T, int kPhase>
using Terms = decltype(SumsOf(std::declval<F>().Term(Phase<kPhase>{},
                                                     std::declval<Values<T, kRowInputs<F>>&>(),
                                                     std::declval<Values<T, kColumnInputs<F>>>())));

// Turns an element's values, of which a sum may be left, into those that kPhase gets.
template <int kPhase, class F, class T, int kRow, int kColumn>
TWINOP_INLINE void ReplayPhases(const F& functor, Values<T, kRow>& row,
                                const Values<T, kColumn>& column) {
  if constexpr (kPhase > 0) {
    ReplayPhases<kPhase - 1>(functor, row, column);
    static_cast<void>(functor.Term(Phase<kPhase - 1>{}, row, column));
  }
}

// Turns values that were just read into those that kPhase gets.
template <int kPhase, class S, class F, class T, int kRow, int kColumn>
TWINOP_INLINE void Replay(const F& functor, Values<T, kRow>& row,
                          const Values<T, kColumn>& column) {
  if constexpr (F::kFusedSumOutput >= 0) row[0] = Rounded<S>(functor.FusedSum(row));
  ReplayPhases<kPhase>(functor, row, column);
}

// ---------------------------------------------------------------------------------- scratch memory

// Sums over all rows are computed from partial sums, in an order that depends on the shape only.
//
// The scratch memory holds the functors of rows that are too wide to sum in one pass,
// kMaxFunctorBytes each. After them it holds the partial sums, two of at most 8 bytes a column: at
// most kPartials of them, and fewer if there are many columns.
inline constexpr int kPartials = 528;
inline constexpr std::int64_t kMaxFunctorBytes = 64;
constexpr std::int64_t FunctorsBytes(std::int64_t rows, std::int64_t columns,
                                     std::int64_t element_bytes) {
  const bool one_pass = columns * element_bytes <= kOnePassBytes && element_bytes < 8;
  return one_pass ? 0 : kMaxFunctorBytes * rows;
}
constexpr std::int64_t ColumnSumsBytes(std::int64_t rows, std::int64_t columns,
                                       std::int64_t element_bytes) {
  constexpr std::int64_t kPartialBytes = 2 * 8;
  constexpr std::int64_t kFewestPartials = 128;
  constexpr std::int64_t kManyColumns = std::int64_t{18} << 20;
  return FunctorsBytes(rows, columns, element_bytes) +
         std::min(kPartials * kPartialBytes * columns,
                  kManyColumns + kFewestPartials * kPartialBytes * columns);
}
// ---------------------------------------------------------------------------------- a call

// The number of elements between the starts of two rows. The leading dimensions collapse to one
// stride, as the record's `rows` asks of the adapters.
inline std::int64_t RowStride(const Tensor& tensor, const Rows& rows) {
  if (tensor.strides == nullptr || rows.inner != 1) return rows.columns;
  std::int64_t behind = 1;  // elements of the dimensions after i
  for (std::size_t i = tensor.rank; i-- > 0; behind *= tensor.sizes[i])
    if (behind >= rows.columns && tensor.sizes[i] > 1) return tensor.strides[i];
  return rows.columns;
}

// The indices of the op's inputs with these names, and one more entry.
template <class Op, std::size_t kCount>
constexpr std::array<int, kCount + 1> Indices(const std::array<std::string_view, kCount>& names) {
  std::array<int, kCount + 1> indices{};
  int* index = indices.data();
  for (std::string_view name : names) *index++ = Op::kRecord.FindInput(name);
  return indices;
}
template <class F, class Op>
inline constexpr auto kRowIndices = Indices<Op>(F::kRows);
template <class F, class Op>
inline constexpr auto kColumnIndices = Indices<Op>(F::kColumns);

// The rows of the functor's first row input, as the record's `rows` says.
template <class F, class Op>
Rows RowsOf(const CallOf<Op>& call) {
  const Tensor& first = call.inputs[kRowIndices<F, Op>[0]];
  if constexpr (F::kGathers) return {InputOf(call, "ids"_name).numel, first.sizes[1], 1};
  Rows rows = RowsAt(first, Op::kRecord.RowDimension(call.attributes), Op::kRecord.rows.to_the_end);
  if constexpr (F::kHalves) rows.columns /= 2;
  return rows;
}

// Makes the functor of a call, from the call and its rows if the functor has such a constructor.
template <class F, class Op>
F MakeFunctor(const CallOf<Op>& call, const Rows& rows) {
  if constexpr (std::is_constructible_v<F, const CallOf<Op>&, const Rows&>) {
    return F(call, rows);
  } else {
    static_assert(std::is_default_constructible_v<F>,
                  "a row-wise functor has a constructor (const CallOf<Op>& call, const Rows& "
                  "rows), or none");
    return F{};
  }
}

// Runs a functor on the device that this compiler builds for.
template <template <class> class F, class Op>
Status Run(const CallOf<Op>& call);

}  // namespace twinop::rowwise

#include "twinop/rowwise/arguments.h"
#if defined(__CUDACC__)
#include "twinop/rowwise/cuda.cuh"
#else
#include "twinop/rowwise/cpu.h"
#endif

#include "twinop/rowwise/check_functor.h"

namespace twinop::rowwise {

// ---------------------------------------------------------------------------------- an op

// Checks a functor against the op's record, and runs it.
template <template <class> class F, class Op>
Status Launcher(const CallOf<Op>& call) {
  if constexpr (CheckFunctor<F<double>, double, Op>()) {
#if !defined(__CUDACC__)
    if constexpr (Op::kIsOnCuda) static_cast<void>(&CompileReduced<F<ApproxFloat>, Op>);
#endif
    return Run<F>(call);
  }
}

// The scratch memory of the column sums, on either device.
template <class F, class Op>
std::int64_t ScratchBytes(const CallOf<Op>& call) {
  const Rows rows = RowsOf<F>(call);
  const DType dtype = call.inputs[kRowIndices<F, Op>[0]].dtype;
  return ColumnSumsBytes(rows.count, rows.columns, static_cast<std::int64_t>(Info(dtype).size));
}

template <class F, class Op>
constexpr Record RecordOf(const Record& record) {
  if constexpr (F::kColumnReductions > 0) {
    return record.template scratch<ScratchBytes<F, Op>>();
  } else {
    return record;
  }
}

}  // namespace twinop::rowwise

// TWINOP_ROWWISE(id, Functor, record), in namespace twinop, registers a row-wise op.
#define TWINOP_ROWWISE(id, Functor, ...) \
  TWINOP_OP(id, (rowwise::RecordOf<Functor<double>, Op>(__VA_ARGS__)), rowwise::Launcher<Functor>)
