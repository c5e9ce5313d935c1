// Checks at compile time that a record is well formed, for TWINOP_OP (registry.h).
#pragma once

#include "twinop/record/record.h"

namespace twinop {

// Every entry of "name = value; ..." has a known name that occurs once.
template <class Known>
constexpr void ValidateEntries(std::string_view entries, Known&& known) {
  Scanner scan(entries);
  while (!scan.AtEnd()) {
    std::string_view name = scan.Word();
    if (!known(name)) throw "a record's entry names no argument or output of its op";
    scan.Expect("=");
    std::string_view value = scan.Until(";");
    if (value.empty()) throw "a record's entry is empty";
    if (Entry(entries, name).data() != value.data()) throw "a record has two entries of one name";
    if (!scan.AtEnd()) scan.Expect(";");
  }
}

// The shape expressions have values where no size is known.
constexpr void ValidateShapes(const Record& record) {
  Shape unknown;
  unknown.known_rank = false;
  const Shape* inputs[kMaxArguments] = {};
  for (std::size_t i = 0; i < record.schema.input_count; ++i) inputs[i] = &unknown;
  Attribute attributes[kMaxArguments] = {};
  std::int64_t list[kMaxList] = {};
  for (Attribute& attribute : attributes) {
    attribute.count = kMaxList;
    attribute.ints = list;
  }
  const ShapeScope scope{record.shape_trees, inputs, attributes, false};
  for (std::size_t i = 0; i < record.schema.output_count; ++i)
    scope.Evaluate(record.output_trees[i]);
  for (std::size_t i = 0; i < record.schema.input_count; ++i)
    if (record.input_trees[i] >= 0) scope.Evaluate(record.input_trees[i]);
}

// How many nodes of an expression are sizes that come from the data.
constexpr int CountedSizes(const ShapeTrees& trees, std::int8_t at) {
  if (at < 0) return 0;
  const ShapeNode& node = trees[at];
  return (node.operation == ShapeNode::kSize ? 1 : 0) + CountedSizes(trees, node.a) +
         CountedSizes(trees, node.b);
}

// "n <= x[0]; m"
constexpr void ValidateSizes(const Record& record) {
  if (record.sizes_counted.count == 0) {
    if (record.two_pass) throw "a record with count names what is counted: sizes(\"n\")";
    return;
  }
  if (record.is_elementwise || !record.rows_text.empty() || !record.in_place_text.empty() ||
      record.body_pieces != 0 || record.schema.WritesInputs())
    throw "an op with sizes from data is not elementwise, row-wise or in pieces, and writes no input";
  int counted = 0;
  for (std::size_t i = 0; i < record.schema.output_count; ++i) {
    const int here = CountedSizes(record.shape_trees, record.output_trees[i]);
    counted += here;
    if (record.two_pass || here == 0) continue;
    std::int8_t first = record.output_trees[i];
    while (record.shape_trees[first].operation == ShapeNode::kConcat)
      first = record.shape_trees[first].a;
    const ShapeNode& list = record.shape_trees[first];
    if (here > 1 || list.operation != ShapeNode::kList || list.a < 0 ||
        record.shape_trees[list.a].operation != ShapeNode::kSize)
      throw "without count, a size from data is an output's first dimension: y = [n] + x[1:]";
  }
  if (counted == 0) throw "a record's sizes are those of its outputs: shapes(\"y = [n]\")";
  for (std::size_t i = 0; i < record.sizes_counted.count && !record.two_pass; ++i)
    if (record.bound_trees[i] < 0)
      throw "a size has a bound, \"n <= x[0]\", or the op has a count<Count>()";
}

// Marks the inputs of "broadcast(broadcast(x, y), z)".
constexpr void MarkInputs(const ShapeTrees& trees, std::int8_t at, bool* named) {
  const ShapeNode& node = trees[at];
  if (node.operation == ShapeNode::kInput) {
    named[node.index] = true;
  } else if (node.operation == ShapeNode::kBroadcast) {
    MarkInputs(trees, node.a, named);
    MarkInputs(trees, node.b, named);
  } else {
    throw "broadcast(...) of an elementwise op lists its inputs";
  }
}

// The outputs of an elementwise op have one shape: that of an input, or of all inputs broadcast.
constexpr void ValidateElementwise(const Record& record) {
  const Schema& schema = record.schema;
  if (!record.rows_text.empty()) throw "an elementwise op has no rows";
  for (std::size_t i = 0; i < schema.output_count; ++i) {
    if (!record.broadcasts && record.same_shape_inputs[i] < 0)
      throw "an elementwise op's output has the shape of an input, or of all, broadcast(a, b)";
    if (record.broadcasts && record.ShapeText(i) != record.ShapeText(0))
      throw "an elementwise op that broadcasts has outputs of one shape";
  }
  if (!record.broadcasts) return;
  bool named[kMaxArguments] = {};
  MarkInputs(record.shape_trees, record.output_trees[0], named);
  for (std::size_t i = 0; i < schema.input_count; ++i)
    if (!named[i]) throw "broadcast(...) of an elementwise op lists all its inputs";
}

// "x, weight, _ = f(grad); residual = grad_x"
constexpr void ValidateGradient(const Record& record) {
  Scanner scan(record.gradient_text);
  bool named[kMaxArguments] = {};
  while (!scan.AtEnd()) {
    do {
      std::string_view name = scan.Word();
      if (name == "_") continue;
      const int input = record.schema.FindInput(name);
      if (input < 0) throw "a record's gradient names no input of its op";
      if (named[input]) throw "a record's gradient names an input twice";
      named[input] = true;
    } while (scan.Accept(","));
    scan.Expect("=");
    if (scan.Until(";").empty()) throw "a record's gradient is empty";
    if (!scan.AtEnd()) scan.Expect(";");
  }
}

// An output of which a record may say more than the schema: not one that is a written input.
constexpr bool IsReturned(const Schema& schema, std::string_view name) {
  const int output = schema.FindOutput(name);
  return output >= 0 && static_cast<std::size_t>(output) < schema.returned_count;
}

// "lengths = host; sum = optional"
constexpr void ValidateMemory(const Record& record) {
  const Schema& schema = record.schema;
  bool on_host = false;
  ValidateEntries(record.memory_text, [&](std::string_view name) {
    return schema.FindInput(name) >= 0 || IsReturned(schema, name);
  });
  for (std::size_t i = 0; i < schema.input_count; ++i) {
    if (!Entry(record.memory_text, schema.input(i).name.view()).empty() && !record.host_inputs[i])
      throw "a record's memory is host for inputs";
    if (record.host_inputs[i] && schema.input(i).alias != '\0')
      throw "an input that is written is in the device's memory";
    on_host = on_host || record.host_inputs[i];
  }
  for (std::size_t i = 0; i < schema.output_count; ++i)
    if (!Entry(record.memory_text, schema.outputs[i].view()).empty() && !record.optional_outputs[i])
      throw "a record's memory is optional for outputs";
  if (record.host_inputs[0]) throw "a record's first input is in the device's memory";
  if (record.optional_outputs[0]) throw "a record's first output is not optional";
  if (on_host && (record.is_elementwise || !record.rows_text.empty()))
    throw "an op with inputs in host memory is neither elementwise nor row-wise";
}

// The table of a library (kernels/abi.h) has NUL-terminated texts.
constexpr void ValidateTermination(std::string_view text) {
  if (text.data()[text.size()] != '\0') throw "a record's texts are whole string literals";
}

constexpr bool Validate(const Record& record) {
  const Schema& schema = record.schema;
  if (schema.HasRepeatedInput() && (record.is_elementwise || !record.rows_text.empty()))
    throw "an op with a Tensor[] is neither elementwise nor row-wise";
  ValidateMemory(record);
  for (std::string_view text :
       {schema.text, record.dtypes_text, record.shapes_text, record.input_shapes_text,
        record.limits_text, record.in_place_text, record.choices_text, record.rows_text,
        record.memory_text, record.sizes_text})
    ValidateTermination(text);
  ValidateShapes(record);
  ValidateSizes(record);
  if (record.is_elementwise) ValidateElementwise(record);
  auto input = [&](std::string_view name) { return schema.FindInput(name) >= 0; };
  auto output = [&](std::string_view name) { return IsReturned(schema, name); };
  auto text = [&](std::string_view name) {
    const int attribute = schema.FindAttribute(name);
    return attribute >= 0 && schema.attribute(attribute).kind == Kind::kString;
  };
  ValidateEntries(record.shapes_text, output);
  ValidateEntries(record.input_shapes_text, input);
  ValidateEntries(record.in_place_text, output);
  ValidateEntries(record.choices_text, text);
  ValidateGradient(record);
  for (std::size_t i = 0; i < schema.output_count; ++i)
    if (!Entry(record.in_place_text, schema.outputs[i].view()).empty() &&
        record.InPlaceInput(i) < 0)
      throw "a record's in_place names no input";
  if (record.autocast_text != "keep" && record.autocast_text != "widest" &&
      record.autocast_text != "lower")
    throw "autocast is keep, widest or lower";
  return true;
}

}  // namespace twinop
