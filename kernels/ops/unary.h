// exp, log, square -> torch.ops.custom_domain.exp, CustomExp ...
#pragma once

#include "twinop/elementwise.h"
#include "twinop/math/math.h"

namespace twinop {

template <class T>
struct Exponential {
  TWINOP_INLINE T operator()(T x) const { return Exp(x); }
};
template <class T>
inline constexpr elementwise::FunctorTuning elementwise::kTuning<Exponential<T>>{1, 0, false, false,
                                                                                 true};
template <class T>
struct ExponentialBackward {
  TWINOP_INLINE T operator()(T grad_y, T y) const { return grad_y * y; }
};

template <class T>
struct Logarithm {
  TWINOP_INLINE T operator()(T x) const { return Log(x); }
};
template <class T>
inline constexpr elementwise::FunctorTuning elementwise::kTuning<Logarithm<T>>{2, 0, false, false,
                                                                               true};
template <class T>
struct LogarithmBackward {
  TWINOP_INLINE T operator()(T grad_y, T x) const { return grad_y / x; }
};

template <class T>
struct Square {
  TWINOP_INLINE T operator()(T x) const { return x * x; }
};
template <class T>
struct SquareBackward {
  TWINOP_INLINE T operator()(T grad_y, T x) const { return grad_y * (T(2) * x); }
};

TWINOP_UNARY(exp, Exponential, y)
TWINOP_UNARY(log, Logarithm, x)
TWINOP_UNARY(square, Square, x)

}  // namespace twinop
