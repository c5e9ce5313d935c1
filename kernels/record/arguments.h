// The attributes, inputs and outputs of a call by their names in the op's schema.
//
//   template <class Op>
//   Status Scale(const CallOf<Op>& call) {
//     const Tensor& x = InputOf(call, "x"_name);
//     const float factor = AttributeOf<float>(call, "factor"_name);
//     ...
//
// The compiler resolves each name. To add an argument to a schema moves no other argument, and a
// name or a kind that the schema does not have is a compile error.
#pragma once

#include <cstdint>
#include <string_view>
#include <type_traits>

#include "twinop/record/op_spec.h"

namespace twinop {

// A name as a type, which a C++17 function can use in a constant expression.
template <class Character, Character... kCharacters>
struct NameLiteral {
  static constexpr Character kText[] = {kCharacters..., '\0'};
  static constexpr std::string_view view() { return {kText, sizeof...(kCharacters)}; }
};

// "eps"_name. The literal operator template is an extension of GCC, Clang and nvcc.
template <class Character, Character... kCharacters>
constexpr NameLiteral<Character, kCharacters...> operator""_name() {
  return {};
}

// The value of an int[] attribute.
struct IntList {
  const std::int64_t* data;
  std::size_t size;

  std::int64_t operator[](std::size_t i) const { return data[i]; }
  const std::int64_t* begin() const { return data; }
  const std::int64_t* end() const { return data + size; }
};

// The schema's kind for a C++ type.
template <class T>
constexpr Kind KindOf() {
  if constexpr (std::is_same_v<T, std::int64_t>) return Kind::kInt;
  if constexpr (std::is_same_v<T, float>) return Kind::kFloat;
  if constexpr (std::is_same_v<T, bool>) return Kind::kBool;
  if constexpr (std::is_same_v<T, std::string_view>) return Kind::kString;
  if constexpr (std::is_same_v<T, IntList>) return Kind::kIntList;
  return Kind::kTensor;
}

// The value of an attribute. T is std::int64_t (int), float, bool, std::string_view (str) or
// IntList (int[]).
template <class T, class Op, class Name>
T AttributeOf(const CallOf<Op>& call, Name) {
  constexpr int kIndex = Op::kRecord.FindAttribute(Name::view());
  static_assert(kIndex >= 0, "the op's schema has no attribute of this name");
  static_assert(KindOf<T>() != Kind::kTensor,
                "an attribute is a std::int64_t (int), float, bool, std::string_view (str) or "
                "twinop::IntList (int[])");
  if constexpr (kIndex >= 0 && KindOf<T>() != Kind::kTensor) {
    static_assert(Op::kRecord.attribute(kIndex).kind == KindOf<T>(),
                  "the op's schema declares this attribute with another kind");
    const Attribute& value = call.attributes[kIndex];
    if constexpr (std::is_same_v<T, std::int64_t>) return value.i;
    if constexpr (std::is_same_v<T, float>) return static_cast<float>(value.f);
    if constexpr (std::is_same_v<T, bool>) return value.i != 0;
    if constexpr (std::is_same_v<T, std::string_view>) return value.text();
    if constexpr (std::is_same_v<T, IntList>) return {value.ints, value.count};
  }
}

template <class Op, class Name>
const Tensor& InputOf(const CallOf<Op>& call, Name) {
  constexpr int kIndex = Op::kRecord.FindInput(Name::view());
  static_assert(kIndex >= 0, "the op's schema has no input of this name");
  return call.inputs[kIndex];
}

template <class Op, class Name>
Tensor& OutputOf(const CallOf<Op>& call, Name) {
  constexpr int kIndex = Op::kRecord.FindOutput(Name::view());
  static_assert(kIndex >= 0, "the op's schema has no output of this name (one without is y)");
  return call.outputs[kIndex];
}

}  // namespace twinop
