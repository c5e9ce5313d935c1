// softsign -> torch.ops.softsign.softsign, CustomSoftsign in the domain softsign.
#pragma once

#include "twinop/elementwise.h"

namespace twinop {

template <class T>
TWINOP_INLINE T OnePlusMagnitude(T x) {
  return T(1) + (x < T(0) ? -x : x);
}

// y = x / (1 + |x|)
template <class T>
struct Softsign {
  TWINOP_INLINE T operator()(T x) const { return x / OnePlusMagnitude(x); }
};

// dL/dx = dL/dy / (1 + |x|)^2
template <class T>
struct SoftsignBackward {
  TWINOP_INLINE T operator()(T grad_y, T x) const {
    const T scale = OnePlusMagnitude(x);
    return grad_y / (scale * scale);
  }
};

TWINOP_UNARY(softsign, Softsign, x)

}  // namespace twinop
