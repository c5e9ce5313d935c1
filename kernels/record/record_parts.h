// What the texts of a record consist of.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "twinop/record/shape.h"

namespace twinop {

// The value of `name` in "y = x; s = x[:-1]"; empty if there is none.
constexpr std::string_view Entry(std::string_view entries, std::string_view name) {
  Scanner scan(entries);
  while (!scan.AtEnd()) {
    std::string_view key = scan.Word();
    scan.Expect("=");
    std::string_view value = scan.Until(";");
    if (key == name) return value;
    if (!scan.AtEnd()) scan.Expect(";");
  }
  return {};
}

// The limit of one attribute.
struct Limit {
  enum class Kind : std::uint8_t { kNone, kDimension, kBounds, kOneOf };
  Kind kind = Kind::kNone;
  std::int8_t input = 0;              // kDimension: the input with these dimensions
  std::string_view lower, upper;      // kBounds: "0.5" as written; empty where there is none
  bool above = false, below = false;  // the bound itself is not allowed: > lower, < upper
  std::string_view choices;           // kOneOf: "0 | 1", "none | tanh"
};

// Where the rows of an op lie (Record::rows_text).
struct RowDimension {
  bool given = false;
  bool to_the_end = false;     // "axis:"
  std::int8_t attribute = -1;  // "dim", or
  std::int64_t value = 0;      // "-1"

  constexpr std::int64_t Of(const Attribute* attributes) const {
    return attribute >= 0 ? attributes[attribute].i : value;
  }
};

}  // namespace twinop
