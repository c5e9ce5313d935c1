// A test op with optional inputs (also absent in the middle) and an attribute of each kind.
//
//   y[..., pads[0] + j] = scale * x[..., j] * weight[j] + bias[j]     ("-" instead of "+" if sign
//   is "minus")
//
// and zeros in the pads[0] columns before and the pads[1] columns behind.
#pragma once

#include "for_each.h"

namespace twinop {

template <class T, class W>
struct PadAffine {
  using C = Compute<T>;
  const T* x;
  const W* weight;
  const W* bias;
  T* y;
  std::int64_t columns, before, width;
  C scale;
  bool minus;

  // One output element, by its flat index.
  TWINOP_INLINE void operator()(std::int64_t i) const {
    std::int64_t row = i / width;
    std::int64_t j = i % width - before;
    C value = C(0);
    if (j >= 0 && j < columns) {
      value = scale * ToCompute(x[row * columns + j]);
      if (weight != nullptr) value = value * C(ToCompute(weight[j]));
      C shift = bias != nullptr ? C(ToCompute(bias[j])) : C(0);
      value = minus ? value - shift : value + shift;
    }
    Round(value, &y[i]);
  }
};

// Makes the checks that the record cannot make.
template <class Op>
Status LaunchPadAffine(const CallOf<Op>& call) {
  const Tensor& x = InputOf(call, "x"_name);
  const Tensor& weight = InputOf(call, "weight"_name);
  const Tensor& bias = InputOf(call, "bias"_name);
  const Tensor& y = OutputOf(call, "y"_name);
  const auto pads = AttributeOf<IntList>(call, "pads"_name);
  const auto scale = AttributeOf<float>(call, "scale"_name);
  const bool minus = AttributeOf<std::string_view>(call, "sign"_name) == "minus";
  if (pads.size != 2 || pads[0] < 0 || pads[1] < 0)
    return Status::Error("pads must be two numbers >= 0: columns before and behind");
  const std::int64_t columns = x.sizes[x.rank - 1];
  DType weights = x.dtype;
  for (const Tensor* w : {&weight, &bias}) {
    if (!w->present) continue;
    weights = w->dtype;
    if (w->rank != 1 || w->sizes[0] != columns)
      return Status::Error("weight and bias must have one dimension, as long as the last one of x");
  }
  return DispatchFloat(x.dtype, [&](auto x_tag) {
    return DispatchFloat(weights, [&](auto w_tag) {
      using T = typename decltype(x_tag)::Type;
      using W = typename decltype(w_tag)::Type;
      return ForEach(call, y.numel,
                     PadAffine<T, W>{x.as<const T>(), weight.as<const W>(), bias.as<const W>(),
                                     y.as<T>(), columns, pads[0], y.sizes[y.rank - 1],
                                     static_cast<Compute<T>>(scale), minus});
    });
  });
}

// clang-format off
TWINOP_OP(pad_affine,
          Record("pad_affine(Tensor x, Tensor? weight=None, Tensor? bias=None, float scale=0.1, "
                 "str sign=\"plus\", int[] pads=[0, 1]) -> Tensor")
              .dtypes("float32; float16; bfloat16; float64; "
                      "float16 weight=float32 bias=float32; bfloat16 weight=float32 bias=float32")
              .shapes("y = x[:-1] + [x[-1] + pads[0] + pads[1]]")
              .choices("sign = plus | minus")
              .autocast("widest")
              .gradient("x = grad.narrow(-1, pads[0], x.shape[-1]) * scale * (1 if weight is None else weight);"
                        "weight = (grad.narrow(-1, pads[0], x.shape[-1]) * scale * x).sum_to_size(weight.shape);"
                        "bias = (grad.narrow(-1, pads[0], x.shape[-1]) * (1 if sign == 'plus' else -1))"
                        ".sum_to_size(bias.shape)"),
          LaunchPadAffine)
// clang-format on

}  // namespace twinop
