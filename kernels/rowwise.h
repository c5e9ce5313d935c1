// The row-wise skeleton: an op is a functor over compute types that says what is summed over a row
// and what becomes of each element. The skeleton reads each row once and holds it.
//
//   template <class T>
//   struct RmsNorm : rowwise::Op<1, 1> {          // one row in (x), one row out (y)
//     using RowInputs = Indices<0>;               // the op's inputs that are rows: x
//     using ColumnInputs = Indices<1>;            // those with one value a column: weight
//     using Phases = Reductions<kSum>;            // what is reduced, one after another
//     ... a constructor (const Attribute*, const Rows&), and
//     Values<T, 1> Term(Phase<0>, Values<T, 1>& x, const Values<T, 1>& weight) const
//     void Finish(Phase<0>, const Values<T, 1>& total)
//     Values<T, 1> Result(const Values<T, 1>& x, const Values<T, 1>& weight) const
//   };
//
// A functor is copied for each row: Finish keeps what the later phases need (a mean, a maximum) in
// its members. Term may replace the row's values (softmax puts the exponentials there); where a row
// is too wide to hold, the skeleton computes them again.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include "kernels/math/math.h"
#include "kernels/math/numeric.h"
#include "kernels/record/registry.h"

namespace twinop::rowwise {

// ---------------------------------------------------------------------------------- a functor

// The values of one element: of each row input, each column input, each result.
template <class T, int N>
struct Values {
  T values[N > 0 ? N : 1];

  TWINOP_INLINE T& operator[](int i) { return values[i]; }
  TWINOP_INLINE const T& operator[](int i) const { return values[i]; }
};

// Terms that are products, each added to its sum with one rounding.
template <class T, int N>
struct Products {
  Values<T, N> first, second;
};

// The t-th sum with the t-th of the terms added.
template <class T, int N>
TWINOP_INLINE T WithTerm(T sum, const Values<T, N>& terms, int t) {
  return sum + terms[t];
}
template <class T, int N>
TWINOP_INLINE T WithTerm(T sum, const Products<T, N>& terms, int t) {
  return Fma(terms.first[t], terms.second[t], sum);
}

// A value as it will be read again from a tensor of S.
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

template <int... I>
struct Indices {
  static constexpr int kCount = sizeof...(I);
  static constexpr int At(int i) {
    constexpr int values[] = {I..., 0};
    return values[i];
  }
};

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

// How the op's first row input is cut into rows.
struct Rows {
  std::int64_t count = 0;    // rows
  std::int64_t columns = 0;  // elements of a row
  std::int64_t inner = 1;    // rows that lie side by side: a row's neighbours are `inner` apart
};

// One row is everything behind `axis` (layer norm).
inline Rows RowsBehind(const Tensor& x, std::int64_t axis) {
  const std::int64_t rank = static_cast<std::int64_t>(x.rank);
  if (axis < 0) axis += rank;
  Rows rows{1, 1, 1};
  for (std::int64_t i = 0; i < rank; ++i) (i < axis ? rows.count : rows.columns) *= x.sizes[i];
  return rows;
}

// One row goes along `dim` (softmax).
inline Rows RowsAlong(const Tensor& x, std::int64_t dim) {
  const std::int64_t rank = static_cast<std::int64_t>(x.rank);
  if (dim < 0) dim += rank;
  Rows rows{1, 1, 1};
  for (std::int64_t i = 0; i < rank; ++i) {
    if (i == dim) rows.columns = x.sizes[i];
    if (i > dim) rows.inner *= x.sizes[i];
    if (i != dim) rows.count *= x.sizes[i];
  }
  return rows;
}

// What a functor inherits, and may say otherwise.
template <int kRowInputCount, int kRowOutputCount>
struct Op {
  static constexpr int kRowOutputs = kRowOutputCount;  // the op's first outputs
  // Sums over all rows, one a column: the op's outputs behind the rows (grad_weight, grad_bias).
  static constexpr int kColumnSums = 0;
  // The last row inputs that only Result looks at: read there, not held through the reductions.
  static constexpr int kLateInputs = 0;
  // Whether Term replaces the row's values by what is dear to compute again (on the CPU, where a
  // row of values as they lie in memory is read again, not held).
  static constexpr bool kReplacesValues = false;
  // Whether the phases are the sum of a term and the squares of what is left of it without its
  // mean.
  static constexpr bool kMoments = false;
  using ColumnInputs = Indices<>;

  // Where nothing is needed of a row but one value of each element, and that value is an output too
  // (a residual sum): that output. Prepared(row) is the value; as the output has it, rounded, it is
  // the first of the row's values from then on.
  static constexpr int kPreparedOutput = -1;

  // What an absent column input stands for. (An absent row input is zeros.)
  TWINOP_INLINE static float Neutral(int) { return 0; }
};

template <class F>
inline constexpr int kRowInputs = F::RowInputs::kCount;
template <class F>
inline constexpr int kEarlyInputs = kRowInputs<F> - F::kLateInputs;
template <class F>
inline constexpr int kColumnInputs = F::ColumnInputs::kCount;
template <class F>
inline constexpr int kPhases = F::Phases::kCount;

// What a phase's terms add up to.
template <class T, int N>
Values<T, N> SumsOf(const Values<T, N>&);
template <class T, int N>
Values<T, N> SumsOf(const Products<T, N>&);
template <class F, class T, int kPhase>
using Terms = decltype(SumsOf(std::declval<F>().Term(Phase<kPhase>{},
                                                     std::declval<Values<T, kRowInputs<F>>&>(),
                                                     std::declval<Values<T, kColumnInputs<F>>>())));

// A row's values as they are after the phases before kPhase, from the prepared values.
template <int kPhase, class F, class T, int kRow, int kColumn>
TWINOP_INLINE void ReplayPhases(const F& functor, Values<T, kRow>& row,
                                const Values<T, kColumn>& column) {
  if constexpr (kPhase > 0) {
    ReplayPhases<kPhase - 1>(functor, row, column);
    static_cast<void>(functor.Term(Phase<kPhase - 1>{}, row, column));
  }
}

// The same from the values just read.
template <int kPhase, class S, class F, class T, int kRow, int kColumn>
TWINOP_INLINE void Replay(const F& functor, Values<T, kRow>& row,
                          const Values<T, kColumn>& column) {
  if constexpr (F::kPreparedOutput >= 0) row[0] = Rounded<S>(functor.Prepared(row));
  ReplayPhases<kPhase>(functor, row, column);
}

// ---------------------------------------------------------------------------------- scratch memory

// Sums over all rows go through partial sums, in an order that the shape alone decides: kPartials
// of two sums a column at most, and fewer where there are many columns. Before them, 64 bytes a row
// for the functors of rows that are too wide to sum on the way.
inline constexpr int kPartials = 528;
inline constexpr std::int64_t kMaxFunctorBytes = 64;
#define TWINOP_COLUMN_SUMS_SCRATCH(x, axis)                         \
  "64 * numel(" x "[:" axis "]) + min(528 * 16 * numel(" x "[" axis \
  ":]), 18874368 + "                                                \
  "128 * 16 * numel(" x "[" axis ":]))"

// ---------------------------------------------------------------------------------- a call

// The tensors of a call: rows of S, one value a column of W.
template <class F, class S, class W>
struct Arguments {
  static constexpr int kInputs = kRowInputs<F>;
  static constexpr int kColumns = kColumnInputs<F>;

  const S* inputs[kInputs];        // null: absent
  std::int64_t strides[kInputs];   // elements from row to row
  const W* columns[kColumns + 1];  // null: absent
  S* outputs[F::kRowOutputs];      // dense; null: not wanted
  W* sums[F::kColumnSums + 1];     // null: not wanted
  Rows rows;
};

// Elements between the starts of two rows: the leading dimensions collapse to one stride (the
// record's .rows says so, the binding sees to it).
inline std::int64_t RowStride(const Tensor& tensor, const Rows& rows) {
  if (tensor.strides == nullptr || rows.inner != 1) return rows.columns;
  std::int64_t behind = 1;  // elements of a row seen so far, from the last dimension on
  for (std::size_t i = tensor.rank; i-- > 0; behind *= tensor.sizes[i])
    if (behind >= rows.columns && tensor.sizes[i] > 1) return tensor.strides[i];
  return rows.columns;
}

template <class F, class S, class W>
Arguments<F, S, W> MakeArguments(const Call& call, const Rows& rows) {
  Arguments<F, S, W> arguments{};
  arguments.rows = rows;
  for (int i = 0; i < kRowInputs<F>; ++i) {
    const Tensor& input = call.inputs[F::RowInputs::At(i)];
    arguments.inputs[i] = input.template as<const S>();
    arguments.strides[i] = input.data == nullptr ? 0 : RowStride(input, rows);
  }
  for (int i = 0; i < kColumnInputs<F>; ++i)
    arguments.columns[i] = call.inputs[F::ColumnInputs::At(i)].template as<const W>();
  for (int i = 0; i < F::kRowOutputs; ++i) arguments.outputs[i] = call.outputs[i].template as<S>();
  for (int i = 0; i < F::kColumnSums; ++i) {
    const Tensor& sum = call.outputs[F::kRowOutputs + i];
    arguments.sums[i] = sum.numel == 0 ? nullptr : sum.template as<W>();
  }
  return arguments;
}

// Calls body(functor, Arguments) for the call's types: rows of one type, column inputs of the same
// or, for 16-bit rows, of float32.
template <template <class> class F, class Body>
[[gnu::always_inline]] inline Status DispatchRows(const Call& call, Body&& body) {
  return DispatchFloat(call.outputs[0].dtype, [&](auto tag) {
    using S = typename decltype(tag)::Type;
    using Functor = F<ElementCompute<S>>;
    const Rows rows = Functor::RowsOf(call);
    const Functor functor(call.attributes, rows);
    if constexpr (sizeof(S) == 2 && kColumnInputs<Functor> > 0) {
      for (int i = 0; i < kColumnInputs<Functor>; ++i) {
        const Tensor& column = call.inputs[Functor::ColumnInputs::At(i)];
        if (column.present && column.dtype == DType::kFloat32)
          return body(functor, MakeArguments<Functor, S, float>(call, rows));
      }
      // A backward op's weight may be absent where its bias, of which only the gradient matters, is
      // not.
      for (int i = 0; i < Functor::kColumnSums; ++i)
        if (call.outputs[Functor::kRowOutputs + i].dtype == DType::kFloat32)
          return body(functor, MakeArguments<Functor, S, float>(call, rows));
    }
    return body(functor, MakeArguments<Functor, S, S>(call, rows));
  });
}

}  // namespace twinop::rowwise

#if defined(__CUDACC__)
#include "kernels/rowwise/cuda.cuh"
#else
#include "kernels/rowwise/cpu.h"
#endif
