// Test ops of floats and integers of 8 bits, which are stored and not computed in: to them with a
// scale, and back, in the elementwise skeleton; rows with a scale of their own, in a launcher.
#pragma once

#include "for_each.h"
#include "twinop/elementwise.h"
#include "twinop/math/math.h"

namespace twinop {

template <class T>
struct Quantise {
  TWINOP_INLINE T operator()(T x, T scale) const { return x / scale; }
};
template <class T>
struct Dequantise {
  TWINOP_INLINE T operator()(T q, T scale) const { return q * scale; }
};

TWINOP_ELEMENTWISE(quantise, Quantise,
                   Record("quantise(Tensor x, Tensor scale) -> Tensor")
                       .dtypes("float32 y=float8_e4m3fn; bfloat16 scale=float32 y=float8_e4m3fn; "
                               "float16 scale=float32 y=float8_e4m3fn")
                       .shapes("y = broadcast(x, scale)"))
TWINOP_ELEMENTWISE(quantise_e5m2, Quantise,
                   Record("quantise_e5m2(Tensor x, Tensor scale) -> Tensor")
                       .dtypes("float32 y=float8_e5m2")
                       .shapes("y = broadcast(x, scale)"))
TWINOP_ELEMENTWISE(quantise_int8, Quantise,
                   Record("quantise_int8(Tensor x, Tensor scale) -> Tensor")
                       .dtypes("float32 y=int8; bfloat16 scale=float32 y=int8")
                       .shapes("y = broadcast(x, scale)"))
TWINOP_ELEMENTWISE(dequantise, Dequantise,
                   Record("dequantise(Tensor q, Tensor scale) -> Tensor")
                       .dtypes("float8_e4m3fn scale=float32 y=float32; "
                               "float8_e5m2 scale=float32 y=float32; int8 scale=float32 y=float32")
                       .shapes("y = broadcast(q, scale)"))

// y = x / scale with a scale for each row, by which its largest number becomes the largest float8.
struct QuantiseRow {
  const float* x;
  Float8E4M3* y;
  float* scale;
  std::int64_t columns;

  TWINOP_INLINE void operator()(std::int64_t row) const {
    float largest = 0;
    for (std::int64_t i = 0; i < columns; ++i) largest = Max(largest, Abs(x[row * columns + i]));
    scale[row] = largest > 0 ? largest / 448 : 1;
    for (std::int64_t i = 0; i < columns; ++i)
      Round(x[row * columns + i] / scale[row], &y[row * columns + i]);
  }
};

template <class Op>
Status QuantiseRows(const CallOf<Op>& call) {
  const std::int64_t count = OutputOf(call, "scale"_name).numel;
  const QuantiseRow rows{InputData<float>(call, "x"_name), OutputData<Float8E4M3>(call, "y"_name),
                         OutputData<float>(call, "scale"_name),
                         InputOf(call, "x"_name).numel / count};
  return ForEach(call, count, rows);
}

TWINOP_OP(quantise_rows,
          Record("quantise_rows(Tensor x) -> (Tensor y, Tensor scale)")
              .dtypes("float32 y=float8_e4m3fn")
              .shapes("scale = x[:-1] + [1]"),
          QuantiseRows)

}  // namespace twinop
