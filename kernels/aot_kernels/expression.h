// Numbers that a launch computes from the sizes and attributes of a call: postfix code over int64
// and double. twinop/aot_kernels/expression.py documents the operations.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "twinop/abi.h"

namespace twinop::aot_kernels {

enum class Opcode : std::uint8_t {
  kConstantInt,
  kConstantFloat,
  kSize,
  kAttribute,
  kTextIs,
  kArch,
  kAdd,
  kSubtract,
  kMultiply,
  kFloorDivide,
  kDivide,
  kModulo,
  kMinimum,
  kMaximum,
  kEqual,
  kNotEqual,
  kLess,
  kLessEqual,
  kGreater,
  kGreaterEqual,
  kAnd,
  kOr,
  kNot,
  kSqrt,
  kExp,
  kLog,
  kPower,
  kToFloat,
  kToInt,
  kFloor,
  kCeil,
  kNextPowerOf2,
  kBitAnd,
  kBitOr,
  kShiftLeft,
  kShiftRight,
};

// How many values an operation takes from the stack.
constexpr int OperandCount(Opcode opcode) {
  if (opcode <= Opcode::kArch) return 0;
  const bool unary = (opcode >= Opcode::kNot && opcode <= Opcode::kLog) ||
                     (opcode >= Opcode::kToFloat && opcode <= Opcode::kNextPowerOf2);
  return unary ? 1 : 2;
}

inline constexpr int kMaxDepth = 64;  // Python refuses more (encode.py)

struct Instruction {
  Opcode opcode;
  std::uint8_t index = 0;      // of an input or attribute
  std::uint8_t dimension = 0;  // kSize
  bool is_float = false;       // kAttribute: its kind
  std::uint32_t text_size = 0;
  union {
    std::int64_t integer = 0;
    double number;
    const char* text;
  };
};

using Expression = std::vector<Instruction>;

struct Value {
  bool is_float;
  union {
    std::int64_t integer;
    double number;
  };

  double AsDouble() const { return is_float ? number : static_cast<double>(integer); }
};

// What expressions refer to.
struct Facts {
  const twinop_tensor* inputs;
  const twinop_attribute* attributes;
  int arch;  // 90 for compute capability 9.0
};

// Throws std::runtime_error if a result does not exist or does not fit in 64 bits.
Value Evaluate(const Expression& expression, const Facts& facts);

// The value of an expression that must be an int.
std::int64_t EvaluateInt(const Expression& expression, const Facts& facts);

}  // namespace twinop::aot_kernels
