// Numbers that a launch computes from the sizes and attributes of a call. Names and results are
// those of Python. What does not exist, or does not fit in 64 bits where it is used, throws
// std::runtime_error.
#pragma once

#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace twinop::aot_kernels {

// Wide enough for products of sizes. Use Narrow where a result leaves the formula.
__extension__ typedef __int128 Int;

[[noreturn, gnu::cold, gnu::noinline]] inline void FailNumber(const char* reason) {
  throw std::runtime_error(std::string("the launch needs a number that cannot be computed: ") +
                           reason);
}

inline std::int64_t Narrow(Int number) {
  const auto narrow = static_cast<std::int64_t>(number);
  if (number != narrow) FailNumber("an int does not fit in 64 bits");
  return narrow;
}

template <class A, class B>
auto Minimum(A a, B b) {
  return b < a ? b : a;
}
template <class A, class B>
auto Maximum(A a, B b) {
  return b > a ? b : a;
}

// a // b
inline Int FloorDivide(Int a, Int b) {
  if (b == 0) FailNumber("a division by zero");
  return a / b - (a % b != 0 && (a < 0) != (b < 0));
}

// a % b, which has the sign of b.
inline Int Modulo(Int a, Int b) { return a - FloorDivide(a, b) * b; }

// a / b
inline double Divide(double a, double b) {
  if (b == 0) FailNumber("a division by zero");
  return a / b;
}

// The result of a function of doubles, which exists, and is finite for finite arguments.
inline double Finite(double result, double x, double y = 0) {
  if (std::isnan(result) && !std::isnan(x) && !std::isnan(y))
    FailNumber("a root, logarithm or power that does not exist");
  if (std::isinf(result) && std::isfinite(x) && std::isfinite(y))
    FailNumber("a float is too large, or a logarithm of zero");
  return result;
}
inline double Sqrt(double x) { return Finite(std::sqrt(x), x); }
inline double Exp(double x) { return Finite(std::exp(x), x); }
inline double Log(double x) { return Finite(std::log(x), x); }

template <class A, class B>
auto Power(A base, B exponent) {
  if constexpr (std::is_floating_point_v<A> || std::is_floating_point_v<B>) {
    const auto x = static_cast<double>(base), y = static_cast<double>(exponent);
    return Finite(std::pow(x, y), x, y);
  } else {
    if (exponent < 0) FailNumber("an int to a negative power");
    Int result = 1;
    // The powers of -1, 0 and 1 repeat; those of others do not fit after 64 rounds.
    const Int rounds = exponent <= 64 ? Int{exponent} : 64 + exponent % 2;
    for (Int i = 0; i < rounds; ++i) result = Narrow(result * base);
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
  if constexpr (std::is_floating_point_v<T>) return number;
  return static_cast<double>(Narrow(static_cast<Int>(number)));
}

inline Int NextPowerOf2(Int number) {
  if (number <= 1) return number > 0;
  return Int{1} << (64 - __builtin_clzll(static_cast<unsigned long long>(Narrow(number) - 1)));
}

inline Int BitAnd(Int a, Int b) { return a & b; }
inline Int BitOr(Int a, Int b) { return a | b; }
inline Int CheckedShift(Int count) {
  if (count < 0 || count > 63) FailNumber("a shift by less than 0 or more than 63");
  return count;
}
inline Int ShiftLeft(Int a, Int count) { return a * (Int{1} << CheckedShift(count)); }
inline Int ShiftRight(Int a, Int count) { return a >> CheckedShift(count); }

}  // namespace twinop::aot_kernels
