// Shape expressions: the small closed language in which a record gives the shapes of its outputs
// and inputs. It is a subset of Python's expressions over lists, and twinop/record/shapes.py
// evaluates the same trees on symbolic sizes.
//
//   shape   := term ('+' term)*
//   term    := input | input '[' int? ':' int? ']' | '[' int, ... ']' | broadcast(shape, shape)
//            | '(' shape ')'
//   int     := sum ('if' attribute '==' text 'else' int)?
//   sum     := product (('+' | '-') product)*       product := atom (('*' | '//') atom)*
//   atom    := '-' atom | number | attribute | attribute '[' int ']' | input '[' int ']' | size
//            | len(shape) | numel(shape) | '(' int ')'
//
// `size` is one of Record::sizes_text, which a kernel counts. `attribute` has kind int or bool,
// kind int[] if it is indexed, or kind str before '=='. A text is a word in double quotes. parse.h
// makes trees of the texts; calls evaluate trees, which allocates no memory. Sizes that depend on
// unknown dimensions (during ORT's shape inference) are unknown.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "twinop/abi.h"

namespace twinop {

inline constexpr std::size_t kMaxRank = 32;
inline constexpr std::size_t kMaxArguments = TWINOP_MAX_ARGUMENTS;
inline constexpr std::size_t kMaxOutputs = TWINOP_MAX_OUTPUTS;
inline constexpr std::size_t kMaxList = TWINOP_MAX_LIST;

constexpr std::string_view View(const twinop_text& text) { return {text.data, text.size}; }

// The value of an expression over unknown sizes. (Intermediate values may be negative: x[:-1].)
inline constexpr std::int64_t kUnknownSize = INT64_MIN;

// Computes a op b of '+', '-' and '*'. Returns whether the result fits: sizes come from files.
constexpr bool Calculate(std::int64_t a, char op, std::int64_t b, std::int64_t* result) {
  return !(op == '+'   ? __builtin_add_overflow(a, b, result)
           : op == '-' ? __builtin_sub_overflow(a, b, result)
                       : __builtin_mul_overflow(a, b, result));
}
// a * b, or INT64_MAX where it does not fit.
constexpr std::int64_t Times(std::int64_t a, std::int64_t b) {
  std::int64_t product = 0;
  return Calculate(a, '*', b, &product) ? product : INT64_MAX;
}

constexpr std::int64_t Numel(const std::int64_t* sizes, std::size_t rank) {
  std::int64_t numel = 1;
  for (std::size_t i = 0; i < rank; ++i) numel = Times(numel, sizes[i]);
  return numel;
}

struct Dim {
  std::int64_t value = -1;       // negative: unknown
  const char* symbol = nullptr;  // its name in the graph, or null

  constexpr bool known() const { return value >= 0; }
};

struct Shape {
  Dim dims[kMaxRank] = {};
  std::size_t rank = 0;
  bool known_rank = true;

  constexpr void Push(Dim dim) {
    if (rank == kMaxRank) throw "a shape has too many dimensions";
    dims[rank++] = dim;
  }
  // Whether the strides or the bytes, 16 an element at most, may not fit in 64 bits.
  constexpr bool IsTooLarge() const {
    std::int64_t bytes = 16;
    for (std::size_t i = 0; i < rank; ++i)
      if (dims[i].value > 0) bytes = Times(bytes, dims[i].value);
    return bytes == INT64_MAX;
  }
};

// The value of an attribute.
struct Attribute : twinop_attribute {
  constexpr Attribute() : twinop_attribute{} {}
  constexpr std::string_view text() const { return {s, s_size}; }
  constexpr void set_text(std::string_view text) {  // NUL-terminated
    s = text.data();
    s_size = text.size();
  }
};

// Python's rule for slice bounds.
constexpr std::int64_t Position(std::int64_t index, std::int64_t rank) {
  if (index < 0) index += rank;
  return index < 0 ? 0 : (index > rank ? rank : index);
}

// The shape of an absent optional input. It has no elements, and neither has its gradient.
inline constexpr Shape kAbsentShape = [] {
  Shape shape;
  shape.Push(Dim{0, nullptr});
  return shape;
}();

// Whether an expression is the last dimensions of an input: "x", "x[2:]" or "x[axis:]".
constexpr bool IsSuffix(const twinop_node* nodes, std::int32_t root) {
  const twinop_node& node = nodes[root];
  if (node.operation != TWINOP_SLICE) return node.operation == TWINOP_SHAPE;
  if (node.a < 0 || node.b >= 0) return false;
  const auto begin = nodes[node.a].operation;
  return begin == TWINOP_NUMBER || begin == TWINOP_ATTRIBUTE;
}
// The first of these dimensions.
constexpr std::size_t SuffixBegin(const twinop_node* nodes, std::int32_t root,
                                  const Attribute* attributes, std::size_t rank) {
  if (nodes[root].operation == TWINOP_SHAPE) return 0;
  const twinop_node& begin = nodes[nodes[root].a];
  const bool is_number = begin.operation == TWINOP_NUMBER;
  return static_cast<std::size_t>(Position(is_number ? begin.value : attributes[begin.index].i,
                                           static_cast<std::int64_t>(rank)));
}

// Evaluates expressions for one call. Throws const char* if the sizes do not fit.
struct ShapeScope {
  const twinop_node* nodes;
  const Shape* const* inputs;  // null: absent
  const Attribute* attributes;
  bool has_values = true;  // of the attributes; false: sizes that depend on them are unknown
  const std::int64_t* sizes = nullptr;  // that come from the data; null: unknown

  constexpr Shape Evaluate(std::int32_t root) const {
    const Shape result = ShapeOf(root);
    if (result.IsTooLarge()) throw "a tensor would have too many elements";
    return result;
  }

 private:
  constexpr Shape ShapeOf(std::int32_t at) const {
    const twinop_node& node = nodes[at];
    if (node.operation == TWINOP_SHAPE) return Input(node);
    if (node.operation == TWINOP_SLICE) return Slice(node);
    if (node.operation == TWINOP_BROADCAST) return Broadcast(ShapeOf(node.a), ShapeOf(node.b));
    if (node.operation == TWINOP_CONCAT) {
      Shape result = ShapeOf(node.a);
      const Shape more = ShapeOf(node.b);
      result.known_rank = result.known_rank && more.known_rank;
      for (std::size_t i = 0; i < more.rank; ++i) result.Push(more.dims[i]);
      return result;
    }
    Shape result;
    for (std::int32_t i = at; nodes[i].a >= 0; i = nodes[i].b) {
      const Dim size = SizeOf(nodes[i].a);
      if (size.value < 0 && size.value != kUnknownSize) throw "a size would be negative";
      result.Push(size);
    }
    return result;
  }

  constexpr Shape Slice(const twinop_node& node) const {
    const Shape& input = Input(node);
    const auto rank = static_cast<std::int64_t>(input.rank);
    const Dim begin = node.a < 0 ? Dim{0, nullptr} : SizeOf(node.a);
    const Dim end = node.b < 0 ? Dim{rank, nullptr} : SizeOf(node.b);
    Shape result;
    result.known_rank =
        input.known_rank && begin.value != kUnknownSize && end.value != kUnknownSize;
    if (!result.known_rank) return result;
    for (std::int64_t i = Position(begin.value, rank); i < Position(end.value, rank); ++i)
      result.Push(input.dims[i]);
    return result;
  }

  static constexpr Shape Broadcast(const Shape& a, const Shape& b) {
    const Shape& wide = a.rank >= b.rank ? a : b;
    const Shape& narrow = a.rank >= b.rank ? b : a;
    Shape result = wide;
    result.known_rank = a.known_rank && b.known_rank;
    for (std::size_t i = 0; i < narrow.rank; ++i) {
      Dim& x = result.dims[wide.rank - narrow.rank + i];
      Dim y = narrow.dims[i];
      if (x.value == 1) {
        x = y;
      } else if (y.known() && y.value != 1) {
        if (x.known() && x.value != y.value) throw "the inputs' shapes do not broadcast";
        x = y;
      } else if (!y.known() && !x.known()) {
        // Two sizes of one name are equal. Otherwise either of them may be 1.
        if (x.symbol == nullptr || y.symbol == nullptr ||
            std::string_view(x.symbol) != std::string_view(y.symbol))
          x = Dim{};
      }
    }
    return result;
  }

  constexpr Dim SizeOf(std::int32_t at) const {
    const twinop_node& node = nodes[at];
    switch (node.operation) {
      case TWINOP_NUMBER:
        return Dim{node.value, nullptr};
      case TWINOP_ATTRIBUTE:
        return OfAttribute(attributes[node.index].i);
      case TWINOP_ENTRY: {
        const Attribute& list = attributes[node.index];
        const Dim entry = Index(node.a, list.count);
        if (entry.value == kUnknownSize) return entry;
        if (entry.value < 0) throw "an int[] attribute is too short";
        return OfAttribute(list.ints[entry.value]);
      }
      case TWINOP_SIZE:
        return sizes == nullptr ? Unknown() : Dim{sizes[node.index], nullptr};
      case TWINOP_DIMENSION: {
        const Shape& input = Input(node);
        const Dim axis = Index(node.a, input.rank);
        if (!input.known_rank || axis.value == kUnknownSize) return Unknown();
        if (axis.value < 0) throw "an input has too few dimensions";
        const Dim& dim = input.dims[axis.value];
        return dim.known() ? dim : Unknown(dim.symbol);
      }
      case TWINOP_LEN: {
        const Shape shape = ShapeOf(node.a);
        return shape.known_rank ? Dim{static_cast<std::int64_t>(shape.rank), nullptr} : Unknown();
      }
      case TWINOP_NUMEL: {
        const Shape shape = ShapeOf(node.a);
        Dim product = shape.known_rank ? Dim{1, nullptr} : Unknown();
        for (std::size_t i = 0; i < shape.rank; ++i)
          product = shape.dims[i].known() ? Combine(product, shape.dims[i], '*') : Unknown();
        return product;
      }
      case TWINOP_IF:
        return SizeOf(attributes[node.index].text() == View(node.text) ? node.a : node.b);
      default:
        return Combine(SizeOf(node.a), SizeOf(node.b), "+-*/"[node.operation - TWINOP_ADD]);
    }
  }

  // An index is counted from the end if it is negative. Returns 0 to count - 1, unknown, or -1 if
  // it lies outside.
  constexpr Dim Index(std::int32_t at, std::size_t count) const {
    const auto end = static_cast<std::int64_t>(count);
    Dim index = SizeOf(at);
    if (index.value == kUnknownSize) return index;
    if (index.value < 0) index.value += end;
    if (index.value < 0 || index.value >= end) index.value = -1;
    return index;
  }

  constexpr const Shape& Input(const twinop_node& node) const {
    return inputs[node.index] == nullptr ? kAbsentShape : *inputs[node.index];
  }

  // Sizes that depend on an unknown one are unknown.
  static constexpr Dim Unknown(const char* symbol = nullptr) { return Dim{kUnknownSize, symbol}; }
  static constexpr Dim Combine(Dim a, Dim b, char operation) {
    if (a.value == kUnknownSize || b.value == kUnknownSize) return Unknown();
    if (operation != '/') {
      std::int64_t result = 0;
      if (!Calculate(a.value, operation, b.value, &result) || result == kUnknownSize)
        throw "a size does not fit in 64 bits";
      return Dim{result, nullptr};
    }
    if (b.value == 0) throw "a size expression divides by zero";
    // As Python's //, rounds towards minus infinity. (No value is INT64_MIN, which -1 cannot
    // divide.)
    return Dim{
        a.value / b.value - ((a.value % b.value != 0) && ((a.value < 0) != (b.value < 0)) ? 1 : 0),
        nullptr};
  }
  constexpr Dim OfAttribute(std::int64_t value) const {
    if (!has_values) return Unknown();
    if (value == kUnknownSize) throw "a size does not fit in 64 bits";
    return Dim{value, nullptr};
  }
};

}  // namespace twinop
