// Parses the shape expressions of a record, whose language shape.h has, at compile time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "twinop/record/op_spec.h"
#include "twinop/record/scanner.h"

namespace twinop {

constexpr twinop_text Text(std::string_view text) { return {text.data(), text.size()}; }

// Parses one expression. Returns its root.
class ShapeParser {
 public:
  // `own` is the input whose required shape this is, or -1. `size_count` sizes that come from the
  // data may occur.
  constexpr ShapeParser(std::string_view text, OpSpec* op, int own = kNone,
                        std::size_t size_count = 0)
      : scan_(text), op_(*op), own_(own), size_count_(size_count) {}

  constexpr int Parse() {
    const int root = ParseShape();
    if (!scan_.AtEnd()) throw "a shape expression goes on after its end";
    return root;
  }

  // A size, as the shape that has only this one.
  constexpr int ParseSize() {
    const int size = ParseInt();
    if (!scan_.AtEnd()) throw "a size expression goes on after its end";
    const int end = Add(TWINOP_LIST);
    return Add(TWINOP_LIST, -1, size, end);
  }

 private:
  constexpr int ParseShape() {
    int result = ParseTerm();
    while (scan_.Accept("+")) {
      const int more = ParseTerm();
      result = Add(TWINOP_CONCAT, -1, result, more);
    }
    return result;
  }

  constexpr int ParseTerm() {
    if (scan_.Accept("(")) {
      const int result = ParseShape();
      scan_.Expect(")");
      return result;
    }
    if (scan_.Accept("[")) return ParseList();
    const std::string_view name = scan_.Word();
    if (name == "broadcast") {
      scan_.Expect("(");
      const int a = ParseShape();
      scan_.Expect(",");
      const int b = ParseShape();
      scan_.Expect(")");
      return Add(TWINOP_BROADCAST, -1, a, b);
    }
    const int input = Input(name);
    if (!scan_.Accept("[")) return Add(TWINOP_SHAPE, input);
    const int begin = scan_.Peek() == ':' ? kNone : ParseInt();
    scan_.Expect(":");
    const int end = scan_.Peek() == ']' ? kNone : ParseInt();
    scan_.Expect("]");
    // `x[:-2] + ...` as the shape of x itself needs two dimensions.
    const bool needs = input == own_ && end != kNone && op_.nodes[end].operation == TWINOP_NUMBER;
    const std::int64_t needed = needs && op_.nodes[end].value < 0 ? -op_.nodes[end].value : 0;
    return Add(TWINOP_SLICE, input, begin, end, needed);
  }

  constexpr int ParseList() {
    if (scan_.Accept("]")) return Add(TWINOP_LIST);
    const int size = ParseInt();
    if (scan_.Peek() != ']') scan_.Expect(",");
    const int rest = ParseList();
    return Add(TWINOP_LIST, -1, size, rest);
  }

  constexpr int ParseInt() {
    const int result = ParseSum();
    if (!scan_.Accept("if")) return result;
    const int index = op_.FindAttribute(scan_.Word());
    if (index == OpSpec::kNotFound || op_.attribute(index).kind != Kind::kString)
      throw "a shape expression compares what is no str attribute";
    scan_.Expect("==");
    scan_.Expect("\"");
    const std::string_view text = scan_.Word();
    scan_.Expect("\"");
    scan_.Expect("else");
    const int other = ParseInt();
    return Add(TWINOP_IF, index, result, other, 0, text);
  }

  constexpr int ParseSum() {
    int result = ParseProduct();
    while (scan_.Peek() == '+' || scan_.Peek() == '-') {
      const int operation = scan_.Accept("+") ? TWINOP_ADD : TWINOP_SUBTRACT;
      if (operation == TWINOP_SUBTRACT) scan_.Expect("-");
      const int more = ParseProduct();
      result = Add(operation, -1, result, more);
    }
    return result;
  }

  constexpr int ParseProduct() {
    int result = ParseAtom();
    while (scan_.Peek() == '*' || scan_.Peek() == '/') {
      const int operation = scan_.Accept("*") ? TWINOP_MULTIPLY : TWINOP_DIVIDE;
      if (operation == TWINOP_DIVIDE) scan_.Expect("//");
      const int more = ParseAtom();
      result = Add(operation, -1, result, more);
    }
    return result;
  }

  constexpr int ParseAtom() {
    if (scan_.Accept("(")) {
      const int result = ParseInt();
      scan_.Expect(")");
      return result;
    }
    if (scan_.Accept("-")) {
      if (Scanner::IsDigit(scan_.Peek())) return Number(-scan_.Integer());
      const int zero = Number(0), atom = ParseAtom();
      return Add(TWINOP_SUBTRACT, -1, zero, atom);
    }
    if (Scanner::IsDigit(scan_.Peek())) return Number(scan_.Integer());
    const std::string_view name = scan_.Word();
    if (name == "len" || name == "numel") {
      scan_.Expect("(");
      const int shape = ParseShape();
      scan_.Expect(")");
      return Add(name == "len" ? TWINOP_LEN : TWINOP_NUMEL, -1, shape);
    }
    if (const int index = OpSpec::Find(op_.sizes, size_count_, name); index != OpSpec::kNotFound)
      return Add(TWINOP_SIZE, index);
    if (const int index = op_.FindAttribute(name); index != OpSpec::kNotFound) {
      const Kind kind = op_.attribute(index).kind;
      if (kind == Kind::kInt || kind == Kind::kBool) return Add(TWINOP_ATTRIBUTE, index);
      if (kind != Kind::kIntList)
        throw "a shape expression names an attribute that is no int, bool or int[]";
      const int entry = ParseIndex();
      return Add(TWINOP_ENTRY, index, entry);
    }
    const int input = Input(name), axis = ParseIndex();
    const std::int64_t i = op_.nodes[axis].operation == TWINOP_NUMBER ? op_.nodes[axis].value : -1;
    const bool is_number = op_.nodes[axis].operation == TWINOP_NUMBER;
    return Add(TWINOP_DIMENSION, input, axis, kNone, !is_number ? 0 : i < 0 ? -i : i + 1);
  }

  constexpr int ParseIndex() {
    scan_.Expect("[");
    const int index = ParseInt();
    scan_.Expect("]");
    return index;
  }

  constexpr int Number(std::int64_t value) { return Add(TWINOP_NUMBER, -1, kNone, kNone, value); }

  constexpr int Add(int operation, int index = kNone, int a = kNone, int b = kNone,
                    std::int64_t value = 0, std::string_view text = {}) {
    if (op_.node_count == TWINOP_MAX_NODES) throw "the shapes of a record are too long";
    const auto link = [](int at) { return static_cast<std::int8_t>(at); };
    op_.nodes[op_.node_count] = {link(operation), link(index), link(a), link(b), value, Text(text)};
    return static_cast<int>(op_.node_count++);
  }

  constexpr int Input(std::string_view name) const {
    const int index = op_.FindInput(name);
    if (index == OpSpec::kNotFound)
      throw "a shape expression names no input or attribute of its op, and no size of .sizes before it";
    return index;
  }

  static constexpr int kNone = -1;
  Scanner scan_;
  OpSpec& op_;
  int own_;
  std::size_t size_count_;
};

}  // namespace twinop
