// The C++ side of a record as a filter, so that tests can compare it with torch's parser and with
// Python's evaluator on texts that no op of ours has. One request a line, fields separated by tabs:
//
//   schema <text> <field> <value> ...      the signature: names, kinds, dtypes
//   validate <text> <field> <value> ...    "valid"; fields: dtypes, shapes, ...
//   shape <text> <expression> <shapes> <values>          the shape, "2,3,?"; "*": of unknown rank
//   check <text> <shapes> <values> <field> <value> ...   "fits", or the checks' message
//   entry <entries> <name>                 the value
//   defaults <text>                        the attributes' defaults, "|" between
//   level                                  the instruction set of the kernels
//
// Shapes of the inputs are separated by ";", an absent one is "-", an unknown rank "*", an unknown
// size "?". Values of the attributes are separated by ";" too. Whatever the record code throws is
// answered "error <text>".
#include <cstdio>
#include <iostream>
#include <string>
#include <vector>

#include "twinop/primitives/cpu_features.h"
#include "twinop/record/check.h"
#include "twinop/record/parse.h"

namespace twinop {
namespace {

std::vector<std::string> Split(const std::string& text, char separator) {
  std::vector<std::string> parts(1);
  for (char c : text) {
    if (c == separator) {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

std::vector<std::string> SplitList(const std::string& text, char separator) {
  return text.empty() ? std::vector<std::string>() : Split(text, separator);
}

// "f CustomF|Tensor x float32 float16|int n|y float32 float16 in x|rows -1"
std::string Signature(const OpSpec& op) {
  std::string text = std::string(op.name) + " " + op.onnx_name;
  const auto add = [&](std::string_view word, const char* before = " ") {
    text.append(before).append(word);
  };
  for (std::size_t i = 0; i < op.input_count + op.attribute_count; ++i) {
    const Argument& argument = op.arguments[i];
    add(argument.is_written ? "Tensor(a!)" : KindName(argument.kind), "|");
    add(argument.name);
    for (std::size_t c = 0; i < op.input_count && c < op.combination_count; ++c)
      add(Info(op.input_types[c][i]).name);
    if (argument.on_host) add("on host");
  }
  for (std::size_t i = 0; i < op.output_count; ++i) {
    add(op.outputs[i].name, "|");
    for (std::size_t c = 0; c < op.combination_count; ++c) add(Info(op.output_types[c][i]).name);
    if (op.outputs[i].in_place >= 0) add(op.input(op.outputs[i].in_place).name, " in ");
    if (op.outputs[i].is_optional) add("optional");
  }
  if (op.rows.given && op.rows.attribute >= 0) add(op.attribute(op.rows.attribute).name, "|rows ");
  if (op.rows.given && op.rows.attribute < 0) add(std::to_string(op.rows.value), "|rows ");
  return text + (op.rows.to_the_end ? ":" : "");
}

// The record of a schema, with the fields given in pairs from `begin` on.
Record WithFields(const std::string& schema, const std::vector<std::string>& request,
                  std::size_t begin) {
  Record record(schema);
  for (std::size_t i = begin; i + 1 < request.size(); i += 2) {
    const std::string& field = request[i];
    if (field == "dtypes") record = record.dtypes(request[i + 1]);
    if (field == "sizes") record = record.sizes(request[i + 1]);
    if (field == "shapes") record = record.shapes(request[i + 1]);
    if (field == "input_shapes") record = record.input_shapes(request[i + 1]);
    if (field == "limits") record = record.limits(request[i + 1]);
    if (field == "memory") record = record.memory(request[i + 1]);
    if (field == "rows") record = record.rows(request[i + 1]);
    if (field == "elementwise") record = record.elementwise();
    if (field == "in_place") record = record.in_place(request[i + 1]);
    if (field == "choices") record = record.choices(request[i + 1]);
    if (field == "gradient") record = record.gradient(request[i + 1]);
    if (field == "autocast") record = record.autocast(request[i + 1]);
  }
  return record;
}

void ReadValues(const OpSpec& record, const std::string& text, Attribute* attributes,
                AttributeStorage* storage) {
  std::vector<std::string> values = Split(text, ';');
  for (std::size_t i = 0; i < record.attribute_count; ++i) {
    Kind kind = record.attribute(i).kind;
    if (kind == Kind::kInt || kind == Kind::kBool) attributes[i].i = std::stoll(values.at(i));
    if (kind == Kind::kFloat && !values.at(i).empty()) attributes[i].f = std::stod(values[i]);
    if (kind != Kind::kIntList) continue;
    attributes[i].ints = storage[i].ints;
    for (const std::string& value : SplitList(values.at(i), ','))
      storage[i].ints[attributes[i].count++] = std::stoll(value);
  }
}

// What a binding checks of the attributes and shapes, and the outputs' shapes.
std::string CheckCall(const std::vector<std::string>& request) {
  const OpSpec record = Parse(WithFields(request.at(1), request, 4));
  std::vector<std::string> texts = Split(request.at(2), ';');
  std::int64_t sizes[kMaxArguments][kMaxRank];
  Tensor inputs[kMaxArguments];
  for (std::size_t i = 0; i < record.input_count; ++i) {
    if (texts.at(i) == "-") continue;
    inputs[i].present = 1;
    inputs[i].dtype = DType::kFloat32;
    inputs[i].sizes = sizes[i];
    for (const std::string& size : SplitList(texts[i], ','))
      sizes[i][inputs[i].rank++] = std::stoll(size);
  }
  Attribute attributes[kMaxArguments] = {};
  AttributeStorage storage[kMaxArguments];
  ReadValues(record, request.at(3), attributes, storage);
  for (std::size_t i = 0; i < record.attribute_count; ++i)
    if (Status status = CheckAttribute(record, i, attributes[i]); !status.ok())
      return status.message();
  if (Status status = CheckShapes(record, inputs, attributes); !status.ok())
    return status.message();
  for (std::size_t i = 0; i < record.output_count; ++i) {
    std::int64_t output[kMaxRank];
    std::size_t rank = 0;
    Status status = OutputShape(record, i, inputs, attributes, output, &rank);
    if (!status.ok()) return status.message();
  }
  return "fits";
}

std::string EvaluateShape(const std::vector<std::string>& request) {
  OpSpec record = Parse(Record(request.at(1)));
  Shape shapes[kMaxArguments];
  const Shape* inputs[kMaxArguments] = {};
  std::vector<std::string> texts = Split(request.at(3), ';');
  for (std::size_t i = 0; i < record.input_count; ++i) {
    if (texts.at(i) == "-") continue;
    inputs[i] = &shapes[i];
    shapes[i].known_rank = texts[i] != "*";
    if (!shapes[i].known_rank) continue;
    for (const std::string& size : SplitList(texts[i], ','))
      shapes[i].Push(Dim{size == "?" ? -1 : std::stoll(size), nullptr});
  }
  Attribute attributes[kMaxArguments] = {};
  AttributeStorage storage[kMaxArguments];
  ReadValues(record, request.at(4), attributes, storage);
  const int root = ShapeParser(request.at(2), &record).Parse();
  const Shape result = ShapeScope{record.nodes, inputs, attributes}.Evaluate(root);
  if (!result.known_rank) return "*";
  std::string text;
  for (std::size_t i = 0; i < result.rank; ++i) {
    text += i > 0 ? "," : "";
    text += result.dims[i].known() ? std::to_string(result.dims[i].value) : "?";
  }
  return text;
}

std::string Defaults(const OpSpec& record) {
  std::string text;
  for (std::size_t i = 0; i < record.attribute_count; ++i) {
    text += i > 0 ? "|" : "";
    if (!record.attribute(i).has_default) continue;
    Attribute value;
    AttributeStorage storage;
    SetDefault(record.attribute(i), &value, &storage);
    switch (record.attribute(i).kind) {
      case Kind::kString:
        text += value.text();
        break;
      case Kind::kFloat: {
        char digits[64];
        std::snprintf(digits, sizeof(digits), "%.17g", value.f);
        text += digits;
        break;
      }
      case Kind::kIntList:
        for (std::size_t k = 0; k < value.count; ++k)
          text += (k > 0 ? "," : "") + std::to_string(value.ints[k]);
        break;
      default:
        text += std::to_string(value.i);
    }
  }
  return text;
}

std::string Answer(const std::vector<std::string>& request) {
  if (request[0] == "schema") return Signature(Parse(WithFields(request.at(1), request, 2)));
  if (request[0] == "validate") {
    Parse(WithFields(request.at(1), request, 2));
    return "valid";
  }
  if (request[0] == "check") return CheckCall(request);
  if (request[0] == "shape") return EvaluateShape(request);
  if (request[0] == "entry") {
    std::string found;
    int next = 0;
    ReadEntries(
        request.at(1), [&](std::string_view name) { return name == request.at(2) ? 0 : ++next; },
        [&](int i, std::string_view value) {
          if (i == 0) found = value;
        });
    return found;
  }
  if (request[0] == "defaults") return Defaults(Parse(Record(request.at(1))));
  if (request[0] == "level")
    return CpuLevel() == Level::kNone ? "none" : CpuLevel() == Level::kAvx2 ? "avx2" : "avx512";
  return "unknown request";
}

}  // namespace
}  // namespace twinop

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    try {
      std::cout << twinop::Answer(twinop::Split(line, '\t')) << std::endl;
    } catch (const char* reason) {
      std::cout << "error " << reason << std::endl;
    }
  }
}
