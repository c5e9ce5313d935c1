// What the records of the norms share.
#pragma once

#include <string_view>

#include "twinop/rowwise.h"

namespace twinop {

// Rows, weight and bias have one type. With 16-bit rows, weight and bias may have float32.
inline constexpr std::string_view kNormDtypes =
    "float32; float16; bfloat16; float64; "
    "float16 weight=float32 bias=float32; bfloat16 weight=float32 bias=float32";

// The record of <op>_backward. An absent weight or bias has an empty gradient.
constexpr Record NormBackward(std::string_view schema, std::string_view limits) {
  return Record(schema)
      .dtypes(
          "float32; float16; bfloat16; float64; "
          "float16 weight=float32 bias=float32 grad_weight=float32 grad_bias=float32; "
          "bfloat16 weight=float32 bias=float32 grad_weight=float32 grad_bias=float32")
      .rows("axis:")
      .input_shapes("x = grad_y; weight = grad_y[axis:]; bias = grad_y[axis:]; grad_sum = grad_y")
      .limits(limits)
      .shapes("grad_weight = weight; grad_bias = bias");
}

}  // namespace twinop
