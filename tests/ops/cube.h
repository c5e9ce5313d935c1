// An op as a user writes it: in a library of its own, whose domain is its name, with a derivative.
#pragma once

#include "twinop/elementwise.h"

namespace twinop {

template <class T>
struct Cube {
  TWINOP_INLINE T operator()(T x) const { return x * x * x; }
};

template <class T>
struct CubeBackward {
  TWINOP_INLINE T operator()(T grad_y, T x) const { return grad_y * T(3) * x * x; }
};

TWINOP_UNARY(cube, Cube, x)

}  // namespace twinop
