// Numbers that a launch computes from the sizes and attributes of a call. What does not fit in 64
// bits, or does not exist, throws std::runtime_error. Names and results are those of Python.
#pragma once

#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace twinop::aot_kernels {

[[noreturn, gnu::cold, gnu::noinline]] inline void FailNumber(const char* reason) {
  throw std::runtime_error(std::string("the launch needs a number that cannot be computed: ") +
                           reason);
}

// An int64 whose arithmetic is checked.
struct Int {
  std::int64_t value = 0;

  constexpr Int() = default;
  template <class T, class = std::enable_if_t<std::is_integral_v<T>>>
  constexpr Int(T number) : value(static_cast<std::int64_t>(number)) {}
  explicit constexpr operator double() const { return static_cast<double>(value); }
  explicit constexpr operator bool() const { return value != 0; }
};

template <class A, class B>
inline constexpr bool kAnyFloat = std::is_floating_point_v<A> || std::is_floating_point_v<B>;
// Of an operator with an Int and an Int or another number.
template <class A, class B>
using IfNumbers = std::enable_if_t<(std::is_same_v<A, Int> &&
                                    (std::is_same_v<B, Int> || std::is_arithmetic_v<B>)) ||
                                   (std::is_arithmetic_v<A> && std::is_same_v<B, Int>)>;

// With a double, an operation is in double.
#define TWINOP_CHECKED(sign, builtin)                                              \
  template <class A, class B, class = IfNumbers<A, B>>                             \
  std::conditional_t<kAnyFloat<A, B>, double, Int> operator sign(A a, B b) {       \
    if constexpr (kAnyFloat<A, B>) {                                               \
      return static_cast<double>(a) sign static_cast<double>(b);                   \
    } else {                                                                       \
      Int result;                                                                  \
      if (__builtin_expect(builtin(Int(a).value, Int(b).value, &result.value), 0)) \
        FailNumber("an int does not fit in 64 bits");                              \
      return result;                                                               \
    }                                                                              \
  }
TWINOP_CHECKED(+, __builtin_add_overflow)
TWINOP_CHECKED(-, __builtin_sub_overflow)
TWINOP_CHECKED(*, __builtin_mul_overflow)
#undef TWINOP_CHECKED

#define TWINOP_COMPARISON(sign)                                  \
  template <class A, class B, class = IfNumbers<A, B>>           \
  bool operator sign(A a, B b) {                                 \
    if constexpr (kAnyFloat<A, B>) {                             \
      return static_cast<double>(a) sign static_cast<double>(b); \
    } else {                                                     \
      return Int(a).value sign Int(b).value;                     \
    }                                                            \
  }
TWINOP_COMPARISON(==)
TWINOP_COMPARISON(!=)
TWINOP_COMPARISON(<)
TWINOP_COMPARISON(<=)
TWINOP_COMPARISON(>)
TWINOP_COMPARISON(>=)
#undef TWINOP_COMPARISON

template <class A, class B>
auto Minimum(A a, B b) {
  using Result = std::conditional_t<kAnyFloat<A, B>, double, Int>;
  return b < a ? static_cast<Result>(b) : static_cast<Result>(a);
}
template <class A, class B>
auto Maximum(A a, B b) {
  using Result = std::conditional_t<kAnyFloat<A, B>, double, Int>;
  return b > a ? static_cast<Result>(b) : static_cast<Result>(a);
}

// a // b
inline Int FloorDivide(Int a, Int b) {
  if (b == 0) FailNumber("a division by zero");
  if (b == -1) return 0 - a;  // the least int has no negative
  return a.value / b.value - (a.value % b.value != 0 && (a < 0) != (b < 0));
}

// a % b, which has the sign of b.
inline Int Modulo(Int a, Int b) {
  if (b == 0) FailNumber("a division by zero");
  const std::int64_t rest = b == -1 ? 0 : a.value % b.value;
  return rest != 0 && (rest < 0) != (b < 0) ? rest + b.value : rest;
}

// a / b
template <class A, class B>
double Divide(A a, B b) {
  if (static_cast<double>(b) == 0) FailNumber("a division by zero");
  return static_cast<double>(a) / static_cast<double>(b);
}

// The result of a function of doubles, which exists, and is finite for finite arguments.
inline double Finite(double result, bool from_nan, bool from_finite) {
  if (std::isnan(result) && !from_nan) FailNumber("a root, logarithm or power that does not exist");
  if (std::isinf(result) && from_finite) FailNumber("a float is too large, or a logarithm of zero");
  return result;
}
template <class T>
double Sqrt(T number) {
  const auto x = static_cast<double>(number);
  return Finite(std::sqrt(x), std::isnan(x), std::isfinite(x));
}
template <class T>
double Exp(T number) {
  const auto x = static_cast<double>(number);
  return Finite(std::exp(x), std::isnan(x), std::isfinite(x));
}
template <class T>
double Log(T number) {
  const auto x = static_cast<double>(number);
  return Finite(std::log(x), std::isnan(x), std::isfinite(x));
}

template <class A, class B>
std::conditional_t<kAnyFloat<A, B>, double, Int> Power(A a, B b) {
  if constexpr (kAnyFloat<A, B>) {
    const auto x = static_cast<double>(a), y = static_cast<double>(b);
    return Finite(std::pow(x, y), std::isnan(x) || std::isnan(y),
                  std::isfinite(x) && std::isfinite(y));
  } else {
    const Int base = a, exponent = b;
    if (exponent < 0) FailNumber("an int to a negative power");
    if (base == 0 || base == 1) return exponent == 0 ? Int(1) : base;
    if (base == -1) return Modulo(exponent, 2) == 0 ? 1 : -1;
    Int result = 1;
    for (Int i = 0; i < exponent; i = i + 1) result = result * base;  // fails after 64 rounds
    return result;
  }
}

template <class T>
Int ToInt(T number) {
  if constexpr (std::is_floating_point_v<T>) {
    if (!(number >= -0x1p63 && number < 0x1p63)) FailNumber("a float that fits in no int");
    return static_cast<std::int64_t>(number);
  } else {
    return number;
  }
}
template <class T>
Int Floor(T number) {
  if constexpr (std::is_floating_point_v<T>) return ToInt(std::floor(number));
  return ToInt(number);
}
template <class T>
Int Ceil(T number) {
  if constexpr (std::is_floating_point_v<T>) return ToInt(std::ceil(number));
  return ToInt(number);
}
template <class T>
double ToFloat(T number) {
  return static_cast<double>(number);
}

inline Int NextPowerOf2(Int number) {
  Int power = number > 0 ? 1 : 0;
  while (power < number) power = power * 2;
  return power;
}

inline Int BitAnd(Int a, Int b) { return a.value & b.value; }
inline Int BitOr(Int a, Int b) { return a.value | b.value; }
// The power of 2 by which a shift multiplies or divides.
inline __int128 PowerOf2(Int count) {
  if (count < 0 || count > 63) FailNumber("a shift by less than 0 or more than 63");
  return static_cast<__int128>(1) << count.value;
}
inline Int ShiftLeft(Int a, Int count) {
  const __int128 result = a.value * PowerOf2(count);
  if (result != static_cast<std::int64_t>(result)) FailNumber("an int does not fit in 64 bits");
  return static_cast<std::int64_t>(result);
}
inline Int ShiftRight(Int a, Int count) {
  PowerOf2(count);
  return a.value >> count.value;
}

}  // namespace twinop::aot_kernels
