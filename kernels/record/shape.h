// Shape expressions: the small closed language in which a record gives the shapes of its outputs
// and inputs. It is a subset of Python's expressions: twinop/shapes.py evaluates the same text on
// symbolic sizes.
//
//   shape   := term ('+' term)*
//   term    := input | input '[' int? ':' int? ']' | '[' int, ... ']' | broadcast(shape, shape)
//            | '(' shape ')'
//   int     := sum ('if' attribute '==' text 'else' int)?
//   sum     := product (('+' | '-') product)*       product := atom (('*' | '//') atom)*
//   atom    := '-' atom | number | attribute | attribute '[' int ']' | input '[' int ']'
//            | len(shape) | numel(shape) | '(' int ')'
//
// `attribute` has kind int or bool, kind int[] if it is indexed, or kind str before '=='. A text is
// a word in double quotes. The evaluation allocates no memory. Sizes that depend on unknown
// dimensions (during ORT's shape inference) are unknown.
#pragma once

#include "twinop/record/schema.h"

namespace twinop {

inline constexpr std::size_t kMaxRank = 32;

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

// The text of a str attribute, NUL-terminated.
struct Text {
  const char* data = "";
  std::size_t size = 0;

  constexpr Text() = default;
  constexpr Text(std::string_view text)  // NOLINT(google-explicit-constructor)
      : data(text.data()), size(text.size()) {}
  constexpr operator std::string_view() const { return {data, size}; }
  friend constexpr bool operator==(Text a, std::string_view b) { return std::string_view(a) == b; }
};

// twinop_attribute (kernels/abi.h) for C++.
struct Attribute {
  std::int64_t i = 0;                  // int, bool
  double f = 0;                        // float, rounded to fp32: ONNX has no other
  Text s;                              // str
  const std::int64_t* ints = nullptr;  // int[]
  std::size_t count = 0;               // entries of ints
};

// The shape of an absent optional input. It has no elements, and neither has its gradient.
inline constexpr Shape kAbsentShape = [] {
  Shape shape;
  shape.Push(Dim{0, nullptr});
  return shape;
}();

// The names that an expression may use. A null input is absent.
struct ShapeScope {
  const Schema* schema = nullptr;
  const Shape* const* inputs = nullptr;
  const Attribute* attributes = nullptr;
  bool has_values = true;  // of the attributes; false: sizes that depend on them are unknown
};

class ShapeExpression {
 public:
  constexpr ShapeExpression(std::string_view text, const ShapeScope& scope)
      : scan_(text), scope_(scope) {}

  // Throws const char* if the text does not parse or the sizes do not fit.
  constexpr Shape EvaluateShape() {
    Shape result = ParseShape();
    if (!scan_.AtEnd()) throw "a shape expression goes on after its end";
    if (result.IsTooLarge()) throw "a tensor would have too many elements";
    return result;
  }

 private:
  constexpr Shape ParseShape() {
    Shape result = ParseTerm();
    while (scan_.Accept("+")) {
      Shape more = ParseTerm();
      result.known_rank = result.known_rank && more.known_rank;
      for (std::size_t i = 0; i < more.rank; ++i) result.Push(more.dims[i]);
    }
    return result;
  }

  constexpr Shape ParseTerm() {
    Shape result;
    if (scan_.Accept("(")) {
      result = ParseShape();
      scan_.Expect(")");
      return result;
    }
    if (scan_.Accept("[")) {
      while (!scan_.Accept("]")) {
        Dim size = ParseInt();
        if (size.value < 0 && size.value != kUnknownSize) throw "a size would be negative";
        result.Push(size);
        if (scan_.Peek() != ']') scan_.Expect(",");
      }
      return result;
    }
    std::string_view name = scan_.Word();
    if (name == "broadcast") {
      scan_.Expect("(");
      Shape a = ParseShape();
      scan_.Expect(",");
      Shape b = ParseShape();
      scan_.Expect(")");
      return Broadcast(a, b);
    }
    const Shape& input = Input(name);
    if (!scan_.Accept("[")) return input;
    auto rank = static_cast<std::int64_t>(input.rank);
    Dim begin = scan_.Peek() == ':' ? Dim{0, nullptr} : ParseInt();
    scan_.Expect(":");
    Dim end = scan_.Peek() == ']' ? Dim{rank, nullptr} : ParseInt();
    scan_.Expect("]");
    result.known_rank =
        input.known_rank && begin.value != kUnknownSize && end.value != kUnknownSize;
    if (!result.known_rank) return result;
    for (std::int64_t i = Position(begin, rank); i < Position(end, rank); ++i)
      result.Push(input.dims[i]);
    return result;
  }

  // Python's rule for slice bounds.
  static constexpr std::int64_t Position(Dim dim, std::int64_t rank) {
    std::int64_t p = dim.value < 0 ? dim.value + rank : dim.value;
    return p < 0 ? 0 : (p > rank ? rank : p);
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

  constexpr Dim ParseInt() {
    const Dim result = ParseSum();
    if (!scan_.Accept("if")) return result;
    const int index = scope_.schema->FindAttribute(scan_.Word());
    if (index == Schema::kNotFound || scope_.schema->attribute(index).kind != Kind::kString)
      throw "a shape expression compares what is no str attribute";
    scan_.Expect("==");
    scan_.Expect("\"");
    const std::string_view text = scan_.Word();
    scan_.Expect("\"");
    scan_.Expect("else");
    const Dim other = ParseInt();
    return scope_.attributes[index].s == text ? result : other;
  }

  constexpr Dim ParseSum() {
    Dim result = ParseProduct();
    while (true) {
      if (scan_.Accept("+")) {
        result = Combine(result, ParseProduct(), '+');
      } else if (scan_.Accept("-")) {
        result = Combine(result, ParseProduct(), '-');
      } else {
        return result;
      }
    }
  }

  constexpr Dim ParseProduct() {
    Dim result = ParseAtom();
    while (true) {
      if (scan_.Accept("*")) {
        result = Combine(result, ParseAtom(), '*');
      } else if (scan_.Accept("//")) {
        result = Combine(result, ParseAtom(), '/');
      } else {
        return result;
      }
    }
  }

  constexpr Dim ParseAtom() {
    if (scan_.Accept("(")) {
      Dim result = ParseInt();
      scan_.Expect(")");
      return result;
    }
    if (scan_.Accept("-")) return Combine(Dim{0, nullptr}, ParseAtom(), '-');
    if (Scanner::IsDigit(scan_.Peek())) return Dim{scan_.Integer(), nullptr};
    std::string_view name = scan_.Word();
    if (name == "len" || name == "numel") {
      scan_.Expect("(");
      Shape shape = ParseShape();
      scan_.Expect(")");
      if (!shape.known_rank) return Unknown();
      if (name == "len") return Dim{static_cast<std::int64_t>(shape.rank), nullptr};
      Dim product{1, nullptr};
      for (std::size_t i = 0; i < shape.rank; ++i)
        product = Combine(product, shape.dims[i], '*', true);
      return product;
    }
    if (int index = scope_.schema->FindAttribute(name); index != Schema::kNotFound) {
      Kind kind = scope_.schema->attribute(index).kind;
      if (kind == Kind::kInt || kind == Kind::kBool) return OfAttribute(scope_.attributes[index].i);
      if (kind != Kind::kIntList)
        throw "a shape expression names an attribute that is no int, bool or int[]";
      const Attribute& list = scope_.attributes[index];
      Dim entry = ParseIndex(static_cast<std::int64_t>(list.count));
      if (entry.value == kUnknownSize) return entry;
      if (entry.value < 0) throw "an int[] attribute is too short";
      return OfAttribute(list.ints[entry.value]);
    }
    const Shape& input = Input(name);
    Dim axis = ParseIndex(static_cast<std::int64_t>(input.rank));
    if (!input.known_rank || axis.value == kUnknownSize) return Unknown();
    if (axis.value < 0) throw "an input has too few dimensions";
    const Dim& dim = input.dims[axis.value];
    return dim.known() ? dim : Unknown(dim.symbol);
  }

  // Parses "[i]", counted from the end if i < 0. Returns 0 to count - 1, unknown, or -1 if i lies
  // outside.
  constexpr Dim ParseIndex(std::int64_t count) {
    scan_.Expect("[");
    Dim index = ParseInt();
    scan_.Expect("]");
    if (index.value == kUnknownSize) return index;
    if (index.value < 0) index.value += count;
    if (index.value < 0 || index.value >= count) index.value = -1;
    return index;
  }

  constexpr const Shape& Input(std::string_view name) {
    int index = scope_.schema->FindInput(name);
    if (index == Schema::kNotFound)
      throw "a shape expression names no input or attribute of its op";
    return scope_.inputs[index] == nullptr ? kAbsentShape : *scope_.inputs[index];
  }

  // Sizes that depend on an unknown one are unknown.
  static constexpr Dim Unknown(const char* symbol = nullptr) { return Dim{kUnknownSize, symbol}; }
  static constexpr Dim Combine(Dim a, Dim b, char op, bool dims = false) {
    if (a.value == kUnknownSize || b.value == kUnknownSize || (dims && !b.known()))
      return Unknown();
    if (op != '/') {
      std::int64_t result = 0;
      if (!Calculate(a.value, op, b.value, &result) || result == kUnknownSize)
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
    if (!scope_.has_values) return Unknown();
    if (value == kUnknownSize) throw "a size does not fit in 64 bits";
    return Dim{value, nullptr};
  }

  Scanner scan_;
  ShapeScope scope_;
};

}  // namespace twinop
