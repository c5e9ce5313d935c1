// gelu -> torch.ops.custom_domain.gelu, CustomGelu; gelu_fp8.
#pragma once

#include "twinop/elementwise.h"
#include "twinop/math/gelu.h"
#include "twinop/rowwise/quantised.h"

namespace twinop {

template <class T>
inline constexpr elementwise::FunctorTuning elementwise::kTuning<Gelu<T>>{
    sizeof(T) == 8 ? 4 : 2, elementwise::kFloat64Registers<T>};
template <class T>
inline constexpr elementwise::FunctorTuning elementwise::kTuning<TanhGelu<T>>{
    std::is_floating_point_v<T> ? 2 : 1};

// Phi(x) + x Phi'(x)
template <class T>
struct GeluBackward {
  TWINOP_INLINE T operator()(T grad_y, T x) const {
    const T t = NormalDistance(x);
    const T absolute = x < T(0) ? -x : x;
    const T tail =
        ScaledBell(t) * (Mills(t) - absolute * T(0.398942280401432677940)) * Format<T>::kUnscale;
    return grad_y * (x < T(0) ? tail : T(1) - tail);
  }
};

// sigmoid(2 u) (1 + x sigmoid(-2 u) 2 u')
template <class T>
struct TanhGeluBackward {
  TWINOP_INLINE T operator()(T grad_y, T x) const {
    const SigmoidParts<T> parts = TanhGeluParts(x);
    const SigmoidParts<T> minus{!parts.negative, parts.scaled};
    const T within = ClampTanhGelu(x) + (x - x);  // NaN for infinities, as in torch
    const T slope = Fma(T(3 * 0x1.2444f2a4d8b4bp-4) * within, within, T(0x1.9884533d43651p+0));
    return grad_y * Sigmoid(parts, Fma(within * slope, Sigmoid(minus, T(1)), T(1)));
  }
};

// Runs the functor None or Tanh, as the attribute `approximate` says.
template <template <class> class None, template <class> class Tanh, class Op>
Status LaunchApproximate(const CallOf<Op>& call) {
  return AttributeOf<std::string_view>(call, "approximate"_name) == "tanh"
             ? elementwise::Launcher<Tanh>(call)
             : elementwise::Launcher<None>(call);
}

TWINOP_OP(gelu,
          Record("gelu(Tensor x, str approximate=\"none\") -> Tensor")
              .elementwise()
              .choices("approximate = none | tanh")
              .in_place("y = x")
              .gradient("x = gelu_backward(grad, x, approximate)"),
          LaunchApproximate<Gelu, TanhGelu>)

template <template <class> class F, class Op>
Status LaunchGeluFp8With(const CallOf<Op>& call) {
  return rowwise::LaunchQuantising<rowwise::ElementwiseRow<F>::template Functor>(
      call, [](const Call& plain) { return elementwise::Launcher<F>(plain); });
}
template <class Op>
Status LaunchGeluFp8(const CallOf<Op>& call) {
  return AttributeOf<std::string_view>(call, "approximate"_name) == "tanh"
             ? LaunchGeluFp8With<TanhGelu>(call)
             : LaunchGeluFp8With<Gelu>(call);
}

TWINOP_OP(gelu_fp8,
          rowwise::QuantisingRecord<Op>("gelu_fp8(Tensor x, str approximate=\"none\") -> "
                                        "(Tensor q, Tensor scale, Tensor y)")
              .choices("approximate = none | tanh"),
          LaunchGeluFp8)

TWINOP_OP(
    gelu_backward,
    Record("gelu_backward(Tensor grad_y, Tensor x, str approximate=\"none\") -> Tensor grad_x")
        .elementwise()
        .choices("approximate = none | tanh"),
    LaunchApproximate<GeluBackward, TanhGeluBackward>)

}  // namespace twinop
