// Writes a record as JSON at compile time. The text lies in the library's ELF section `.twinop`,
// from which tools read ops, dtypes and architectures without loading the library
// (twinop/libraries/library.py).
#pragma once

#include <array>
#include <cstddef>
#include <string_view>

#include "twinop/record/parse.h"

namespace twinop {

class JsonWriter {
 public:
  static constexpr std::size_t kCapacity = 16384;

  constexpr JsonWriter& Raw(std::string_view text) {
    for (char c : text) Put(c);
    return *this;
  }
  constexpr JsonWriter& String(std::string_view text) {
    Put('"');
    for (char c : text) {
      if (c == '"' || c == '\\') Put('\\');
      Put(c);
    }
    Put('"');
    return *this;
  }
  constexpr JsonWriter& Key(std::string_view name) {
    if (text_[size_ - 1] != '{') Put(',');
    return String(name).Raw(":");
  }
  constexpr JsonWriter& Field(std::string_view name, std::string_view value) {
    return Key(name).String(value);
  }
  // Separates the entries of a list.
  constexpr JsonWriter& Next() {
    if (text_[size_ - 1] != '[') Put(',');
    return *this;
  }
  // A list of what write(i) writes for each i.
  template <class Write>
  constexpr JsonWriter& List(std::size_t count, const Write& write) {
    Raw("[");
    for (std::size_t i = 0; i < count; ++i) {
      Next();
      write(i);
    }
    return Raw("]");
  }
  constexpr JsonWriter& Number(std::int64_t value) {
    if (value < 0) Put('-');
    if (value / 10 != 0) Number(value < 0 ? -(value / 10) : value / 10);
    Put(static_cast<char>('0' + (value < 0 ? -(value % 10) : value % 10)));
    return *this;
  }
  // The value of an attribute that is no list. JSON's numbers have digits on both sides of the dot.
  constexpr JsonWriter& Value(Kind kind, std::int64_t value, const twinop_text& text) {
    if (kind == Kind::kBool) return Raw(value != 0 ? "true" : "false");
    if (kind == Kind::kInt) return Number(value);
    if (kind == Kind::kString) return String(View(text));
    for (std::size_t i = 0; i < text.size; ++i) {
      const bool dot = text.data[i] == '.';
      if (dot && (i == 0 || !Scanner::IsDigit(text.data[i - 1]))) Put('0');
      Put(text.data[i]);
      if (dot && (i + 1 == text.size || !Scanner::IsDigit(text.data[i + 1]))) Put('0');
    }
    return *this;
  }
  // A tree (shape.h) as twinop/record/shapes.py evaluates it: ["slice","x","axis",null].
  constexpr JsonWriter& Tree(const OpSpec& op, int at) {
    constexpr std::string_view kNames[] = {"",  "slice", "list", "+",  "broadcast", "",
                                           "",  "at",    "",     "at", "len",       "numel",
                                           "+", "-",     "*",    "//", "if"};
    if (at < 0) return Raw("null");
    const twinop_node& node = op.nodes[at];
    const int kind = node.operation;
    const bool of_input = kind == TWINOP_SHAPE || kind == TWINOP_SLICE || kind == TWINOP_DIMENSION;
    const char* const name = node.index < 0        ? ""
                             : of_input            ? op.input(node.index).name
                             : kind == TWINOP_SIZE ? op.sizes[node.index].name
                                                   : op.attribute(node.index).name;
    if (kind == TWINOP_NUMBER) return Number(node.value);
    if (kNames[kind].empty()) return String(name);
    Raw("[").String(kNames[kind]);
    if (kind == TWINOP_LIST) {
      for (; op.nodes[at].a >= 0; at = op.nodes[at].b) Next().Tree(op, op.nodes[at].a);
      return Raw("]");
    }
    if (node.index >= 0) Next().String(name);
    if (kind == TWINOP_IF) Next().String(View(node.text));
    Next().Tree(op, node.a);
    return node.b >= 0 || kind == TWINOP_SLICE ? Next().Tree(op, node.b).Raw("]") : Raw("]");
  }
  // An expression: its text, which messages show, and its tree.
  constexpr JsonWriter& Expression(const OpSpec& op, const twinop_text& text, int root) {
    if (root < 0) return Raw("null");
    const char* const input = op.input(op.nodes[root].index < 0 ? 0 : op.nodes[root].index).name;
    return Raw("[").String(text.size > 0 ? View(text) : input).Next().Tree(op, root).Raw("]");
  }
  constexpr std::size_t size() const { return size_; }
  constexpr char operator[](std::size_t i) const { return text_[i]; }

 private:
  constexpr void Put(char c) {
    if (size_ == kCapacity) throw "a record's JSON is longer than JsonWriter::kCapacity";
    text_[size_++] = c;
  }
  char text_[kCapacity] = {};
  std::size_t size_ = 0;
};

// "x, weight, _ = f(grad); residual = grad_x" as
// [[["x","weight","_"],"f(grad)"],[["residual"],"grad_x"]]
constexpr void WriteGradients(std::string_view text, const OpSpec& op, JsonWriter* json) {
  bool named[kMaxArguments] = {};
  json->Key("gradients").Raw("[");
  for (Scanner scan(text); !scan.AtEnd();) {
    json->Next().Raw("[[");
    do {
      const std::string_view name = scan.Word();
      json->Next().String(name);
      if (name == "_") continue;
      const int input = op.FindInput(name);
      if (input < 0) throw "a record's gradient names no input of its op";
      if (named[input]) throw "a record's gradient names an input twice";
      named[input] = true;
    } while (scan.Accept(","));
    scan.Expect("=");
    const std::string_view formula = scan.Until(";");
    if (formula.empty()) throw "a record's gradient is empty";
    json->Raw("]").Next().String(formula).Raw("]");
    if (!scan.AtEnd()) scan.Expect(";");
  }
  json->Raw("]");
}

constexpr JsonWriter WriteJson(const Record& record, const OpSpec& op) {
  constexpr std::string_view kRules[] = {"of", ">", ">=", "<", "<=", "in"};
  JsonWriter json;
  const auto name_of = [&](int input) {
    input < 0 ? json.Raw("null") : json.String(op.input(input).name);
  };
  const auto flag = [&](bool value) { json.Raw(value ? "true" : "false"); };
  json.Raw("{").Field("name", op.name).Field("onnx_name", op.onnx_name).Field("schema", op.schema);
  // ["weight","Tensor?"], ["eps","float",1e-6]
  json.Key("arguments").List(op.input_count + op.attribute_count, [&](std::size_t i) {
    const Argument& argument = op.arguments[i];
    json.Raw("[").String(argument.name).Next();
    json.String(argument.is_written ? "Tensor(a!)" : KindName(argument.kind));
    if (argument.kind == Kind::kIntList && argument.has_default) {
      json.Next().List(argument.default_count,
                       [&](std::size_t k) { json.Number(argument.default_ints[k]); });
    } else if (argument.kind >= Kind::kInt && argument.has_default) {
      json.Next().Value(argument.kind, argument.default_int, argument.default_text);
    }
    json.Raw("]");
  });
  json.Key("outputs").List(op.output_count,
                           [&](std::size_t i) { json.String(op.outputs[i].name); });
  json.Field("dtypes", op.dtypes)
      .Key("combinations")
      .List(op.combination_count, [&](std::size_t c) {
        json.List(op.input_count + op.output_count, [&](std::size_t i) {
          const std::size_t inputs = op.input_count;
          json.String(
              Info(i < inputs ? op.input_types[c][i] : op.output_types[c][i - inputs]).name);
        });
      });
  json.Key("shapes").List(op.output_count, [&](std::size_t i) {
    json.Expression(op, op.outputs[i].shape_text, op.outputs[i].shape);
  });
  json.Key("input_shapes").List(op.input_count, [&](std::size_t i) {
    json.Expression(op, op.input(i).shape_text, op.input(i).shape);
  });
  json.Key("sizes").List(op.size_count, [&](std::size_t i) {
    const twinop_size& size = op.sizes[i];
    json.Raw("[").String(size.name).Next();
    json.Expression(op, size.bound_text, size.bound < 0 ? -1 : op.nodes[size.bound].a).Raw("]");
  });
  // ["eps",">",0], ["axis","of","x"], ["offset","in",1], ["approximate","in","none"]
  json.Key("limits").List(op.limit_count, [&](std::size_t i) {
    const twinop_limit& limit = op.limits[i];
    const Argument& attribute = op.attribute(limit.attribute);
    json.Raw("[").String(attribute.name).Next().String(kRules[limit.rule]).Next();
    if (limit.rule == TWINOP_DIMENSION_OF) name_of(static_cast<int>(limit.value));
    if (limit.rule != TWINOP_DIMENSION_OF) json.Value(attribute.kind, limit.value, limit.text);
    json.Raw("]");
  });
  json.Key("in_place").List(op.output_count, [&](std::size_t i) { name_of(op.InPlaceInput(i)); });
  json.Key("host_inputs").List(op.input_count, [&](std::size_t i) { flag(op.input(i).on_host); });
  json.Key("optional_outputs").List(op.output_count, [&](std::size_t i) {
    flag(op.outputs[i].is_optional);
  });
  if (op.rows.given) {
    json.Key("rows").Raw("[");
    if (op.rows.attribute >= 0) json.String(op.attribute(op.rows.attribute).name);
    if (op.rows.attribute < 0) json.Number(op.rows.value);
    json.Next();
    flag(op.rows.to_the_end);
    json.Raw("]");
  }
  WriteGradients(record.gradient_text, op, &json);
  json.Field("autocast", record.autocast_text).Key("is_elementwise");
  flag(op.is_elementwise);
  json.Key("devices").Raw("[");
  if (op.cpu != nullptr || record.body_model != nullptr) json.Next().String("cpu");
  if (op.cuda != nullptr) json.Next().String("cuda");
  json.Raw("]}");
  return json;
}

// The text, cut to its size, and a NUL, which separates it from the text of the next object.
template <std::size_t N>
constexpr std::array<char, N + 1> CutJson(const JsonWriter& json) {
  std::array<char, N + 1> text{};
  for (std::size_t i = 0; i < N; ++i) text[i] = json[i];
  return text;
}

}  // namespace twinop
