// relu -> torch.ops.custom_domain.relu, CustomRelu.
#pragma once

#include "twinop/elementwise.h"

namespace twinop {

// y = max(x, 0) as in torch: NaN stays NaN (`x > 0 ? x : 0` and fmax would return 0), and -0 stays
// -0.
template <class T>
struct Relu {
  TWINOP_INLINE T operator()(T x) const { return x < T(0) ? T(0) : x; }
};
template <class T>
inline constexpr elementwise::FunctorTuning elementwise::kTuning<Relu<T>>{1, 0, true};

// dL/dx = dL/dy where y > 0, and 0 elsewhere. If y is NaN, the gradient passes, as in torch's
// threshold_backward.
template <class T>
struct ReluBackward {
  TWINOP_INLINE T operator()(T grad_y, T y) const { return y <= T(0) ? T(0) : grad_y; }
};
template <class T>
inline constexpr elementwise::FunctorTuning elementwise::kTuning<ReluBackward<T>>{1, 0, true};

// clang-format off
TWINOP_ELEMENTWISE(relu, Relu,
                   Record("relu(Tensor x) -> Tensor")
                       .in_place("y = x")
                       .gradient("x = relu_backward(grad, y)"))
// clang-format on

TWINOP_ELEMENTWISE(relu_backward, ReluBackward,
                   Record("relu_backward(Tensor grad_y, Tensor y) -> Tensor grad_x"))

}  // namespace twinop
