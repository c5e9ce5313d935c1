// silu, sigmoid, tanh, softplus -> torch.ops.custom_domain.silu, CustomSilu ...
#pragma once

#include "twinop/elementwise.h"
#include "twinop/math/math.h"

namespace twinop {

// y = x sigmoid(x)
template <class T>
struct Silu {
  TWINOP_INLINE T operator()(T x) const { return Sigmoid(x, x); }
};
// sigmoid(x) (1 + x sigmoid(-x))
template <class T>
struct SiluBackward {
  TWINOP_INLINE T operator()(T grad_y, T x) const {
    const SigmoidParts<T> parts = PartsOfSigmoid(x);
    const SigmoidParts<T> minus{!parts.negative, parts.scaled};
    return grad_y * Sigmoid(parts, Fma(x, Sigmoid(minus, T(1)), T(1)));
  }
};

// y = 1 / (1 + e^-x)
template <class T>
struct Logistic {
  TWINOP_INLINE T operator()(T x) const { return Sigmoid(x); }
};
template <class T>
struct LogisticBackward {
  TWINOP_INLINE T operator()(T grad_y, T y) const { return grad_y * ((T(1) - y) * y); }
};

template <class T>
struct HyperbolicTangent {
  TWINOP_INLINE T operator()(T x) const { return Tanh(x); }
};
template <class T>
inline constexpr elementwise::FunctorTuning elementwise::kTuning<HyperbolicTangent<T>>{2};
// dL/dx = dL/dy (1 - y) (1 + y). Near |y| = 1, the form 1 - y^2 would lose the last digits.
template <class T>
struct HyperbolicTangentBackward {
  TWINOP_INLINE T operator()(T grad_y, T y) const { return grad_y * ((T(1) - y) * (T(1) + y)); }
};

// y = log(1 + e^x), as ONNX defines it. torch returns x above its default threshold of 20, which
// differs by at most e^-20 = 2.1e-9. Only float64 shows the difference.
template <class T>
struct SoftPlus {
  TWINOP_INLINE T operator()(T x) const { return Softplus(x); }
};
template <class T>
inline constexpr elementwise::FunctorTuning elementwise::kTuning<SoftPlus<T>>{
    2, elementwise::kFloat64Registers<T>};
template <class T>
struct SoftPlusBackward {
  TWINOP_INLINE T operator()(T grad_y, T x) const { return grad_y * Sigmoid(x); }
};

TWINOP_UNARY(silu, Silu, x)
TWINOP_UNARY(sigmoid, Logistic, y)
TWINOP_UNARY(tanh, HyperbolicTangent, y)
TWINOP_UNARY(softplus, SoftPlus, x)

}  // namespace twinop
