// Layer norm as a row-wise functor, which several ops share.
#pragma once

#include "twinop/math/math.h"
#include "twinop/rowwise.h"

namespace twinop {

// y = (x - mean) / sqrt(variance + eps) * weight + bias over `axis` and all dimensions behind it
// (Ba et al. 2016; ONNX LayerNormalization). The first phase computes the mean, and the second the
// mean square of the deviations, which does not cancel even with mean 1e4 and standard deviation 1.
// The skeleton may compute both at once where that does not cancel either.
template <class T>
struct LayerNorm : rowwise::Defaults {
  static constexpr auto kRows = rowwise::Names("x");
  static constexpr auto kColumns = rowwise::Names("weight", "bias");
  using Phases = rowwise::Reductions<rowwise::kSum, rowwise::kSquares>;
  static constexpr bool kMoments = true;
  using One = rowwise::Values<T, 1>;
  using Columns = rowwise::Values<T, 2>;

  T count, inverse_count, eps, mean, rstd;

  template <class Op>
  LayerNorm(const CallOf<Op>& call, const rowwise::Rows& rows)
      : count(T(rows.columns)),
        inverse_count(T(1) / count),
        eps(T(AttributeOf<float>(call, "eps"_name))) {}
  TWINOP_INLINE T ColumnDefault(int column) const { return column == 0 ? T(1) : T(0); }

  TWINOP_INLINE One Term(rowwise::Phase<0>, One& x, const Columns&) const { return x; }
  TWINOP_INLINE void Finish(rowwise::Phase<0>, const One& total) {
    mean = Quotient(total[0], count, inverse_count);
  }
  TWINOP_INLINE One Term(rowwise::Phase<1>, One& x, const Columns&) const {
    x[0] = x[0] - mean;
    return x;
  }
  TWINOP_INLINE void Finish(rowwise::Phase<1>, const One& total) {
    rstd = Rsqrt(Quotient(total[0], count, inverse_count) + eps);
  }
  TWINOP_INLINE One Result(const One& centred, const Columns& column) const {
    return {Fma(centred[0] * rstd, column[0], column[1])};
  }
};

// sum = x + residual, rounded to the tensors' type, and y = layer_norm(sum). The results are those
// of the two ops one after the other.
template <class T>
struct AddLayerNorm : rowwise::Defaults {
  static constexpr auto kRows = rowwise::Names("x", "residual");
  static constexpr auto kColumns = rowwise::Names("weight", "bias");
  using Phases = typename LayerNorm<T>::Phases;
  static constexpr bool kMoments = true;
  static constexpr int kRowOutputs = 2;
  static constexpr int kFusedSumOutput = 1;
  using One = rowwise::Values<T, 1>;
  using Row = rowwise::Values<T, 2>;
  using Columns = rowwise::Values<T, 2>;

  LayerNorm<T> norm;

  template <class Op>
  AddLayerNorm(const CallOf<Op>& call, const rowwise::Rows& rows) : norm(call, rows) {}
  TWINOP_INLINE T ColumnDefault(int column) const { return norm.ColumnDefault(column); }

  TWINOP_INLINE static T FusedSum(const Row& row) { return row[0] + row[1]; }
  template <class P>
  TWINOP_INLINE One Term(P phase, Row& row, const Columns& column) const {
    One sum{row[0]};
    return norm.Term(phase, sum, column);
  }
  template <class P>
  TWINOP_INLINE void Finish(P phase, const One& total) {
    norm.Finish(phase, total);
  }
  TWINOP_INLINE Row Result(const Row& row, const Columns& column) const {
    return {norm.Result({row[0] - norm.mean}, column)[0], row[0]};
  }
};

}  // namespace twinop
