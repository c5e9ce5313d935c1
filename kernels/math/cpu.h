// The functions of math.h that differ between CPU and CUDA, for the CPU.
#pragma once

#include <cmath>

#include "twinop/math/polynomials.h"

namespace twinop {

// Replaces any NaN by one NaN. An addition of two NaNs keeps the first operand's sign and payload,
// and the compiler chooses for each loop and instruction set which operand is the first.
template <class T>
TWINOP_INLINE T OneNan(T value) {
  return value == value ? value : kNaN<T>;
}

// 1 / (1 + z) for z in [0, 1].
template <class T>
TWINOP_INLINE T InverseOfOnePlus(T z) {
  return T(1) / (T(1) + z);
}
template <class T>
TWINOP_INLINE T Divide(T a, T b) {
  return a / b;
}
// a / b, given 1 / b: one more rounding than a division, in a tenth of its time.
template <class T>
TWINOP_INLINE T Divide(T a, T, T inverse) {
  return a * inverse;
}

// The C library's functions of double have the same last digits on nearly every CPU; once rounded
// to float, on all of them.
using Library = double;

}  // namespace twinop
