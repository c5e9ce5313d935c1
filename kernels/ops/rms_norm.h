// rms_norm -> torch.ops.custom_domain.rms_norm, CustomRmsNorm; add_rms_norm with it.
#pragma once

#include "kernels/math/math.h"
#include "kernels/rowwise.h"
#include "kernels/rowwise/norm.h"

namespace twinop {

// y = x / sqrt(mean(x^2) + eps) * (offset + weight) over `axis` and all dimensions behind it (Zhang
// and Sennrich 2019). offset 0 is Llama's convention, 1 Gemma's, which trains weight around zero.
template <class T>
struct RmsNorm : rowwise::Op<1, 1> {
  using RowInputs = rowwise::Indices<0>;
  using ColumnInputs = rowwise::Indices<1>;  // weight
  using Phases = rowwise::Reductions<rowwise::kSquares>;
  using One = rowwise::Values<T, 1>;

  T count, inverse_count, eps, offset, rstd;

  RmsNorm(const Attribute* attributes, const rowwise::Rows& rows)
      : RmsNorm(rows, attributes[1].f, attributes[2].i) {}
  RmsNorm(const rowwise::Rows& rows, double epsilon, std::int64_t weight_offset)
      : count(T(rows.columns)),
        inverse_count(T(1) / count),
        eps(T(epsilon)),
        offset(T(weight_offset)) {}
  static rowwise::Rows RowsOf(const Call& call) {
    return rowwise::RowsBehind(call.inputs[0], call.attributes[0].i);
  }
  TWINOP_INLINE T Neutral(int) const { return T(1) - offset; }

  TWINOP_INLINE One Term(rowwise::Phase<0>, One& x, const One&) const { return x; }
  TWINOP_INLINE void Finish(rowwise::Phase<0>, const One& total) {
    rstd = Rsqrt(Quotient(total[0], count, inverse_count) + eps);
  }
  TWINOP_INLINE One Result(const One& x, const One& weight) const {
    return {x[0] * rstd * (offset + weight[0])};
  }
};

// sum = x + residual, rounded to the tensors' type; y = rms_norm(sum) + bias: without bias, bit for
// bit what the two ops give one after the other.
template <class T>
struct AddRmsNorm : rowwise::Op<2, 2> {
  using RowInputs = rowwise::Indices<0, 1>;     // x, residual
  using ColumnInputs = rowwise::Indices<2, 3>;  // weight, bias
  using Phases = typename RmsNorm<T>::Phases;
  static constexpr int kPreparedOutput = 1;
  using One = rowwise::Values<T, 1>;
  using Row = rowwise::Values<T, 2>;
  using Columns = rowwise::Values<T, 2>;

  RmsNorm<T> norm;

  AddRmsNorm(const Attribute* attributes, const rowwise::Rows& rows)
      : norm(rows, attributes[0].f, attributes[1].i) {}
  static rowwise::Rows RowsOf(const Call& call) { return rowwise::RowsAlong(call.inputs[0], -1); }
  TWINOP_INLINE T Neutral(int column) const { return column == 0 ? norm.Neutral(0) : T(0); }

  TWINOP_INLINE static T Prepared(const Row& row) { return row[0] + row[1]; }
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
struct RmsNormBackward : rowwise::Op<3, 1> {
  using RowInputs = rowwise::Indices<0, 1, 4>;  // grad_y, x, grad_sum
  using ColumnInputs = rowwise::Indices<2>;     // weight
  using Phases = rowwise::Reductions<rowwise::kSum>;
  static constexpr int kLateInputs = 1;
  static constexpr int kColumnSums = 2;  // grad_weight, grad_bias
  using One = rowwise::Values<T, 1>;
  using Two = rowwise::Values<T, 2>;
  using Products = rowwise::Products<T, 2>;
  using Row = rowwise::Values<T, 3>;

  T count, inverse_count, eps, offset, rstd, mean_g_xhat;

  RmsNormBackward(const Attribute* attributes, const rowwise::Rows& rows)
      : count(T(rows.columns)),
        inverse_count(T(1) / count),
        eps(T(attributes[1].f)),
        offset(T(attributes[2].i)) {}
  static rowwise::Rows RowsOf(const Call& call) {
    return rowwise::RowsBehind(call.inputs[0], call.attributes[0].i);
  }
  TWINOP_INLINE T Neutral(int) const { return T(1) - offset; }

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

// For the second derivative (kernels/rowwise/norm.h).
#define TWINOP_NORMED "rms_norm(x, None, axis, eps, offset)"
#define TWINOP_PULLED(v) \
  "rms_norm_backward((" v ").to(x.dtype), x, None, None, None, axis, eps, offset)[0]"
#define TWINOP_FACTOR "(offset + weight)"
#define TWINOP_RSTD "torch.rsqrt(" TWINOP_ROW_MEAN("x.square()") " + eps)"

// clang-format off
TWINOP_OP(rms_norm,
          Record("rms_norm(Tensor x, Tensor? weight=None, int axis=-1, float eps=1e-6, int offset=0) -> Tensor")
              .dtypes("float32; float16; bfloat16; float64; float16 weight=float32; bfloat16 weight=float32")
              .rows("axis:")
              .input_shapes("weight = x[axis:]")
              .limits("axis of x; eps >= 0; offset in 0 | 1")
              .in_place("y = x")
              .gradient("x, weight, _ = rms_norm_backward(grad, x, weight, None, None, axis, eps, offset)"),
          rowwise::Cpu<RmsNorm>, rowwise::Cuda<RmsNorm>)

TWINOP_OP(add_rms_norm,
          Record("add_rms_norm(Tensor x, Tensor residual, Tensor weight, Tensor? bias=None, float eps=1e-6, "
                 "int offset=0) -> (Tensor y, Tensor sum)")
              .dtypes(kNormDtypes)
              .rows("-1")
              .input_shapes("residual = x; weight = x[-1:]; bias = x[-1:]")
              .limits("eps >= 0; offset in 0 | 1")
              .in_place("y = x; sum = residual")
              .gradient("x, weight, bias = rms_norm_backward(grad_y, sum, weight, bias, grad_sum, -1, eps, offset); "
                        "residual = grad_x"),
          rowwise::Cpu<AddRmsNorm>, rowwise::Cuda<AddRmsNorm>)

TWINOP_OP(rms_norm_backward,
          NormBackward("rms_norm_backward(Tensor grad_y, Tensor x, Tensor? weight=None, Tensor? bias=None, "
                       "Tensor? grad_sum=None, int axis=-1, float eps=1e-6, int offset=0)"
                       " -> (Tensor grad_x, Tensor grad_weight, Tensor grad_bias)",
                       "axis of grad_y; eps >= 0; offset in 0 | 1", TWINOP_NORM_SECOND_DERIVATIVE),
          rowwise::Cpu<RmsNormBackward>, rowwise::Cuda<RmsNormBackward>)
// clang-format on

#undef TWINOP_NORMED
#undef TWINOP_PULLED
#undef TWINOP_FACTOR
#undef TWINOP_RSTD

}  // namespace twinop
