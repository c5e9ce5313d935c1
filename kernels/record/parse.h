// Makes an OpSpec of the texts of a record. This runs at compile time: a malformed text is a
// compile error at one of the `throw` expressions below. The schema is written in torch's language:
//
//   rms_norm(Tensor x, Tensor? weight=None, float eps=1e-6) -> Tensor
//   add_rms_norm(Tensor x, Tensor residual, ...) -> (Tensor y, Tensor sum)
//   append(Tensor(a!) cache, Tensor x, Tensor position) -> ()
//
// Arguments are tensors (`Tensor` and `Tensor?`) or attributes (`int`,
// `float`, `bool`, `str`, `int[]`). The call writes into a `Tensor(a!)`: after the outputs that the
// schema returns, the op has an output `<input>_out` for each, in the input's memory. shape.h has
// the language of shapes, record.h the others.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "twinop/record/op_spec.h"
#include "twinop/record/parse_shape.h"
#include "twinop/record/record.h"
#include "twinop/record/scanner.h"

namespace twinop {

constexpr Kind ParseKind(Scanner& scan, char* alias) {
  std::string_view word = scan.Word();
  if (word == "Tensor" && scan.Peek() != '[') {
    if (scan.Accept("(")) {
      const std::string_view letter = scan.Word();
      if (letter.size() != 1 || !scan.Accept("!") || !scan.Accept(")"))
        throw "an alias in a schema is Tensor(a!), an input that the call writes";
      if (scan.Peek() == '?' || scan.Peek() == '[')
        throw "an input that a call writes is a Tensor(a!), neither optional nor a list";
      *alias = letter[0];
      return Kind::kTensor;
    }
    return scan.Accept("?") ? Kind::kOptionalTensor : Kind::kTensor;
  }
  if (word == "int") return scan.Accept("[]") ? Kind::kIntList : Kind::kInt;
  if (word == "float") return Kind::kFloat;
  if (word == "bool") return Kind::kBool;
  if (word == "str") return Kind::kString;
  throw "a schema's argument is not Tensor, Tensor?, int, float, bool, str or int[]";
}

// Reads a decimal number. It is exact up to 10^22, and beyond that as far as fp32 shows it.
constexpr bool ReadFloat(std::string_view text, double* value) {
  const bool negative = text.substr(0, 1) == "-";
  std::size_t i = negative ? 1 : 0;
  if (text.size() > i + 1 && text[i] == '0' && Scanner::IsDigit(text[i + 1])) return false;
  std::uint64_t digits = 0;
  int tens = 0;
  bool any = false, behind_point = false;
  for (; i < text.size() && (Scanner::IsDigit(text[i]) || (text[i] == '.' && !behind_point)); ++i) {
    const bool point = text[i] == '.', fits = digits < UINT64_MAX / 10 - 1;
    if (!point && fits) digits = 10 * digits + static_cast<std::uint64_t>(text[i] - '0');
    if (!point) tens += (fits ? 0 : 1) - (behind_point ? 1 : 0);
    behind_point = behind_point || point;
    any = any || !point;
  }
  if (any && i < text.size() && (text[i] == 'e' || text[i] == 'E')) {
    const bool down = text.substr(++i, 1) == "-";
    if (down || text.substr(i, 1) == "+") ++i;
    any = i < text.size();
    int exponent = 0;
    for (; i < text.size() && Scanner::IsDigit(text[i]); ++i)
      if (exponent < 1000) exponent = 10 * exponent + (text[i] - '0');
    tens += down ? -exponent : exponent;
  }
  double power = 1;
  for (int k = tens < 0 ? -tens : tens; k > 0 && power < 1e280; --k) power *= 10;
  *value = tens < 0 ? static_cast<double>(digits) / power : static_cast<double>(digits) * power;
  if (*value > 3.4028235e38) throw "a number is too large for fp32";
  if (negative) *value = -*value;
  return any && i == text.size();
}

// Reads the default of an argument, whose kind is known. Returns whether the text is a literal of
// it.
constexpr bool ReadDefault(std::string_view text, Argument* argument) {
  Scanner scan(text);
  argument->default_text = Text(text);
  switch (argument->kind) {
    case Kind::kTensor:
      return false;
    case Kind::kOptionalTensor:
      return text == "None";
    case Kind::kBool:
      argument->default_int = text == "True";
      return text == "True" || text == "False";
    case Kind::kInt:
      argument->default_int = scan.Integer();
      return scan.AtEnd();
    case Kind::kFloat:
      if (!ReadFloat(text, &argument->default_float)) return false;
      argument->default_float = static_cast<float>(argument->default_float);
      return true;
    case Kind::kString: {
      if (text.size() < 2 || (text[0] != '"' && text[0] != '\'')) return false;
      const std::string_view inside = text.substr(1, text.size() - 2);
      argument->default_text = Text(inside);
      return text.back() == text[0] && inside.find(text[0]) == inside.npos &&
             inside.find('\\') == inside.npos;
    }
    case Kind::kIntList: {
      scan.Expect("[");
      for (std::size_t& count = argument->default_count; !scan.Accept("]");) {
        if (count == kMaxList) return false;
        if (count > 0) scan.Expect(",");
        argument->default_ints[count++] = scan.Integer();
      }
      return scan.AtEnd();
    }
  }
  return false;
}

constexpr void SetName(char (&to)[TWINOP_MAX_NAME], std::string_view name,
                       std::string_view suffix = {}) {
  if (name.size() + suffix.size() >= TWINOP_MAX_NAME) throw "a name in a schema is too long";
  if (Scanner::IsDigit(name[0])) throw "a name in a schema starts with a digit";
  std::size_t size = 0;
  for (char c : name) to[size++] = c;
  for (char c : suffix) to[size++] = c;
}

// Calls set(index, value) for each entry of "y = x; s = x[:-1]". `find` gives the index of a name.
template <class Find, class Set>
constexpr void ReadEntries(std::string_view text, const Find& find, const Set& set) {
  bool seen[kMaxArguments + kMaxOutputs] = {};
  Scanner scan(text);
  while (!scan.AtEnd()) {
    const int index = find(scan.Word());
    if (index < 0) throw "a record's entry names no argument or output of its op";
    if (seen[index]) throw "a record has two entries of one name";
    seen[index] = true;
    scan.Expect("=");
    const std::string_view value = scan.Until(";");
    if (value.empty()) throw "a record's entry is empty";
    set(index, value);
    if (!scan.AtEnd()) scan.Expect(";");
  }
}

class Parser {
 public:
  constexpr explicit Parser(const Record& record) : record_(record) {}

  constexpr OpSpec Parse() {
    op_.struct_size = sizeof(twinop_op);
    op_.domain = "custom_domain";
    op_.is_elementwise = record_.is_elementwise;
    ReadSchema();
    ReadDTypes();
    ReadSizes();
    ReadShapes();
    ReadInPlace();
    ReadMemory();
    ReadChoices();
    ReadLimits();
    ReadRows();
#if !defined(__CUDACC__)  // it does not know GCC's checks of overflows in constants
    CheckShapes();
#endif
    CheckSizes();
    CheckSkeleton();
    CheckGradients();
    if (record_.autocast_text != "keep" && record_.autocast_text != "widest" &&
        record_.autocast_text != "lower")
      throw "autocast is keep, widest or lower";
    op_.scratch_size = record_.scratch_size;
    op_.create = record_.create_state;
    op_.destroy = record_.destroy_state;
    op_.body = record_.body_model;
    op_.row_body = record_.body_pieces;
    op_.two_pass = record_.two_pass;
    return op_;
  }

 private:
  // The table has NUL-terminated texts.
  static constexpr const char* Whole(std::string_view text) {
    if (text.data()[text.size()] != '\0') throw "a record's texts are whole string literals";
    return text.data();
  }

  // relu -> CustomRelu, add_rms_norm -> CustomAddRmsNorm
  constexpr void SetOnnxName(std::string_view name) {
    SetName(op_.onnx_name, "Custom");
    std::size_t size = 6;
    bool upper = true;
    for (char c : name) {
      if (size + 1 >= TWINOP_MAX_NAME) throw "a name in a schema is too long";
      if (c != '_')
        op_.onnx_name[size++] =
            upper && c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c;
      upper = c == '_';
    }
  }

  constexpr void ReadSchema() {
    Scanner scan(record_.schema_text);
    op_.schema = Whole(record_.schema_text);
    const std::string_view name = scan.Word();
    SetName(op_.name, name);
    SetOnnxName(name);
    scan.Expect("(");
    char letters[kMaxArguments] = {};
    for (std::size_t count = 0; !scan.Accept(")"); ++count) {
      if (count > 0) scan.Expect(",");
      if (count == kMaxArguments) throw "a schema has too many arguments";
      ReadArgument(scan, count, letters);
    }
    if (op_.input_count == 0) throw "a schema needs at least one Tensor argument";
    scan.Expect("->");
    ReadOutputs(scan);
    if (!scan.AtEnd()) throw "a schema goes on after its outputs";
    op_.returned_count = op_.output_count;
    for (std::size_t i = 0; i < op_.input_count; ++i) {
      if (!op_.input(i).is_written) continue;
      AddOutput(op_.input(i).name, "_out").in_place = static_cast<std::int32_t>(i);
    }
    if (op_.output_count == 0) throw "a schema that returns nothing writes an input, Tensor(a!)";

    std::string_view names[kMaxArguments + kMaxOutputs] = {};
    std::size_t count = 0;
    for (; count < op_.input_count + op_.attribute_count; ++count)
      names[count] = op_.arguments[count].name;
    for (std::size_t i = 0; i < op_.output_count; ++i) names[count++] = op_.outputs[i].name;
    for (std::size_t i = 0; i < count; ++i)
      for (std::size_t j = 0; j < i; ++j)
        if (names[i] == names[j])
          throw "a schema has one name twice (an output without a name is called y)";
  }

  constexpr void ReadArgument(Scanner& scan, std::size_t index, char* letters) {
    Argument& argument = op_.arguments[index];
    argument.shape = -1;
    argument.kind = ParseKind(scan, &letters[index]);
    argument.is_written = letters[index] != '\0';
    for (std::size_t i = 0; argument.is_written && i < index; ++i)
      if (letters[i] == letters[index]) throw "each Tensor(a!) of a schema has a letter of its own";
    SetName(argument.name, scan.Word());
    if (scan.Accept("=")) {
      argument.has_default = 1;
      if (!ReadDefault(scan.Until(",)"), &argument))
        throw "a schema's default is no value of its kind";
    } else if (index > 0 && op_.arguments[index - 1].has_default) {
      throw "a schema's arguments without a default come before those with one";
    }
    if (argument.kind >= Kind::kInt) {
      ++op_.attribute_count;
    } else {
      if (op_.attribute_count > 0) throw "a schema lists its tensors before its attributes";
      ++op_.input_count;
    }
  }

  constexpr void ReadOutputs(Scanner& scan) {
    const bool parenthesised = scan.Accept("(");
    const bool none = parenthesised && scan.Peek() == ')';
    if (!none) do {
        char alias = '\0';
        if (ParseKind(scan, &alias) != Kind::kTensor) throw "a schema returns Tensor";
        if (alias != '\0')
          throw "a schema does not return its Tensor(a!), which is the output <input>_out by "
                "itself";
        const bool named = Scanner::IsWord(scan.Peek());
        AddOutput(named ? scan.Word() : "y");
        if (!named && parenthesised) throw "a schema with several outputs names them";
      } while (parenthesised && scan.Accept(","));
    if (parenthesised) scan.Expect(")");
  }

  constexpr twinop_output& AddOutput(std::string_view name, std::string_view suffix = {}) {
    if (op_.output_count == kMaxOutputs) throw "a schema has too many outputs";
    twinop_output& output = op_.outputs[op_.output_count++];
    SetName(output.name, name, suffix);
    output.in_place = -1;
    return output;
  }

  // An output of which a record may say more than the schema: not one that is a written input.
  constexpr int FindReturned(std::string_view name) const {
    return OpSpec::Find(op_.outputs, op_.returned_count, name);
  }

  // "float16; float16 weight=float32"
  constexpr void ReadDTypes() {
    op_.dtypes = Whole(record_.dtypes_text);
    Scanner scan(record_.dtypes_text);
    do {
      if (op_.combination_count == TWINOP_MAX_COMBINATIONS)
        throw "a record has too many dtype combinations";
      DType* inputs = op_.input_types[op_.combination_count];
      DType* outputs = op_.output_types[op_.combination_count++];
      const DType first = DTypeNamed(scan.Word());
      for (std::size_t i = 0; i < op_.input_count; ++i) inputs[i] = first;
      for (std::size_t i = 0; i < op_.output_count; ++i) outputs[i] = first;
      while (!scan.AtEnd() && scan.Peek() != ';') {
        const std::string_view name = scan.Word();
        scan.Expect("=");
        const DType dtype = DTypeNamed(scan.Word());
        const int input = op_.FindInput(name), output = op_.FindOutput(name);
        if (input < 0 && output < 0) throw "a record's dtypes name no tensor of its op";
        (input >= 0 ? inputs[input] : outputs[output]) = dtype;
      }
      for (std::size_t i = op_.returned_count; i < op_.output_count; ++i)
        outputs[i] = inputs[op_.WrittenInput(i)];
    } while (scan.Accept(";"));
    if (!scan.AtEnd()) throw "a record's dtypes do not parse";
  }

  // "n <= x[0]; m"
  constexpr void ReadSizes() {
    Scanner scan(record_.sizes_text);
    while (!scan.AtEnd()) {
      if (op_.size_count == TWINOP_MAX_SIZES) throw "a record has too many sizes";
      const std::string_view name = scan.Word();
      if (op_.FindInput(name) >= 0 || op_.FindAttribute(name) >= 0 || op_.FindOutput(name) >= 0 ||
          OpSpec::Find(op_.sizes, op_.size_count, name) >= 0)
        throw "a record's size has the name of an argument, an output or another size";
      twinop_size& size = op_.sizes[op_.size_count++];
      SetName(size.name, name);
      size.bound = -1;
      if (scan.Accept("<=")) {
        const std::string_view text = scan.Until(";");
        size.bound_text = Text(text);
        size.bound = ShapeParser(text, &op_).ParseSize();
      }
      if (!scan.AtEnd()) scan.Expect(";");
    }
  }

  constexpr void ReadShapes() {
    for (std::size_t i = 0; i < op_.output_count; ++i) op_.outputs[i].shape = -1;
    ReadEntries(
        record_.shapes_text, [&](std::string_view name) { return FindReturned(name); },
        [&](int i, std::string_view text) {
          op_.outputs[i].shape_text = Text(text);
          op_.outputs[i].shape = ShapeParser(text, &op_, -1, op_.size_count).Parse();
        });
    for (std::size_t i = 0; i < op_.output_count; ++i) {
      if (op_.outputs[i].shape >= 0) continue;
      const int like = i < op_.returned_count ? 0 : op_.WrittenInput(i);
      op_.outputs[i].shape = ShapeParser(op_.input(like).name, &op_).Parse();
    }
    ReadEntries(
        record_.input_shapes_text, [&](std::string_view name) { return op_.FindInput(name); },
        [&](int i, std::string_view text) {
          op_.arguments[i].shape_text = Text(text);
          op_.arguments[i].shape = ShapeParser(text, &op_, i).Parse();
        });
  }

  // "y = x"
  constexpr void ReadInPlace() {
    ReadEntries(
        record_.in_place_text, [&](std::string_view name) { return FindReturned(name); },
        [&](int i, std::string_view text) {
          op_.outputs[i].in_place = op_.FindInput(text);
          if (op_.outputs[i].in_place < 0) throw "a record's in_place names no input";
        });
  }

  // "lengths = host; sum = optional"
  constexpr void ReadMemory() {
    constexpr int kOutput = kMaxArguments;
    const auto find = [&](std::string_view name) {
      const int output = FindReturned(name);
      return output < 0 ? op_.FindInput(name) : kOutput + output;
    };
    ReadEntries(record_.memory_text, find, [&](int i, std::string_view text) {
      if (i >= kOutput) {
        if (text != "optional") throw "a record's memory is optional for outputs";
        if (i == kOutput) throw "a record's first output is not optional";
        op_.outputs[i - kOutput].is_optional = 1;
      } else {
        if (text != "host") throw "a record's memory is host for inputs";
        if (i == 0) throw "a record's first input is in the device's memory";
        if (op_.arguments[i].is_written) throw "an input that is written is in the device's memory";
        if (op_.is_elementwise || !record_.rows_text.empty())
          throw "an op with inputs in host memory is neither elementwise nor row-wise";
        op_.arguments[i].on_host = 1;
      }
    });
  }

  constexpr twinop_limit& AddLimit(int attribute, int rule) {
    if (op_.limit_count == TWINOP_MAX_LIMITS) throw "a record has too many limits";
    twinop_limit& limit = op_.limits[op_.limit_count++];
    limit.attribute = attribute;
    limit.rule = rule;
    return limit;
  }

  // "approximate = none | tanh"
  constexpr void ReadChoices() {
    const auto find = [&](std::string_view name) {
      const int i = op_.FindAttribute(name);
      return i >= 0 && op_.attribute(i).kind == Kind::kString ? i : OpSpec::kNotFound;
    };
    ReadEntries(record_.choices_text, find, [&](int i, std::string_view text) {
      Scanner scan(text);
      do AddLimit(i, TWINOP_ONE_OF).text = Text(scan.Word());
      while (scan.Accept("|"));
      if (!scan.AtEnd()) throw "choices are words: none | tanh";
    });
  }

  // "dim of x; offset in 0 | 1; p >= 0; p < 0.5"
  constexpr void ReadLimits() {
    Scanner scan(record_.limits_text);
    while (!scan.AtEnd()) {
      const int attribute = op_.FindAttribute(scan.Word());
      if (attribute < 0) throw "a record's limits name no attribute of its op";
      const Kind kind = op_.attribute(attribute).kind;
      const bool is_lower = scan.Peek() == '>', is_bound = is_lower || scan.Peek() == '<';
      for (std::size_t i = 0; i < op_.limit_count; ++i) {
        const int rule = op_.limits[i].rule;
        const bool is_other_bound = is_lower ? rule == TWINOP_BELOW || rule == TWINOP_AT_MOST
                                             : rule == TWINOP_ABOVE || rule == TWINOP_AT_LEAST;
        if (op_.limits[i].attribute == attribute && !(is_bound && is_other_bound))
          throw "a record's limits name an attribute twice";
      }
      if (is_bound) {
        if (kind != Kind::kInt && kind != Kind::kFloat)
          throw "a limit >=, >, <= or < is for an int or a float";
        scan.Expect(is_lower ? ">" : "<");
        const bool equal = scan.Accept("=");
        Argument bound{};
        bound.kind = kind;
        if (!ReadDefault(scan.Until(";"), &bound))
          throw "a limit's number is no value of its attribute's kind";
        twinop_limit& limit = AddLimit(attribute, is_lower ? equal ? TWINOP_AT_LEAST : TWINOP_ABOVE
                                                  : equal  ? TWINOP_AT_MOST
                                                           : TWINOP_BELOW);
        limit.value = bound.default_int;
        limit.number = bound.default_float;
        limit.text = bound.default_text;
      } else if (scan.Accept("of")) {
        const int input = op_.FindInput(scan.Word());
        if (kind != Kind::kInt || input < 0) throw "a limit `a of x` is for an int and an input";
        AddLimit(attribute, TWINOP_DIMENSION_OF).value = input;
      } else {
        scan.Expect("in");
        if (kind != Kind::kInt) throw "a limit `in` is for an int; choices are for a str";
        Scanner values(scan.Until(";"));
        do AddLimit(attribute, TWINOP_ONE_OF).value = values.Integer();
        while (values.Accept("|"));
        if (!values.AtEnd()) throw "a limit `in` lists ints: 0 | 1";
      }
      if (!scan.AtEnd()) scan.Expect(";");
    }
  }

  // "dim", "axis:" or "-1"
  constexpr void ReadRows() {
    Scanner scan(record_.rows_text);
    op_.rows.attribute = -1;
    if (scan.AtEnd()) return;
    op_.rows.given = 1;
    if (scan.Peek() == '-' || Scanner::IsDigit(scan.Peek())) {
      op_.rows.value = scan.Integer();
    } else {
      op_.rows.attribute = op_.FindAttribute(scan.Word());
      if (op_.rows.attribute < 0 || op_.attribute(op_.rows.attribute).kind != Kind::kInt)
        throw "a record's rows name no int attribute of its op";
    }
    op_.rows.to_the_end = scan.Accept(":");
    if (!scan.AtEnd()) throw "a record's rows are \"dim\", \"axis:\" or \"-1\"";
  }

  // The shape expressions have values where no size is known.
  constexpr void CheckShapes() const {
    Shape unknown;
    unknown.known_rank = false;
    const Shape* inputs[kMaxArguments] = {};
    for (const Shape*& input : inputs) input = &unknown;
    Attribute attributes[kMaxArguments] = {};
    std::int64_t list[kMaxList] = {};
    for (Attribute& attribute : attributes) {
      attribute.count = kMaxList;
      attribute.ints = list;
    }
    const ShapeScope scope{op_.nodes, inputs, attributes, false};
    for (std::size_t i = 0; i < op_.output_count; ++i) scope.Evaluate(op_.outputs[i].shape);
    for (std::size_t i = 0; i < op_.input_count; ++i)
      if (op_.input(i).shape >= 0) scope.Evaluate(op_.input(i).shape);
  }

  // How many nodes of an expression are sizes that come from the data.
  constexpr int CountedSizes(int at) const {
    if (at < 0) return 0;
    const twinop_node& node = op_.nodes[at];
    return (node.operation == TWINOP_SIZE ? 1 : 0) + CountedSizes(node.a) + CountedSizes(node.b);
  }

  constexpr void CheckSizes() const {
    if (op_.size_count == 0) {
      if (record_.two_pass) throw "a record with count names what is counted: sizes(\"n\")";
      return;
    }
    if (op_.is_elementwise || op_.rows.given || !record_.in_place_text.empty() ||
        record_.body_pieces != 0 || op_.WritesInputs())
      throw "an op with sizes from data is not elementwise, row-wise or in pieces, and writes no input";
    int counted = 0;
    for (std::size_t i = 0; i < op_.output_count; ++i) {
      int first = op_.outputs[i].shape;
      const int here = CountedSizes(first);
      counted += here;
      if (record_.two_pass || here == 0) continue;
      while (op_.nodes[first].operation == TWINOP_CONCAT) first = op_.nodes[first].a;
      const twinop_node& list = op_.nodes[first];
      if (here > 1 || list.operation != TWINOP_LIST || list.a < 0 ||
          op_.nodes[list.a].operation != TWINOP_SIZE)
        throw "without count, a size from data is an output's first dimension: y = [n] + x[1:]";
    }
    if (counted == 0) throw "a record's sizes are those of its outputs: shapes(\"y = [n]\")";
    for (std::size_t i = 0; i < op_.size_count && !record_.two_pass; ++i)
      if (op_.sizes[i].bound < 0)
        throw "a size has a bound, \"n <= x[0]\", or the op has a count<Count>()";
  }

  // Marks the inputs of "broadcast(broadcast(x, y), z)".
  constexpr void MarkInputs(int at, bool* named) const {
    const twinop_node& node = op_.nodes[at];
    if (node.operation == TWINOP_SHAPE) {
      named[node.index] = true;
    } else if (node.operation == TWINOP_BROADCAST) {
      MarkInputs(node.a, named);
      MarkInputs(node.b, named);
    } else {
      throw "broadcast(...) of an elementwise op lists its inputs";
    }
  }

  // The outputs of an elementwise op have one shape: that of an input, or of all inputs broadcast.
  constexpr void CheckSkeleton() const {
    if (!op_.is_elementwise) return;
    if (op_.rows.given) throw "an elementwise op has no rows";
    for (std::size_t i = 0; i < op_.output_count; ++i) {
      if (!op_.Broadcasts() && op_.SameShapeInput(i) < 0)
        throw "an elementwise op's output has the shape of an input, or of all, broadcast(a, b)";
      if (op_.Broadcasts() && View(op_.outputs[i].shape_text) != View(op_.outputs[0].shape_text))
        throw "an elementwise op that broadcasts has outputs of one shape";
    }
    if (!op_.Broadcasts()) return;
    bool named[kMaxArguments] = {};
    MarkInputs(op_.outputs[0].shape, named);
    for (std::size_t i = 0; i < op_.input_count; ++i)
      if (!named[i]) throw "broadcast(...) of an elementwise op lists all its inputs";
  }

  // "x, weight, _ = f(grad); residual = grad_x"
  constexpr void CheckGradients() const {
    bool named[kMaxArguments] = {};
    for (Scanner scan(record_.gradient_text); !scan.AtEnd();) {
      do {
        const std::string_view name = scan.Word();
        if (name == "_") continue;
        const int input = op_.FindInput(name);
        if (input < 0) throw "a record's gradient names no input of its op";
        if (named[input]) throw "a record's gradient names an input twice";
        named[input] = true;
      } while (scan.Accept(","));
      scan.Expect("=");
      if (scan.Until(";").empty()) throw "a record's gradient is empty";
      if (!scan.AtEnd()) scan.Expect(";");
    }
  }

  const Record& record_;
  OpSpec op_;
};

constexpr OpSpec Parse(const Record& record) { return Parser(record).Parse(); }

}  // namespace twinop
