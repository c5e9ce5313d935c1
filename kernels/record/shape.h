// Shape expressions: the small closed language in which a record gives the shapes of its outputs
// and inputs. It is a subset of Python's expressions over lists, as which twinop/record/shapes.py
// evaluates the same text on symbolic sizes.
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
// kind int[] if it is indexed, or kind str before '=='. A text is a word in double quotes. Texts
// are parsed once, when a record is made; calls evaluate trees, which allocates no memory. Sizes
// that depend on unknown dimensions (during ORT's shape inference) are unknown.
#pragma once

#include "twinop/abi.h"
#include "twinop/record/schema.h"

namespace twinop {

inline constexpr std::size_t kMaxRank = 32;
inline constexpr std::size_t kMaxSizes = 4;  // that come from the data, of one op

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

// The names of the sizes that come from the data.
struct SizeNames {
  std::string_view names[kMaxSizes] = {};
  std::size_t count = 0;

  constexpr int Find(std::string_view wanted) const {
    for (std::size_t i = 0; i < count; ++i)
      if (names[i] == wanted) return static_cast<int>(i);
    return Schema::kNotFound;
  }
};

// The shape of an absent optional input. It has no elements, and neither has its gradient.
inline constexpr Shape kAbsentShape = [] {
  Shape shape;
  shape.Push(Dim{0, nullptr});
  return shape;
}();

// An expression is a tree of these. Fields that an operation does not need are -1.
struct ShapeNode {
  enum Operation : std::uint8_t {
    // shapes
    kInput,      // of the input `index`
    kSlice,      // its dimensions from a to b
    kList,       // the size a, then the list b
    kConcat,     // a + b
    kBroadcast,  // of a and b
    // sizes
    kNumber,     // value
    kAttribute,  // of the int or bool `index`
    kEntry,      // the entry a of the int[] `index`
    kSize,       // the size `index` of those that come from the data
    kDimension,  // the size of the dimension a of the input `index`
    kLen,        // of the shape a
    kNumel,
    kAdd,
    kSubtract,
    kMultiply,
    kDivide,
    kIf,  // a if the str `index` is `text`, else b
  };
  Operation operation = kList;
  std::int8_t index = -1;
  std::int8_t a = -1, b = -1;
  std::int64_t value = 0;  // of kSlice and kDimension: how many dimensions the input must have
  std::string_view text;
};

// The expressions of a record. A tree is the index of its root.
struct ShapeTrees {
  static constexpr std::size_t kCapacity = 96;
  ShapeNode nodes[kCapacity] = {};
  std::int8_t count = 0;

  constexpr const ShapeNode& operator[](std::int8_t at) const {
    return nodes[static_cast<std::size_t>(at)];
  }

  // Whether an expression is the last dimensions of an input: "x", "x[2:]" or "x[axis:]".
  constexpr bool IsSuffix(std::int8_t root) const {
    const ShapeNode& node = (*this)[root];
    if (node.operation != ShapeNode::kSlice) return node.operation == ShapeNode::kInput;
    if (node.a < 0 || node.b >= 0) return false;
    const auto begin = (*this)[node.a].operation;
    return begin == ShapeNode::kNumber || begin == ShapeNode::kAttribute;
  }
  // The first of these dimensions.
  constexpr std::size_t Begin(std::int8_t root, const Attribute* attributes,
                              std::size_t rank) const {
    const ShapeNode& node = (*this)[root];
    if (node.operation == ShapeNode::kInput) return 0;
    const ShapeNode& begin = (*this)[node.a];
    const bool is_number = begin.operation == ShapeNode::kNumber;
    return static_cast<std::size_t>(Position(is_number ? begin.value : attributes[begin.index].i,
                                             static_cast<std::int64_t>(rank)));
  }
};

// Parses one expression. Throws const char* if it does not parse.
class ShapeParser {
 public:
  // `own` is the input whose required shape this is, or -1. `sizes` are the names of sizes that
  // come from the data, which only outputs have.
  constexpr ShapeParser(std::string_view text, const Schema& schema, int own, ShapeTrees* trees,
                        const SizeNames& sizes = {})
      : scan_(text), schema_(schema), own_(own), trees_(*trees), sizes_(sizes) {}

  constexpr std::int8_t Parse() {
    const std::int8_t root = ParseShape();
    if (!scan_.AtEnd()) throw "a shape expression goes on after its end";
    return root;
  }

  // A size, as the shape that has only this one.
  constexpr std::int8_t ParseSize() {
    const std::int8_t size = ParseInt();
    if (!scan_.AtEnd()) throw "a size expression goes on after its end";
    const std::int8_t end = Add(Node::kList);
    return Add(Node::kList, -1, size, end);
  }

 private:
  using Node = ShapeNode;

  constexpr std::int8_t ParseShape() {
    std::int8_t result = ParseTerm();
    while (scan_.Accept("+")) {
      const std::int8_t more = ParseTerm();
      result = Add(Node::kConcat, -1, result, more);
    }
    return result;
  }

  constexpr std::int8_t ParseTerm() {
    if (scan_.Accept("(")) {
      const std::int8_t result = ParseShape();
      scan_.Expect(")");
      return result;
    }
    if (scan_.Accept("[")) return ParseList();
    const std::string_view name = scan_.Word();
    if (name == "broadcast") {
      scan_.Expect("(");
      const std::int8_t a = ParseShape();
      scan_.Expect(",");
      const std::int8_t b = ParseShape();
      scan_.Expect(")");
      return Add(Node::kBroadcast, -1, a, b);
    }
    const std::int8_t input = Input(name);
    if (!scan_.Accept("[")) return Add(Node::kInput, input);
    const std::int8_t begin = scan_.Peek() == ':' ? kNone : ParseInt();
    scan_.Expect(":");
    const std::int8_t end = scan_.Peek() == ']' ? kNone : ParseInt();
    scan_.Expect("]");
    // `x[:-2] + ...` as the shape of x itself needs two dimensions.
    const bool needs = input == own_ && end != kNone && trees_[end].operation == Node::kNumber;
    const std::int64_t needed = needs && trees_[end].value < 0 ? -trees_[end].value : 0;
    return Add(Node::kSlice, input, begin, end, needed);
  }

  constexpr std::int8_t ParseList() {
    if (scan_.Accept("]")) return Add(Node::kList);
    const std::int8_t size = ParseInt();
    if (scan_.Peek() != ']') scan_.Expect(",");
    const std::int8_t rest = ParseList();
    return Add(Node::kList, -1, size, rest);
  }

  constexpr std::int8_t ParseInt() {
    const std::int8_t result = ParseSum();
    if (!scan_.Accept("if")) return result;
    const int index = schema_.FindAttribute(scan_.Word());
    if (index == Schema::kNotFound || schema_.attribute(index).kind != Kind::kString)
      throw "a shape expression compares what is no str attribute";
    scan_.Expect("==");
    scan_.Expect("\"");
    const std::string_view text = scan_.Word();
    scan_.Expect("\"");
    scan_.Expect("else");
    const std::int8_t other = ParseInt();
    return Add(Node::kIf, static_cast<std::int8_t>(index), result, other, 0, text);
  }

  constexpr std::int8_t ParseSum() {
    std::int8_t result = ParseProduct();
    while (scan_.Peek() == '+' || scan_.Peek() == '-') {
      const Node::Operation operation = scan_.Accept("+") ? Node::kAdd : Node::kSubtract;
      if (operation == Node::kSubtract) scan_.Expect("-");
      const std::int8_t more = ParseProduct();
      result = Add(operation, -1, result, more);
    }
    return result;
  }

  constexpr std::int8_t ParseProduct() {
    std::int8_t result = ParseAtom();
    while (scan_.Peek() == '*' || scan_.Peek() == '/') {
      const Node::Operation operation = scan_.Accept("*") ? Node::kMultiply : Node::kDivide;
      if (operation == Node::kDivide) scan_.Expect("//");
      const std::int8_t more = ParseAtom();
      result = Add(operation, -1, result, more);
    }
    return result;
  }

  constexpr std::int8_t ParseAtom() {
    if (scan_.Accept("(")) {
      const std::int8_t result = ParseInt();
      scan_.Expect(")");
      return result;
    }
    if (scan_.Accept("-")) {
      if (Scanner::IsDigit(scan_.Peek())) return Number(-scan_.Integer());
      const std::int8_t zero = Number(0), atom = ParseAtom();
      return Add(Node::kSubtract, -1, zero, atom);
    }
    if (Scanner::IsDigit(scan_.Peek())) return Number(scan_.Integer());
    const std::string_view name = scan_.Word();
    if (name == "len" || name == "numel") {
      scan_.Expect("(");
      const std::int8_t shape = ParseShape();
      scan_.Expect(")");
      return Add(name == "len" ? Node::kLen : Node::kNumel, -1, shape);
    }
    if (const int index = sizes_.Find(name); index != Schema::kNotFound)
      return Add(Node::kSize, static_cast<std::int8_t>(index));
    if (const int index = schema_.FindAttribute(name); index != Schema::kNotFound) {
      const Kind kind = schema_.attribute(index).kind;
      const auto attribute = static_cast<std::int8_t>(index);
      if (kind == Kind::kInt || kind == Kind::kBool) return Add(Node::kAttribute, attribute);
      if (kind != Kind::kIntList)
        throw "a shape expression names an attribute that is no int, bool or int[]";
      const std::int8_t entry = ParseIndex();
      return Add(Node::kEntry, attribute, entry);
    }
    const std::int8_t input = Input(name), axis = ParseIndex();
    const std::int64_t i = trees_[axis].operation == Node::kNumber ? trees_[axis].value : -1;
    const bool is_number = trees_[axis].operation == Node::kNumber;
    return Add(Node::kDimension, input, axis, kNone, !is_number ? 0 : i < 0 ? -i : i + 1);
  }

  constexpr std::int8_t ParseIndex() {
    scan_.Expect("[");
    const std::int8_t index = ParseInt();
    scan_.Expect("]");
    return index;
  }

  constexpr std::int8_t Number(std::int64_t value) {
    return Add(Node::kNumber, -1, kNone, kNone, value);
  }

  constexpr std::int8_t Add(Node::Operation operation, std::int8_t index = -1,
                            std::int8_t a = kNone, std::int8_t b = kNone, std::int64_t value = 0,
                            std::string_view text = {}) {
    if (trees_.count == ShapeTrees::kCapacity) throw "the shapes of a record are too long";
    trees_.nodes[static_cast<std::size_t>(trees_.count)] = {operation, index, a, b, value, text};
    return trees_.count++;
  }

  constexpr std::int8_t Input(std::string_view name) const {
    const int index = schema_.FindInput(name);
    if (index == Schema::kNotFound)
      throw "a shape expression names no input or attribute of its op, and no size of .sizes before it";
    return static_cast<std::int8_t>(index);
  }

  static constexpr std::int8_t kNone = -1;
  Scanner scan_;
  const Schema& schema_;
  int own_;
  ShapeTrees& trees_;
  const SizeNames sizes_;
};

// Evaluates expressions for one call. Throws const char* if the sizes do not fit.
struct ShapeScope {
  const ShapeTrees& trees;
  const Shape* const* inputs;  // null: absent
  const Attribute* attributes;
  bool has_values = true;  // of the attributes; false: sizes that depend on them are unknown
  const std::int64_t* sizes = nullptr;  // that come from the data; null: unknown

  constexpr Shape Evaluate(std::int8_t root) const {
    const Shape result = ShapeOf(root);
    if (result.IsTooLarge()) throw "a tensor would have too many elements";
    return result;
  }

 private:
  using Node = ShapeNode;

  constexpr Shape ShapeOf(std::int8_t at) const {
    const Node& node = trees[at];
    if (node.operation == Node::kInput) return Input(node);
    if (node.operation == Node::kSlice) return Slice(node);
    if (node.operation == Node::kBroadcast) return Broadcast(ShapeOf(node.a), ShapeOf(node.b));
    if (node.operation == Node::kConcat) {
      Shape result = ShapeOf(node.a);
      const Shape more = ShapeOf(node.b);
      result.known_rank = result.known_rank && more.known_rank;
      for (std::size_t i = 0; i < more.rank; ++i) result.Push(more.dims[i]);
      return result;
    }
    Shape result;
    for (std::int8_t i = at; trees[i].a >= 0; i = trees[i].b) {
      const Dim size = SizeOf(trees[i].a);
      if (size.value < 0 && size.value != kUnknownSize) throw "a size would be negative";
      result.Push(size);
    }
    return result;
  }

  constexpr Shape Slice(const Node& node) const {
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

  constexpr Dim SizeOf(std::int8_t at) const {
    const Node& node = trees[at];
    switch (node.operation) {
      case Node::kNumber:
        return Dim{node.value, nullptr};
      case Node::kAttribute:
        return OfAttribute(attributes[node.index].i);
      case Node::kEntry: {
        const Attribute& list = attributes[node.index];
        const Dim entry = Index(node.a, list.count);
        if (entry.value == kUnknownSize) return entry;
        if (entry.value < 0) throw "an int[] attribute is too short";
        return OfAttribute(list.ints[entry.value]);
      }
      case Node::kSize:
        return sizes == nullptr ? Unknown() : Dim{sizes[node.index], nullptr};
      case Node::kDimension: {
        const Shape& input = Input(node);
        const Dim axis = Index(node.a, input.rank);
        if (!input.known_rank || axis.value == kUnknownSize) return Unknown();
        if (axis.value < 0) throw "an input has too few dimensions";
        const Dim& dim = input.dims[axis.value];
        return dim.known() ? dim : Unknown(dim.symbol);
      }
      case Node::kLen: {
        const Shape shape = ShapeOf(node.a);
        return shape.known_rank ? Dim{static_cast<std::int64_t>(shape.rank), nullptr} : Unknown();
      }
      case Node::kNumel: {
        const Shape shape = ShapeOf(node.a);
        Dim product = shape.known_rank ? Dim{1, nullptr} : Unknown();
        for (std::size_t i = 0; i < shape.rank; ++i)
          product = shape.dims[i].known() ? Combine(product, shape.dims[i], '*') : Unknown();
        return product;
      }
      case Node::kIf:
        return SizeOf(attributes[node.index].text() == node.text ? node.a : node.b);
      default:
        return Combine(SizeOf(node.a), SizeOf(node.b), "+-*/"[node.operation - Node::kAdd]);
    }
  }

  // An index is counted from the end if it is negative. Returns 0 to count - 1, unknown, or -1 if
  // it lies outside.
  constexpr Dim Index(std::int8_t at, std::size_t count) const {
    const auto end = static_cast<std::int64_t>(count);
    Dim index = SizeOf(at);
    if (index.value == kUnknownSize) return index;
    if (index.value < 0) index.value += end;
    if (index.value < 0 || index.value >= end) index.value = -1;
    return index;
  }

  constexpr const Shape& Input(const Node& node) const {
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
