// my_op -> torch.ops.my_op.my_op, and CustomMyOp in ONNX.
#pragma once

#include "twinop/elementwise.h"
#include "twinop/math/math.h"

namespace twinop {

// y = x^2. T is float (for float32, float16 and bfloat16 tensors) or double.
template <class T>
struct MyOpFunctor {
  TWINOP_INLINE T operator()(T x) const { return x * x; }
};

// dL/dx = dL/dy 2 x.
template <class T>
struct MyOpFunctorBackward {
  TWINOP_INLINE T operator()(T grad_y, T x) const { return grad_y * (T(2) * x); }
};

TWINOP_UNARY(my_op, MyOpFunctor, x)

}  // namespace twinop
