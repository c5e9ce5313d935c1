// What the records of the norms share.
//
// The second derivative: the gradient of <op>_backward, in torch's operators and the norm's own.
// The file that uses it says what the norm is:
//
//   TWINOP_NORMED     h, the row normalised, without weight and bias
//   TWINOP_PULLED(v)  P(v) = rstd * (v - [mean(v)] - h * mean(v * h)): dL/dx of h for dL/dh = v
//   TWINOP_FACTOR     what h is multiplied with, where there is a weight
//   TWINOP_RSTD       1 / sqrt(mean square of what is normalised + eps)
//
// P is symmetric, and dh = P(dx). So with g = grad_y * factor, and u, w, b the gradients that come
// in for grad_x, grad_weight and grad_bias:
//
//   <u, P(g)> by grad_y: factor * P(u);  by weight: the sum over rows of grad_y * P(u)
//   <u, P(g)> by x: -rstd * (h * mean(u * P(g)) + P(u) * mean(g * h) + P(g) * mean(u * h))
//   <w, grad_y * h> by grad_y: w * h;  by x: P(grad_y * w)
#pragma once

#include <string_view>

#include "kernels/rowwise.h"

namespace twinop {

// Rows, weight and bias of one type or, for 16-bit rows, weight and bias of float32.
inline constexpr std::string_view kNormDtypes =
    "float32; float16; bfloat16; float64; "
    "float16 weight=float32 bias=float32; bfloat16 weight=float32 bias=float32";

// <op>_backward. An absent weight or bias has an empty gradient.
constexpr Record NormBackward(std::string_view schema, std::string_view limits,
                              std::string_view gradient) {
  return Record(schema)
      .dtypes(
          "float32; float16; bfloat16; float64; "
          "float16 weight=float32 bias=float32 grad_weight=float32 grad_bias=float32; "
          "bfloat16 weight=float32 bias=float32 grad_weight=float32 grad_bias=float32")
      .rows("axis:")
      .input_shapes("x = grad_y; weight = grad_y[axis:]; bias = grad_y[axis:]; grad_sum = grad_y")
      .limits(limits)
      .shapes("grad_weight = weight; grad_bias = bias")
      .scratch(TWINOP_COLUMN_SUMS_SCRATCH("grad_y", "axis"))
      .gradient(gradient);
}

}  // namespace twinop

#define TWINOP_ROW_MEAN(v) \
  "(" v ").mean(list(range(axis % max(x.dim(), 1) - x.dim(), 0)), keepdim=True)"
#define TWINOP_WEIGHTED "(grad_y if weight is None else grad_y * " TWINOP_FACTOR ")"

// clang-format off
#define TWINOP_NORM_SECOND_DERIVATIVE                                                             \
  "grad_y = " TWINOP_PULLED("grad_grad_x") " * (1 if weight is None else " TWINOP_FACTOR ")"      \
  " + (0 if weight is None else grad_grad_weight * " TWINOP_NORMED ")"                            \
  " + (0 if bias is None else grad_grad_bias); "                                                  \
  "x = (0 if weight is None else " TWINOP_PULLED("grad_y * grad_grad_weight") ") - " TWINOP_RSTD  \
  " * (" TWINOP_NORMED " * " TWINOP_ROW_MEAN("grad_grad_x * " TWINOP_PULLED(TWINOP_WEIGHTED))      \
  " + " TWINOP_PULLED("grad_grad_x") " * " TWINOP_ROW_MEAN(TWINOP_WEIGHTED " * " TWINOP_NORMED)     \
  " + " TWINOP_PULLED(TWINOP_WEIGHTED) " * " TWINOP_ROW_MEAN("grad_grad_x * " TWINOP_NORMED) "); "  \
  "weight = (grad_y * " TWINOP_PULLED("grad_grad_x") ").sum_to_size(weight.shape); "              \
  "grad_sum = grad_grad_x"
// clang-format on
