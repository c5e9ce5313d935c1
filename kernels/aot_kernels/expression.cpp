#include "twinop/aot_kernels/expression.h"

#include <cmath>
#include <stdexcept>
#include <string_view>

namespace twinop::aot_kernels {
namespace {

using Int = std::int64_t;
__extension__ using Wide = __int128;  // holds any result of one operation on two ints but a power

[[noreturn, gnu::cold]] void Fail(const char* reason) {
  throw std::runtime_error(std::string("the launch needs a number that cannot be computed: ") +
                           reason);
}

Value Of(Wide integer) {
  Value value;
  value.is_float = false;
  value.integer = static_cast<Int>(integer);
  if (__builtin_expect(value.integer != integer, false)) Fail("an int does not fit in 64 bits");
  return value;
}
Value Of(Int integer) { return Of(Wide{integer}); }
Value Of(bool truth) { return Of(Wide{truth}); }
Value Of(double number) {
  Value value;
  value.is_float = true;
  value.number = number;
  return value;
}

bool Truth(const Value& value) { return value.is_float ? value.number != 0 : value.integer != 0; }

// `function` takes two ints or two doubles.
template <class Function>
Value Promote(const Value& a, const Value& b, const Function& function) {
  if (__builtin_expect(a.is_float || b.is_float, false))
    return Of(function(a.AsDouble(), b.AsDouble()));
  return Of(function(Wide{a.integer}, Wide{b.integer}));
}

Wide Integer(const Value& value) {
  if (value.is_float) Fail("an operation on ints got a float");
  return value.integer;
}

Wide FloorDivide(Wide a, Wide b) {
  if (b == 0) Fail("a division by zero");
  return a / b - (a % b != 0 && (a < 0) != (b < 0));
}

// The result of a function of doubles, which exists, and is finite for finite arguments.
Value Finite(double result, bool from_nan, bool from_finite) {
  if (std::isnan(result) && !from_nan) Fail("a root, logarithm or power that does not exist");
  if (std::isinf(result) && from_finite) Fail("a float is too large, or a logarithm of zero");
  return Of(result);
}

template <class Function>
Value Analytic(const Value& value, const Function& function) {
  const double x = value.AsDouble();
  return Finite(function(x), std::isnan(x), std::isfinite(x));
}

Value Power(const Value& a, const Value& b) {
  if (a.is_float || b.is_float || b.integer < 0) {
    const double x = a.AsDouble(), y = b.AsDouble();
    return Finite(std::pow(x, y), std::isnan(x) || std::isnan(y),
                  std::isfinite(x) && std::isfinite(y));
  }
  if (a.integer == 0 || a.integer == 1) return Of(b.integer == 0 ? Int{1} : a.integer);
  if (a.integer == -1) return Of(b.integer % 2 == 0 ? Int{1} : Int{-1});
  Value result = Of(Int{1});
  for (Int i = 0; i < b.integer; ++i)
    result = Of(Wide{result.integer} * a.integer);  // fails after 64 rounds at the latest
  return result;
}

Value ToInt(double number) {
  if (!(number >= -0x1p63 && number < 0x1p63)) Fail("a float that fits in no int");
  return Of(static_cast<Int>(number));
}

Wide NextPowerOf2(Wide value) {
  Wide power = value > 0 ? 1 : 0;
  while (power < value && power > 0) power *= 2;
  return power;
}

// The power of 2 by which a shift multiplies or divides.
Wide PowerOf2(Wide count) {
  if (count < 0 || count > 63) Fail("a shift by less than 0 or more than 63");
  return Wide{1} << static_cast<int>(count);
}

Value Load(const Instruction& code, const Facts& facts) {
  switch (code.opcode) {
    case Opcode::kConstantFloat:
      return Of(code.number);
    case Opcode::kSize:
      return Of(facts.inputs[code.index].sizes[code.dimension]);
    case Opcode::kAttribute:
      return code.is_float ? Of(facts.attributes[code.index].f)
                           : Of(facts.attributes[code.index].i);
    case Opcode::kTextIs: {
      const twinop_attribute& attribute = facts.attributes[code.index];
      return Of(std::string_view(attribute.s, attribute.s_size) ==
                std::string_view(code.text, code.text_size));
    }
    case Opcode::kArch:
      return Of(Int{facts.arch});
    default:
      return Of(code.integer);
  }
}

Value Unary(Opcode opcode, const Value& x) {
  switch (opcode) {
    case Opcode::kNot:
      return Of(!Truth(x));
    case Opcode::kSqrt:
      return Analytic(x, [](double v) { return std::sqrt(v); });
    case Opcode::kExp:
      return Analytic(x, [](double v) { return std::exp(v); });
    case Opcode::kLog:
      return Analytic(x, [](double v) { return std::log(v); });
    case Opcode::kToFloat:
      return Of(x.AsDouble());
    case Opcode::kToInt:
      return x.is_float ? ToInt(std::trunc(x.number)) : x;
    case Opcode::kFloor:
      return x.is_float ? ToInt(std::floor(x.number)) : x;
    case Opcode::kCeil:
      return x.is_float ? ToInt(std::ceil(x.number)) : x;
    default:
      return Of(NextPowerOf2(Integer(x)));
  }
}

Value Binary(Opcode opcode, const Value& a, const Value& b) {
  switch (opcode) {
    case Opcode::kAdd:
      return Promote(a, b, [](auto x, auto y) { return x + y; });
    case Opcode::kSubtract:
      return Promote(a, b, [](auto x, auto y) { return x - y; });
    case Opcode::kMultiply:
      return Promote(a, b, [](auto x, auto y) { return x * y; });
    case Opcode::kFloorDivide:
      return Of(FloorDivide(Integer(a), Integer(b)));
    case Opcode::kDivide:
      if (b.AsDouble() == 0) Fail("a division by zero");
      return Of(a.AsDouble() / b.AsDouble());
    case Opcode::kModulo:
      return Of(Integer(a) - FloorDivide(Integer(a), Integer(b)) * Integer(b));
    case Opcode::kMinimum:
      return Promote(a, b, [](auto x, auto y) { return y < x ? y : x; });
    case Opcode::kMaximum:
      return Promote(a, b, [](auto x, auto y) { return y > x ? y : x; });
    case Opcode::kEqual:
      return Promote(a, b, [](auto x, auto y) { return x == y; });
    case Opcode::kNotEqual:
      return Promote(a, b, [](auto x, auto y) { return x != y; });
    case Opcode::kLess:
      return Promote(a, b, [](auto x, auto y) { return x < y; });
    case Opcode::kLessEqual:
      return Promote(a, b, [](auto x, auto y) { return x <= y; });
    case Opcode::kGreater:
      return Promote(a, b, [](auto x, auto y) { return x > y; });
    case Opcode::kGreaterEqual:
      return Promote(a, b, [](auto x, auto y) { return x >= y; });
    case Opcode::kAnd:
      return Of(Truth(a) && Truth(b));
    case Opcode::kOr:
      return Of(Truth(a) || Truth(b));
    case Opcode::kPower:
      return Power(a, b);
    case Opcode::kBitAnd:
      return Of(Integer(a) & Integer(b));
    case Opcode::kBitOr:
      return Of(Integer(a) | Integer(b));
    case Opcode::kShiftLeft:
      return Of(Integer(a) * PowerOf2(Integer(b)));
    default:
      return Of(FloorDivide(Integer(a), PowerOf2(Integer(b))));
  }
}

}  // namespace

Value Evaluate(const Expression& expression, const Facts& facts) {
  if (expression.size() == 1) return Load(expression[0], facts);  // most are constants
  Value stack[kMaxDepth];
  Value* end = stack;
  for (const Instruction& code : expression) {
    switch (OperandCount(code.opcode)) {
      case 0:
        *end++ = Load(code, facts);
        break;
      case 1:
        end[-1] = Unary(code.opcode, end[-1]);
        break;
      default:
        --end;
        end[-1] = Binary(code.opcode, end[-1], end[0]);
    }
  }
  return stack[0];
}

std::int64_t EvaluateInt(const Expression& expression, const Facts& facts) {
  return static_cast<Int>(Integer(Evaluate(expression, facts)));
}

}  // namespace twinop::aot_kernels
