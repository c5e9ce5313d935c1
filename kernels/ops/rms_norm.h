// rms_norm -> torch.ops.custom_domain.rms_norm, CustomRmsNorm; add_rms_norm and forms in 8 bits.
#pragma once

#include "twinop/math/math.h"
#include "twinop/rowwise.h"
#include "twinop/rowwise/norm.h"
#include "twinop/rowwise/quantised.h"

namespace twinop {

// y = x / sqrt(mean(x^2) + eps) * (offset + weight) over `axis` and all dimensions behind it (Zhang
// and Sennrich 2019). offset 0 is the convention of Llama, and 1 that of Gemma, which trains weight
// around zero.
template <class T>
struct RmsNorm : rowwise::Defaults {
  static constexpr auto kRows = rowwise::Names("x");
  static constexpr auto kColumns = rowwise::Names("weight");
  using Phases = rowwise::Reductions<rowwise::kSquares>;
  using One = rowwise::Values<T, 1>;

  T count, inverse_count, eps, offset, rstd;

  template <class Op>
  RmsNorm(const CallOf<Op>& call, const rowwise::Rows& rows)
      : count(T(rows.columns)),
        inverse_count(T(1) / count),
        eps(T(AttributeOf<float>(call, "eps"_name))),
        offset(T(AttributeOf<std::int64_t>(call, "offset"_name))) {}
  TWINOP_INLINE T ColumnDefault(int) const { return T(1) - offset; }

  TWINOP_INLINE One Term(rowwise::Phase<0>, One& x, const One&) const { return x; }
  TWINOP_INLINE void Finish(rowwise::Phase<0>, const One& total) {
    rstd = Rsqrt(Quotient(total[0], count, inverse_count) + eps);
  }
  TWINOP_INLINE One Result(const One& x, const One& weight) const {
    return {x[0] * rstd * (offset + weight[0])};
  }
};

// sum = x + residual, rounded to the tensors' type, and y = rms_norm(sum) + bias. Without bias, the
// results have the bits of the two ops one after the other.
template <class T>
struct AddRmsNorm : rowwise::Defaults {
  static constexpr auto kRows = rowwise::Names("x", "residual");
  static constexpr auto kColumns = rowwise::Names("weight", "bias");
  using Phases = typename RmsNorm<T>::Phases;
  static constexpr int kRowOutputs = 2;
  static constexpr int kFusedSumOutput = 1;
  using One = rowwise::Values<T, 1>;
  using Row = rowwise::Values<T, 2>;
  using Columns = rowwise::Values<T, 2>;

  RmsNorm<T> norm;

  template <class Op>
  AddRmsNorm(const CallOf<Op>& call, const rowwise::Rows& rows) : norm(call, rows) {}
  TWINOP_INLINE T ColumnDefault(int column) const {
    return column == 0 ? norm.ColumnDefault(0) : T(0);
  }

  TWINOP_INLINE static T FusedSum(const Row& row) { return row[0] + row[1]; }
  template <class P>
  TWINOP_INLINE One Term(P phase, Row& row, const Columns& column) const {
    One sum{row[0]};
    return norm.Term(phase, sum, One{column[0]});
  }
  template <class P>
  TWINOP_INLINE void Finish(P phase, const One& total) {
    norm.Finish(phase, total);
  }
  TWINOP_INLINE Row Result(const Row& row, const Columns& column) const {
    return {norm.Result({row[0]}, {column[0]})[0] + column[1], row[0]};
  }
};

// With xhat = x * rstd and g = dL/dy * (offset + weight):
//   dL/dx = rstd * (g - xhat * mean(g * xhat)) + grad_sum
//   dL/dweight = sum over rows of dL/dy * xhat,   dL/dbias = sum over rows of dL/dy
template <class T>
struct RmsNormBackward : rowwise::Defaults {
  static constexpr auto kRows = rowwise::Names("grad_y", "x", "grad_sum");
  static constexpr auto kColumns = rowwise::Names("weight");
  using Phases = rowwise::Reductions<rowwise::kSum>;
  static constexpr int kEpilogueInputs = 1;
  static constexpr int kColumnReductions = 2;  // grad_weight, grad_bias
  using One = rowwise::Values<T, 1>;
  using Two = rowwise::Values<T, 2>;
  using Products = rowwise::Products<T, 2>;
  using Row = rowwise::Values<T, 3>;

  T count, inverse_count, eps, offset, rstd, mean_g_xhat;

  template <class Op>
  RmsNormBackward(const CallOf<Op>& call, const rowwise::Rows& rows)
      : count(T(rows.columns)),
        inverse_count(T(1) / count),
        eps(T(AttributeOf<float>(call, "eps"_name))),
        offset(T(AttributeOf<std::int64_t>(call, "offset"_name))) {}
  TWINOP_INLINE T ColumnDefault(int) const { return T(1) - offset; }

  TWINOP_INLINE Products Term(rowwise::Phase<0>, Row& row, const One& weight) const {
    return {{row[1], row[0] * (offset + weight[0])}, {row[1], row[1]}};
  }
  TWINOP_INLINE void Finish(rowwise::Phase<0>, const Two& total) {
    rstd = Rsqrt(Quotient(total[0], count, inverse_count) + eps);
    mean_g_xhat = Quotient(total[1], count, inverse_count) * rstd;
  }
  TWINOP_INLINE One Result(const Row& row, const One& weight) const {
    const T g = row[0] * (offset + weight[0]);
    return {Fma(rstd, Fma(-(row[1] * rstd), mean_g_xhat, g), row[2])};
  }
  TWINOP_INLINE Products ColumnTerm(const Row& row) const {
    return {{row[0], row[0]}, {row[1] * rstd, T(1)}};
  }
};

// clang-format off
TWINOP_ROWWISE(rms_norm, RmsNorm,
          Record("rms_norm(Tensor x, Tensor? weight=None, int axis=-1, float eps=1e-6, int offset=0) -> Tensor")
              .dtypes("float32; float16; bfloat16; float64; float16 weight=float32; bfloat16 weight=float32")
              .rows("axis:")
              .input_shapes("weight = x[axis:]")
              .limits("axis of x; eps >= 0; offset in 0 | 1")
              .in_place("y = x")
              .gradient("x, weight, _ = rms_norm_backward(grad, x, weight, None, None, axis, eps, offset)"))

TWINOP_ROWWISE(add_rms_norm, AddRmsNorm,
          Record("add_rms_norm(Tensor x, Tensor residual, Tensor weight, Tensor? bias=None, float eps=1e-6, "
                 "int offset=0) -> (Tensor y, Tensor sum)")
              .dtypes(kNormDtypes)
              .rows("-1")
              .input_shapes("residual = x; weight = x[-1:]; bias = x[-1:]")
              .limits("eps >= 0; offset in 0 | 1")
              .in_place("y = x; sum = residual")
              .memory("sum = optional")
              .gradient("x, weight, bias = rms_norm_backward(grad_y, sum, weight, bias, grad_sum, -1, eps, offset); "
                        "residual = grad_x"))

TWINOP_OP(rms_norm_fp8,
          rowwise::QuantisingRecord<Op>("rms_norm_fp8(Tensor x, Tensor? weight=None, float eps=1e-6, int offset=0)"
                                        " -> (Tensor q, Tensor scale, Tensor y)")
              .input_shapes("weight = x[-1:]")
              .limits("eps >= 0; offset in 0 | 1"),
          rowwise::LaunchQuantisingRows<RmsNorm>)

TWINOP_OP(add_rms_norm_fp8,
          rowwise::QuantisingRecord<Op>("add_rms_norm_fp8(Tensor x, Tensor residual, Tensor weight, Tensor? bias=None, "
                                        "float eps=1e-6, int offset=0) -> (Tensor q, Tensor scale, Tensor y, Tensor sum)")
              .input_shapes("residual = x; weight = x[-1:]; bias = x[-1:]")
              .limits("eps >= 0; offset in 0 | 1")
              .memory("y = optional; sum = optional"),
          rowwise::LaunchQuantisingRows<AddRmsNorm>)

TWINOP_ROWWISE(rms_norm_backward, RmsNormBackward,
          NormBackward("rms_norm_backward(Tensor grad_y, Tensor x, Tensor? weight=None, Tensor? bias=None, "
                       "Tensor? grad_sum=None, int axis=-1, float eps=1e-6, int offset=0)"
                       " -> (Tensor grad_x, Tensor grad_weight, Tensor grad_bias)",
                       "axis of grad_y; eps >= 0; offset in 0 | 1"))
// clang-format on

}  // namespace twinop
