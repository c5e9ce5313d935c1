// One op: its signature, dtypes, shapes and limits. The library's compiler makes it from the texts
// of a record (parse.h). The adapters use it where it lies, in the library.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "twinop/record/call.h"

namespace twinop {

enum class Kind : std::int32_t {
  kTensor = TWINOP_TENSOR,
  kOptionalTensor = TWINOP_OPTIONAL_TENSOR,
  kInt = TWINOP_INT,
  kFloat = TWINOP_FLOAT,
  kBool = TWINOP_FLAG,
  kString = TWINOP_STR,
  kIntList = TWINOP_INT_LIST,
};

constexpr std::string_view KindName(Kind kind) {
  constexpr std::string_view kNames[] = {"Tensor", "Tensor?", "",    "int",
                                         "float",  "bool",    "str", "int[]"};
  return kNames[static_cast<std::size_t>(kind)];
}

using Argument = twinop_argument;

// The structure of kernels/abi.h with functions, and without more data.
struct OpSpec : twinop_op {
  constexpr OpSpec() : twinop_op{} {}

  constexpr const Argument& input(std::size_t i) const { return arguments[i]; }
  constexpr const Argument& attribute(std::size_t i) const { return arguments[input_count + i]; }

  // The index of what has this name, or kNotFound.
  static constexpr int kNotFound = -1;
  constexpr int FindInput(std::string_view wanted) const {
    return Find(arguments, input_count, wanted);
  }
  constexpr int FindAttribute(std::string_view wanted) const {
    return Find(arguments + input_count, attribute_count, wanted);
  }
  constexpr int FindOutput(std::string_view wanted) const {
    return Find(outputs, output_count, wanted);
  }
  template <class Named>
  static constexpr int Find(const Named* each, std::size_t count, std::string_view wanted) {
    for (std::size_t i = 0; i < count; ++i)
      if (each[i].name == wanted) return static_cast<int>(i);
    return kNotFound;
  }

  // The input that the output may overwrite, or kNotFound.
  constexpr int InPlaceInput(std::size_t output) const { return outputs[output].in_place; }
  // The input whose memory the output is, or kNotFound.
  constexpr int WrittenInput(std::size_t output) const {
    return output < returned_count ? kNotFound : outputs[output].in_place;
  }
  // The input whose shape the output has, or kNotFound.
  constexpr int SameShapeInput(std::size_t output) const {
    const twinop_node& root = nodes[outputs[output].shape];
    return root.operation == TWINOP_SHAPE ? root.index : kNotFound;
  }
  // The inputs broadcast to the shape of the outputs.
  constexpr bool Broadcasts() const {
    return is_elementwise && nodes[outputs[0].shape].operation == TWINOP_BROADCAST;
  }
  // The input's shape begins with x[:-1], where x is the first input.
  constexpr bool BeginsWithRows(std::size_t of_input) const {
    int at = input(of_input).shape;
    while (at >= 0 && nodes[at].operation == TWINOP_CONCAT) at = nodes[at].a;
    return at >= 0 && nodes[at].operation == TWINOP_SLICE && nodes[at].index == 0 &&
           nodes[at].a < 0 && nodes[at].b >= 0 && nodes[nodes[at].b].operation == TWINOP_NUMBER &&
           nodes[nodes[at].b].value == -1;
  }
  constexpr bool WritesInputs() const { return output_count > returned_count; }
  constexpr bool HasOptionalInput() const {
    for (std::size_t i = 0; i < input_count; ++i)
      if (input(i).kind == Kind::kOptionalTensor) return true;
    return false;
  }
  // A backward op exists in torch only.
  constexpr bool IsBackward() const {
    constexpr std::string_view kSuffix = "_backward";
    const std::string_view text = name;
    return text.size() > kSuffix.size() && text.substr(text.size() - kSuffix.size()) == kSuffix;
  }
  // The dimension along which rows lie, or at which they begin.
  constexpr std::int64_t RowDimension(const Attribute* values) const {
    return rows.attribute >= 0 ? values[rows.attribute].i : rows.value;
  }
};

inline const OpSpec& FromC(const twinop_op& op) { return static_cast<const OpSpec&>(op); }

}  // namespace twinop
