// Output shapes and scratch sizes, as the record writes them: a small closed language, a subset of
// Python's expressions, so that Python evaluates the same text on symbolic sizes (twinop/record.py).
//
//   shape   := term ('+' term)*
//   term    := input | input '[' int? ':' int? ']' | '[' int, ... ']' | broadcast(shape, shape)
//   int     := product (('+' | '-') product)*       product := atom (('*' | '//') atom)*
//   atom    := number | attribute | input '[' int ']' | len(shape) | numel(shape) | '(' int ')'
//
// Evaluated on every call, without allocation; unknown dimensions (graph-time inference) stay unknown.
#pragma once

#include "kernels/schema.h"

namespace twinop {

inline constexpr std::size_t kMaxRank = 32;

struct Dim {
  std::int64_t value = -1;       // < 0: not known
  const char* symbol = nullptr;  // its name in the graph, where it has one

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
};

struct Attribute {
  std::int64_t i = 0;  // int, bool
  double f = 0;        // float, narrowed to fp32 (ONNX has no other)
  std::string_view s;  // str
  std::int64_t ints[kMaxList] = {};
  std::size_t count = 0;  // of ints
};

// What an expression can name. A null input is absent.
struct ShapeScope {
  const Schema* schema = nullptr;
  const Shape* const* inputs = nullptr;
  const Attribute* attributes = nullptr;
};

class ShapeExpression {
 public:
  constexpr ShapeExpression(std::string_view text, const ShapeScope& scope) : scan_(text), scope_(scope) {}

  // Throws (const char*) where the text does not parse or the sizes do not fit.
  constexpr Shape EvaluateShape() {
    Shape result = ParseShape();
    if (!scan_.AtEnd()) throw "a shape expression goes on after its end";
    return result;
  }
  constexpr std::int64_t EvaluateInt() {
    Dim result = ParseSum();
    if (!scan_.AtEnd()) throw "a size expression goes on after its end";
    return result.value;
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
    if (scan_.Accept("[")) {
      do {
        result.Push(ParseSum());
      } while (scan_.Accept(","));
      scan_.Expect("]");
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
    std::int64_t begin = scan_.Peek() == ':' ? 0 : Position(ParseSum(), rank);
    scan_.Expect(":");
    std::int64_t end = scan_.Peek() == ']' ? rank : Position(ParseSum(), rank);
    scan_.Expect("]");
    result.known_rank = input.known_rank;
    for (std::int64_t i = begin; i < end && input.known_rank; ++i) result.Push(input.dims[i]);
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
        x = Dim{};  // either could be the 1
      }
    }
    return result;
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
      Dim result = ParseSum();
      scan_.Expect(")");
      return result;
    }
    if (scan_.Peek() == '-' || Scanner::IsDigit(scan_.Peek())) {
      return Dim{scan_.Integer(), nullptr};
    }
    std::string_view name = scan_.Word();
    if (name == "len" || name == "numel") {
      scan_.Expect("(");
      Shape shape = ParseShape();
      scan_.Expect(")");
      if (!shape.known_rank) return Unknown();
      if (name == "len") return Dim{static_cast<std::int64_t>(shape.rank), nullptr};
      Dim product{1, nullptr};
      for (std::size_t i = 0; i < shape.rank; ++i) product = Combine(product, shape.dims[i], '*', true);
      return product;
    }
    if (int index = scope_.schema->FindAttribute(name); index != Schema::kNotFound) {
      if (scope_.schema->attribute(index).kind != Kind::kIntList) {
        return Dim{scope_.attributes[index].i, nullptr};
      }
      scan_.Expect("[");
      std::int64_t entry = ParseSum().value;
      scan_.Expect("]");
      const Attribute& list = scope_.attributes[index];
      if (entry < 0 || entry >= static_cast<std::int64_t>(list.count)) throw "an int[] attribute is too short";
      return Dim{list.ints[entry], nullptr};
    }
    const Shape& input = Input(name);
    scan_.Expect("[");
    std::int64_t axis = ParseSum().value;
    scan_.Expect("]");
    if (!input.known_rank) return Unknown();
    if (axis < 0) axis += static_cast<std::int64_t>(input.rank);
    if (axis < 0 || axis >= static_cast<std::int64_t>(input.rank)) throw "an input has too few dimensions";
    return input.dims[axis].known() ? input.dims[axis] : Unknown(input.dims[axis].symbol);
  }

  constexpr const Shape& Input(std::string_view name) {
    int index = scope_.schema->FindInput(name);
    if (index == Schema::kNotFound) throw "a shape expression names no input or attribute of its op";
    if (scope_.inputs[index] == nullptr) throw "a shape expression names an input that is absent";
    return *scope_.inputs[index];
  }

  // Sizes that depend on an unknown one are unknown. A literal may be negative (x[:-1]), so the mark
  // for unknown is a value that no literal has.
  static constexpr std::int64_t kUnknown = INT64_MIN;
  static constexpr Dim Unknown(const char* symbol = nullptr) { return Dim{kUnknown, symbol}; }
  static constexpr Dim Combine(Dim a, Dim b, char op, bool dims = false) {
    if (a.value == kUnknown || b.value == kUnknown || (dims && !b.known())) return Unknown();
    switch (op) {
      case '+': return Dim{a.value + b.value, nullptr};
      case '-': return Dim{a.value - b.value, nullptr};
      case '*': return Dim{a.value * b.value, nullptr};
      default:
        if (b.value == 0) throw "a size expression divides by zero";
        // Python's //: rounds towards minus infinity.
        return Dim{a.value / b.value - ((a.value % b.value != 0) && ((a.value < 0) != (b.value < 0)) ? 1 : 0),
                   nullptr};
    }
  }

  Scanner scan_;
  ShapeScope scope_;
};

}  // namespace twinop
