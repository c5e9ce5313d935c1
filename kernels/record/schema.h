// The parser of op schemas, which are written in torch's language:
//
//   rms_norm(Tensor x, Tensor? weight=None, float eps=1e-6) -> Tensor
//   add_rms_norm(Tensor x, Tensor residual, ...) -> (Tensor y, Tensor sum)
//   append(Tensor(a!) cache, Tensor x, Tensor position) -> ()
//
// Arguments are tensors (`Tensor`, `Tensor?`, and `Tensor[]` as the last one) or attributes (`int`,
// `float`, `bool`, `str`, `int[]`). The call writes into a `Tensor(a!)`: after the outputs that the
// schema returns, the op has an output `<input>_out` for each, in the input's memory. The parser
// runs at compile time: a malformed schema is a compile error at one of the `throw` expressions
// below.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace twinop {

inline constexpr std::size_t kMaxArguments = 16;  // of one op, tensors and attributes together
inline constexpr std::size_t kMaxOutputs = 8;
inline constexpr std::size_t kMaxList = 8;  // entries of an int[] attribute: axes, pads, strides
inline constexpr std::size_t kMaxName = 48;

// A NUL-terminated name with its own storage, because ORT takes `const char*`.
struct Name {
  char text[kMaxName] = {};
  std::size_t size = 0;

  constexpr Name() = default;
  constexpr Name(
      std::string_view source) {  // NOLINT(google-explicit-constructor): a name is its text
    if (source.empty()) throw "an empty name in a schema";
    if (source.size() >= kMaxName) throw "a name in a schema is too long";
    if (source[0] >= '0' && source[0] <= '9') throw "a name in a schema starts with a digit";
    for (char c : source) text[size++] = c;
  }
  constexpr Name(std::string_view source, std::string_view suffix) : Name(source) {
    if (size + suffix.size() >= kMaxName) throw "a name in a schema is too long";
    for (char c : suffix) text[size++] = c;
  }
  constexpr std::string_view view() const { return {text, size}; }
};

enum class Kind : std::uint8_t {
  kTensor,
  kOptionalTensor,
  kTensorList,
  kInt,
  kFloat,
  kBool,
  kString,
  kIntList,
};

constexpr bool IsTensor(Kind kind) {
  return kind == Kind::kTensor || kind == Kind::kOptionalTensor || kind == Kind::kTensorList;
}

constexpr std::string_view KindName(Kind kind) {
  constexpr std::string_view kNames[] = {"Tensor", "Tensor?", "Tensor[]", "int",
                                         "float",  "bool",    "str",      "int[]"};
  return kNames[static_cast<std::size_t>(kind)];
}

struct Argument {
  Kind kind = Kind::kTensor;
  Name name;
  char alias = '\0';  // the letter of a Tensor(a!), which the call writes
  bool has_default = false;
  std::string_view default_text;  // as written: 1e-6, "none", [1, 2], None
};

struct Schema {
  std::string_view text;
  Name name;       // relu
  Name onnx_name;  // CustomRelu
  Argument arguments[kMaxArguments] = {};
  std::size_t argument_count = 0;
  std::size_t input_count = 0;      // tensors among the arguments
  std::size_t attribute_count = 0;  // the others
  Name outputs[kMaxOutputs] = {};   // those that the schema returns, then the written inputs
  std::size_t output_count = 0;
  std::size_t returned_count = 0;

  // Argument index of the i-th input (tensor) or attribute.
  std::uint8_t input_arguments[kMaxArguments] = {};
  std::uint8_t attribute_arguments[kMaxArguments] = {};

  constexpr const Argument& input(std::size_t i) const { return arguments[input_arguments[i]]; }
  constexpr const Argument& attribute(std::size_t i) const {
    return arguments[attribute_arguments[i]];
  }

  static constexpr int kNotFound = -1;
  constexpr int FindInput(std::string_view wanted) const {
    for (std::size_t i = 0; i < input_count; ++i)
      if (input(i).name.view() == wanted) return static_cast<int>(i);
    return kNotFound;
  }
  constexpr int FindAttribute(std::string_view wanted) const {
    for (std::size_t i = 0; i < attribute_count; ++i)
      if (attribute(i).name.view() == wanted) return static_cast<int>(i);
    return kNotFound;
  }
  constexpr int FindOutput(std::string_view wanted) const {
    for (std::size_t i = 0; i < output_count; ++i)
      if (outputs[i].view() == wanted) return static_cast<int>(i);
    return kNotFound;
  }
  // The input whose memory the output is, or kNotFound.
  constexpr int WrittenInput(std::size_t output) const {
    std::size_t left = output - returned_count;
    for (std::size_t i = 0; output >= returned_count && i < input_count; ++i)
      if (input(i).alias != '\0' && left-- == 0) return static_cast<int>(i);
    return kNotFound;
  }
  constexpr bool WritesInputs() const { return output_count > returned_count; }
  constexpr bool HasOptionalInput() const {
    for (std::size_t i = 0; i < input_count; ++i)
      if (input(i).kind == Kind::kOptionalTensor) return true;
    return false;
  }
  // The last input stands for one or more tensors of one dtype.
  constexpr bool HasRepeatedInput() const {
    return input_count > 0 && input(input_count - 1).kind == Kind::kTensorList;
  }
  // A backward op exists in torch only.
  constexpr bool IsBackward() const {
    constexpr std::string_view suffix = "_backward";
    return name.view().size() > suffix.size() &&
           name.view().substr(name.view().size() - suffix.size()) == suffix;
  }
};

// A cursor over text, for all the small languages of a record.
class Scanner {
 public:
  constexpr explicit Scanner(std::string_view text) : text_(text) {}

  constexpr void SkipSpace() {
    while (position_ < text_.size() && text_[position_] == ' ') ++position_;
  }
  constexpr char Peek() {
    SkipSpace();
    return position_ < text_.size() ? text_[position_] : '\0';
  }
  constexpr bool AtEnd() { return Peek() == '\0'; }
  constexpr bool Accept(std::string_view token) {
    SkipSpace();
    if (text_.substr(position_, token.size()) != token) return false;
    position_ += token.size();
    return true;
  }
  constexpr void Expect(std::string_view token) {
    if (!Accept(token)) throw "a record's text does not parse: a token is missing";
  }
  static constexpr bool IsDigit(char c) { return c >= '0' && c <= '9'; }
  static constexpr bool IsWord(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || IsDigit(c) || c == '_';
  }
  constexpr std::string_view Word() {
    SkipSpace();
    std::size_t begin = position_;
    while (position_ < text_.size() && IsWord(text_[position_])) ++position_;
    if (begin == position_) throw "a record's text does not parse: a name is missing";
    return text_.substr(begin, position_ - begin);
  }
  constexpr std::int64_t Integer() {
    SkipSpace();
    bool negative = Accept("-");
    std::int64_t value = 0;
    std::string_view digits = Word();
    if (digits.size() > 18 || (digits.size() > 1 && digits[0] == '0'))
      throw "a record's text does not parse: a number is too long or starts with 0";
    for (char c : digits) {
      if (!IsDigit(c)) throw "a record's text does not parse: a number is wanted";
      value = value * 10 + (c - '0');
    }
    return negative ? -value : value;
  }
  // Skips digits. Returns whether there were any.
  constexpr bool Digits() {
    std::size_t begin = position_;
    while (position_ < text_.size() && IsDigit(text_[position_])) ++position_;
    return position_ > begin;
  }
  // The text up to one of `stops` outside quotes and brackets, without trailing spaces.
  constexpr std::string_view Until(std::string_view stops) {
    SkipSpace();
    std::size_t begin = position_;
    int depth = 0;
    char quote = '\0';
    for (; position_ < text_.size(); ++position_) {
      char c = text_[position_];
      if (quote != '\0') {
        if (c == quote) quote = '\0';
        continue;
      }
      if (depth == 0 && stops.find(c) != std::string_view::npos) break;
      if (c == '"' || c == '\'') quote = c;
      if (c == '[' || c == '(') ++depth;
      if (c == ']' || c == ')') --depth;
    }
    std::size_t end = position_;
    while (end > begin && text_[end - 1] == ' ') --end;
    return text_.substr(begin, end - begin);
  }

 private:
  std::string_view text_;
  std::size_t position_ = 0;
};

// relu -> CustomRelu, add_rms_norm -> CustomAddRmsNorm
constexpr Name OnnxName(std::string_view name) {
  Name result{"Custom"};
  bool upper = true;
  for (char c : name) {
    if (c == '_') {
      upper = true;
      continue;
    }
    if (result.size + 1 >= kMaxName) throw "a name in a schema is too long";
    result.text[result.size++] =
        upper && c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c;
    upper = false;
  }
  return result;
}

constexpr Kind ParseKind(Scanner& scan, char* alias) {
  std::string_view word = scan.Word();
  if (word == "Tensor") {
    if (scan.Accept("(")) {
      const std::string_view letter = scan.Word();
      if (letter.size() != 1 || !scan.Accept("!") || !scan.Accept(")"))
        throw "an alias in a schema is Tensor(a!), an input that the call writes";
      if (scan.Peek() == '?' || scan.Peek() == '[')
        throw "an input that a call writes is a Tensor(a!), neither optional nor a list";
      *alias = letter[0];
      return Kind::kTensor;
    }
    if (scan.Accept("[]")) return Kind::kTensorList;
    return scan.Accept("?") ? Kind::kOptionalTensor : Kind::kTensor;
  }
  if (word == "int") return scan.Accept("[]") ? Kind::kIntList : Kind::kInt;
  if (word == "float") return Kind::kFloat;
  if (word == "bool") return Kind::kBool;
  if (word == "str") return Kind::kString;
  throw "a schema's argument is not Tensor, Tensor?, Tensor[], int, float, bool, str or int[]";
}

constexpr bool IsFloat(Scanner& scan) {
  scan.Accept("-");
  bool digits = scan.Digits();
  if (scan.Accept(".")) digits = scan.Digits() || digits;
  if (!digits || !(scan.Accept("e") || scan.Accept("E"))) return digits;
  if (!scan.Accept("-")) scan.Accept("+");
  return scan.Digits();
}

// Whether the text of a default is a literal of its kind.
constexpr bool IsLiteral(Kind kind, std::string_view text) {
  Scanner scan(text);
  switch (kind) {
    case Kind::kTensor:
    case Kind::kTensorList:
      return false;
    case Kind::kOptionalTensor:
      return text == "None";
    case Kind::kBool:
      return text == "True" || text == "False";
    case Kind::kInt:
      scan.Integer();
      return scan.AtEnd();
    case Kind::kFloat:
      return text.find(' ') == text.npos && IsFloat(scan) && scan.AtEnd();
    case Kind::kString: {
      if (text.size() < 2 || (text[0] != '"' && text[0] != '\'')) return false;
      std::string_view inside = text.substr(1, text.size() - 2);
      return text.back() == text[0] && inside.find(text[0]) == inside.npos &&
             inside.find('\\') == inside.npos;
    }
    case Kind::kIntList: {
      scan.Expect("[");
      for (std::size_t count = 0; !scan.Accept("]"); ++count) {
        if (count == kMaxList) return false;
        if (count > 0) scan.Expect(",");
        scan.Integer();
      }
      return scan.AtEnd();
    }
  }
  return false;
}

constexpr Schema ParseSchema(std::string_view text) {
  Schema schema;
  schema.text = text;
  Scanner scan(text);
  schema.name = Name(scan.Word());
  schema.onnx_name = OnnxName(schema.name.view());
  scan.Expect("(");
  while (!scan.Accept(")")) {
    if (schema.argument_count > 0) scan.Expect(",");
    if (schema.argument_count == kMaxArguments) throw "a schema has too many arguments";
    Argument& argument = schema.arguments[schema.argument_count];
    argument.kind = ParseKind(scan, &argument.alias);
    for (std::size_t i = 0; argument.alias != '\0' && i < schema.argument_count; ++i)
      if (schema.arguments[i].alias == argument.alias)
        throw "each Tensor(a!) of a schema has a letter of its own";
    argument.name = Name(scan.Word());
    if (scan.Accept("=")) {
      argument.has_default = true;
      argument.default_text = scan.Until(",)");
      if (!IsLiteral(argument.kind, argument.default_text))
        throw "a schema's default is no value of its kind";
    } else if (schema.argument_count > 0 &&
               schema.arguments[schema.argument_count - 1].has_default) {
      throw "a schema's arguments without a default come before those with one";
    }
    auto index = static_cast<std::uint8_t>(schema.argument_count++);
    if (IsTensor(argument.kind)) {
      if (schema.attribute_count > 0) throw "a schema lists its tensors before its attributes";
      if (schema.HasRepeatedInput()) throw "a schema's Tensor[] is its last tensor";
      schema.input_arguments[schema.input_count++] = index;
    } else {
      schema.attribute_arguments[schema.attribute_count++] = index;
    }
  }
  if (schema.input_count == 0) throw "a schema needs at least one Tensor argument";
  scan.Expect("->");
  bool parenthesised = scan.Accept("(");
  const bool none = parenthesised && scan.Peek() == ')';
  if (!none) do {
      if (schema.output_count == kMaxOutputs) throw "a schema has too many outputs";
      char alias = '\0';
      if (ParseKind(scan, &alias) != Kind::kTensor) throw "a schema returns Tensor";
      if (alias != '\0')
        throw "a schema does not return its Tensor(a!), which is the output <input>_out by itself";
      char next = scan.Peek();
      bool named = Scanner::IsWord(next);
      schema.outputs[schema.output_count++] = named ? Name(scan.Word()) : Name("y");
      if (!named && parenthesised) throw "a schema with several outputs names them";
    } while (parenthesised && scan.Accept(","));
  if (parenthesised) scan.Expect(")");
  if (!scan.AtEnd()) throw "a schema goes on after its outputs";
  schema.returned_count = schema.output_count;
  for (std::size_t i = 0; i < schema.input_count; ++i) {
    if (schema.input(i).alias == '\0') continue;
    if (schema.output_count == kMaxOutputs) throw "a schema has too many outputs";
    schema.outputs[schema.output_count++] = Name(schema.input(i).name.view(), "_out");
  }
  if (schema.output_count == 0) throw "a schema that returns nothing writes an input, Tensor(a!)";

  std::string_view names[kMaxArguments + kMaxOutputs] = {};
  std::size_t count = 0;
  for (std::size_t i = 0; i < schema.argument_count; ++i)
    names[count++] = schema.arguments[i].name.view();
  for (std::size_t i = 0; i < schema.output_count; ++i) names[count++] = schema.outputs[i].view();
  for (std::size_t i = 0; i < count; ++i)
    for (std::size_t j = 0; j < i; ++j)
      if (names[i] == names[j])
        throw "a schema has one name twice (an output without a name is called y)";
  return schema;
}

}  // namespace twinop
