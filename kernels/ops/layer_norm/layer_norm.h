// layer_norm, add_layer_norm, their forms in 8 bits, ada_layer_norm ->
// torch.ops.custom_domain.layer_norm, CustomLayerNorm ...
#pragma once

#include "twinop/math/math.h"
#include "twinop/ops/layer_norm/functor.h"
#include "twinop/rowwise.h"
#include "twinop/rowwise/norm.h"
#include "twinop/rowwise/quantised.h"

namespace twinop {

// Adaptive layer norm (Peebles and Xie, Scalable Diffusion Models with Transformers,
// arXiv:2212.09748): y = layer_norm(x) * (1 + scale) + shift. x is [B, ..., C]; scale and shift
// [B, C] are computed from the condition of each sequence. The norm has no weights.
template <class T>
struct AdaLayerNorm : LayerNorm<T> {
  static constexpr auto kColumns = rowwise::Names("scale", "shift");
  static constexpr bool kColumnsOfBatch = true;
  using typename LayerNorm<T>::One;
  using typename LayerNorm<T>::Columns;

  using LayerNorm<T>::LayerNorm;

  TWINOP_INLINE One Result(const One& centred, const Columns& column) const {
    return LayerNorm<T>::Result(centred, {column[0] + T(1), column[1]});
  }
};

// With xhat = (x - mean) * rstd and g = dL/dy * weight:
//   dL/dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) + grad_sum
//   dL/dweight = sum over rows of dL/dy * xhat,   dL/dbias = sum over rows of dL/dy
// The statistics are computed again from x, which is cheaper than storing them in the forward pass.
template <class T>
struct LayerNormBackward : rowwise::Defaults {
  static constexpr auto kRows = rowwise::Names("grad_y", "x", "grad_sum");
  static constexpr auto kColumns = rowwise::Names("weight");
  using Phases = rowwise::Reductions<rowwise::kSum, rowwise::kSum>;
  static constexpr int kEpilogueInputs = 1;
  static constexpr int kColumnReductions = 2;  // grad_weight, grad_bias
  using One = rowwise::Values<T, 1>;
  using Two = rowwise::Values<T, 2>;
  using Products = rowwise::Products<T, 2>;
  using Row = rowwise::Values<T, 3>;

  T count, inverse_count, eps, mean, rstd, mean_g, mean_g_xhat;

  template <class Op>
  LayerNormBackward(const CallOf<Op>& call, const rowwise::Rows& rows)
      : count(T(rows.columns)),
        inverse_count(T(1) / count),
        eps(T(AttributeOf<float>(call, "eps"_name))) {}
  TWINOP_INLINE T ColumnDefault(int) const { return T(1); }

  TWINOP_INLINE Products Term(rowwise::Phase<0>, Row& row, const One& weight) const {
    return {{row[1], row[0]}, {T(1), weight[0]}};
  }
  TWINOP_INLINE void Finish(rowwise::Phase<0>, const Two& total) {
    mean = Quotient(total[0], count, inverse_count);
    mean_g = Quotient(total[1], count, inverse_count);
  }
  TWINOP_INLINE Products Term(rowwise::Phase<1>, Row& row, const One& weight) const {
    const T centred = row[1] - mean;
    return {{centred, row[0] * weight[0]}, {centred, centred}};
  }
  TWINOP_INLINE void Finish(rowwise::Phase<1>, const Two& total) {
    rstd = Rsqrt(Quotient(total[0], count, inverse_count) + eps);
    mean_g_xhat = Quotient(total[1], count, inverse_count) * rstd;
  }
  TWINOP_INLINE One Result(const Row& row, const One& weight) const {
    return {Fma(rstd, Fma(-Xhat(row), mean_g_xhat, Fma(row[0], weight[0], -mean_g)), row[2])};
  }
  TWINOP_INLINE Products ColumnTerm(const Row& row) const {
    return {{row[0], row[0]}, {Xhat(row), T(1)}};
  }

 private:
  TWINOP_INLINE T Xhat(const Row& row) const { return (row[1] - mean) * rstd; }
};

// clang-format off
TWINOP_ROWWISE(layer_norm, LayerNorm,
          Record("layer_norm(Tensor x, Tensor? weight=None, Tensor? bias=None, int axis=-1, float eps=1e-5) -> Tensor")
              .dtypes(kNormDtypes)
              .rows("axis:")
              .input_shapes("weight = x[axis:]; bias = x[axis:]")
              .limits("axis of x; eps >= 0")
              .in_place("y = x")
              .gradient("x, weight, bias = layer_norm_backward(grad, x, weight, bias, None, axis, eps)"))

TWINOP_ROWWISE(add_layer_norm, AddLayerNorm,
          Record("add_layer_norm(Tensor x, Tensor residual, Tensor weight, Tensor? bias=None, float eps=1e-5)"
                 " -> (Tensor y, Tensor sum)")
              .dtypes(kNormDtypes)
              .rows("-1")
              .input_shapes("residual = x; weight = x[-1:]; bias = x[-1:]")
              .limits("eps >= 0")
              .in_place("y = x; sum = residual")
              .memory("sum = optional")
              .gradient("x, weight, bias = layer_norm_backward(grad_y, sum, weight, bias, grad_sum, -1, eps); "
                        "residual = grad_x"))

TWINOP_OP(layer_norm_fp8,
          rowwise::QuantisingRecord<Op>("layer_norm_fp8(Tensor x, Tensor? weight=None, Tensor? bias=None, "
                                        "float eps=1e-5) -> (Tensor q, Tensor scale, Tensor y)")
              .input_shapes("weight = x[-1:]; bias = x[-1:]")
              .limits("eps >= 0"),
          rowwise::LaunchQuantisingRows<LayerNorm>)

TWINOP_OP(add_layer_norm_fp8,
          rowwise::QuantisingRecord<Op>("add_layer_norm_fp8(Tensor x, Tensor residual, Tensor weight, Tensor? bias=None, "
                                        "float eps=1e-5) -> (Tensor q, Tensor scale, Tensor y, Tensor sum)")
              .input_shapes("residual = x; weight = x[-1:]; bias = x[-1:]")
              .limits("eps >= 0")
              .memory("y = optional; sum = optional"),
          rowwise::LaunchQuantisingRows<AddLayerNorm>)

TWINOP_ROWWISE(ada_layer_norm, AdaLayerNorm,
          Record("ada_layer_norm(Tensor x, Tensor scale, Tensor shift, float eps=1e-6) -> Tensor")
              .dtypes("float32; float16; bfloat16; float64; "
                      "float16 scale=float32 shift=float32; bfloat16 scale=float32 shift=float32")
              .rows("-1")
              .input_shapes("x = x[:1] + [x[1]] + x[2:]; scale = x[:1] + x[-1:]; shift = scale")
              .limits("eps >= 0")
              .in_place("y = x"))

TWINOP_ROWWISE(layer_norm_backward, LayerNormBackward,
          NormBackward("layer_norm_backward(Tensor grad_y, Tensor x, Tensor? weight=None, Tensor? bias=None, "
                       "Tensor? grad_sum=None, int axis=-1, float eps=1e-5)"
                       " -> (Tensor grad_x, Tensor grad_weight, Tensor grad_bias)",
                       "axis of grad_y; eps >= 0"))
// clang-format on

}  // namespace twinop
