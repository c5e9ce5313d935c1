// add, mul, pow, addcmul -> torch.ops.custom_domain.add, CustomAdd ... with NumPy's broadcasting.
// The operands and the result have one dtype. Nothing is promoted, except under autocast (to the
// wider dtype).
#pragma once

#include "twinop/elementwise.h"
#include "twinop/math/math.h"

namespace twinop {

template <class T>
struct Add {
  TWINOP_INLINE T operator()(T a, T b) const { return a + b; }
};

template <class T>
struct Mul {
  TWINOP_INLINE T operator()(T a, T b) const { return a * b; }
};

// As C's and torch's pow, pow(x, 0) = pow(1, y) = 1 even for NaN, and pow of a negative base is NaN
// if the exponent is not an integer.
template <class T>
struct Power {
  TWINOP_INLINE T operator()(T a, T b) const { return Pow(a, b); }
};
template <class T>
inline constexpr elementwise::FunctorTuning elementwise::kTuning<Power<T>>{
    2,
    sizeof(T) == 8                ? 0
    : std::is_floating_point_v<T> ? 32
                                  : 40,
    false, true};
#if defined(__CUDACC__)
template <class T>
struct elementwise::FastPath<Power<T>> {
  static constexpr bool kExists = sizeof(T) < sizeof(double);
  __device__ __forceinline__ static bool Takes(T a, T) { return IsRegularBase(a); }
  __device__ __forceinline__ static auto Try(T a, T b) { return TryFastPow(a, b); }
};
#endif

// x + a b, as torch.addcmul: a gate before a sum, or a norm's scale and shift for each sequence.
template <class T>
struct AddProduct {
  TWINOP_INLINE T operator()(T x, T a, T b) const { return x + a * b; }
};

// The derivatives are those of torch's derivatives.yaml, in torch's operators, so second
// derivatives follow from them. The derivative of pow by the base is 0 if the exponent is 0. That
// by the exponent is 0 if the base is 0 and the exponent is not negative.
// clang-format off
TWINOP_ELEMENTWISE(add, Add,
          Record("add(Tensor a, Tensor b) -> Tensor")
              .shapes("y = broadcast(a, b)")
              .in_place("y = a")
              .autocast("widest")
              .gradient("a = grad; b = grad"))

TWINOP_ELEMENTWISE(mul, Mul,
          Record("mul(Tensor a, Tensor b) -> Tensor")
              .shapes("y = broadcast(a, b)")
              .in_place("y = a")
              .autocast("widest")
              .gradient("a = grad * b; b = grad * a"))

TWINOP_ELEMENTWISE(pow, Power,
          Record("pow(Tensor a, Tensor b) -> Tensor")
              .shapes("y = broadcast(a, b)")
              .in_place("y = a")
              .autocast("widest")
              .gradient("a = torch.where(b == 0, 0, grad * (b * torch.pow(a, b - 1))); "
                        "b = torch.where((a == 0) & (b >= 0), 0, grad * (y * torch.log(a)))"))

TWINOP_ELEMENTWISE(addcmul, AddProduct,
          Record("addcmul(Tensor x, Tensor a, Tensor b) -> Tensor")
              .shapes("y = broadcast(x, broadcast(a, b))")
              .in_place("y = x")
              .autocast("widest")
              .gradient("x = grad; a = grad * b; b = grad * a"))
// clang-format on

}  // namespace twinop
