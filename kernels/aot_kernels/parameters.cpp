#include "twinop/aot_kernels/parameters.h"

#include <cstring>
#include <stdexcept>
#include <string>

#include "twinop/math/numeric.h"

namespace twinop::aot_kernels {
namespace {

[[noreturn, gnu::cold]] void Fail(const char* label, const char* argument,
                                  const std::string& reason) {
  throw std::runtime_error(std::string(label) + ": " + argument + " is " + reason);
}

bool Holds(const Requirement& requirement, const Value& value) {
  if (value.is_float) return false;
  return requirement.kind == Requirement::Kind::kDivisibleBy16
             ? value.integer % 16 == 0
             : value.integer == static_cast<std::int32_t>(value.integer);
}

// Of a parameter that is an int, by its type.
struct IntType {
  int bits;
  bool is_signed;
};
constexpr IntType kIntTypes[] = {{64, true}, {1, false}, {8, true},   {16, true},  {32, true},
                                 {64, true}, {8, false}, {16, false}, {32, false}, {63, false}};

}  // namespace

const Variant& ChooseVariant(const Launch& launch, const Value* values) {
  const Variant* variant = launch.variants.data();
  for (;; ++variant) {  // the last one requires nothing
    bool holds = true;
    for (const Requirement& requirement : variant->requirements)
      holds = holds && Holds(requirement, values[requirement.argument]);
    if (holds) return *variant;
  }
}

void StoreParameter(const Parameter& parameter, const Launch& launch, const Value* values,
                    const char* label, void* place) {
  using Type = Parameter::Type;
  const Value& value = values[parameter.argument];
  const char* argument = launch.arguments[parameter.argument].name;
  const auto store = [place](auto stored) { std::memcpy(place, &stored, sizeof(stored)); };
  const auto single = static_cast<float>(value.AsDouble());
  Half half;
  switch (parameter.type) {
    case Type::kFp16:
      Round(single, &half);
      return store(half);
    case Type::kBf16:  // cut, as Triton's launcher does
      return store(static_cast<std::uint16_t>(BitsOf(single) >> 16));
    case Type::kFp32:
      return store(single);
    case Type::kFp64:
      return store(value.AsDouble());
    default:
      break;
  }
  if (value.is_float) Fail(label, argument, "a float; the kernel takes an int");
  const IntType& type = kIntTypes[static_cast<int>(parameter.type)];
  const std::int64_t excess = value.integer >> (type.is_signed ? type.bits - 1 : type.bits);
  if (__builtin_expect(excess != 0 && !(type.is_signed && excess == -1), false))
    Fail(label, argument,
         std::to_string(value.integer) + "; the kernel takes an int of " +
             std::to_string(type.bits) + (type.is_signed ? " bits" : " bits without a sign") +
             ". Call the op with smaller sizes or attributes");
  store(value.integer);  // the kernel reads the low bytes, which are the first
}

}  // namespace twinop::aot_kernels
