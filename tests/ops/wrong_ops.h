// Ops that are wrong on purpose: `twinop test` must find what is wrong, and say it.
#pragma once

#include "twinop/elementwise.h"
#include "twinop/kernel.h"

namespace twinop {

// x + 1, but x for x > 30.
template <class T>
struct Shift {
  TWINOP_INLINE T operator()(T x) const { return x > T(30) ? x : x + T(1); }
};

// 2 x, with the gradient of 3 x.
template <class T>
struct Twice {
  TWINOP_INLINE T operator()(T x) const { return T(2) * x; }
};
template <class T>
struct TwiceBackward {
  TWINOP_INLINE T operator()(T grad_y, T) const { return T(3) * grad_y; }
};

// x * x, which is right; its function body has other arguments.
template <class T>
struct Squared {
  TWINOP_INLINE T operator()(T x) const { return x * x; }
};

// The first numbers, of which it counts more than there are.
template <class Op>
Status CountTooMany(const CallOf<Op>& call) {
  call.counts[0] = InputOf(call, "x"_name).sizes[0] + 1;
  return {};
}

TWINOP_CPU_OP(
    too_many,
    Record("too_many(Tensor x) -> Tensor").dtypes("float32").sizes("n <= x[0]").shapes("y = [n]"),
    CountTooMany)
TWINOP_ELEMENTWISE(shift, Shift, Record("shift(Tensor x) -> Tensor").in_place("y = x"))
TWINOP_UNARY(twice, Twice, x)
TWINOP_ELEMENTWISE(squared, Squared, Record("squared(Tensor x) -> Tensor").in_place("y = x"))

}  // namespace twinop
