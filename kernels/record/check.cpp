#include "kernels/record/check.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>

namespace twinop {
namespace {

std::string Quote(std::string_view text) { return "'" + std::string(text) + "'"; }

std::string Sizes(const std::int64_t* sizes, std::size_t rank) {
  std::string text = "[";
  for (std::size_t i = 0; i < rank; ++i) text += (i > 0 ? ", " : "") + std::to_string(sizes[i]);
  return text + "]";
}

// "a has [2, 3], b has [4]": every input that is present.
std::string AllSizes(const Record& record, const Tensor* inputs) {
  std::string text;
  for (std::size_t i = 0; i < record.schema.input_count; ++i)
    if (inputs[i].present)
      text += (text.empty() ? "" : ", ") + std::string(record.schema.input(i).name.view()) +
              " has " + Sizes(inputs[i].sizes, inputs[i].rank);
  return text;
}

// An attribute that is wrong whatever the inputs are.
Status WrongAttribute(const Record& record, const Argument& argument, const std::string& message) {
  return Status::Error(std::string(record.domain) + "::" + std::string(record.schema.name.view()) +
                       ": attribute " + std::string(argument.name.view()) + " " + message);
}

std::string Number(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g", value);
  return text;
}

bool SameSizes(const Tensor& tensor, const std::int64_t* sizes, std::size_t rank) {
  if (tensor.rank != rank) return false;
  for (std::size_t i = 0; i < rank; ++i)
    if (tensor.sizes[i] != sizes[i]) return false;
  return true;
}

// How many dimensions `text` needs of an input: x[-2] needs two. So does `x[:-2] + ...` where it
// says what the input's own shape is.
std::size_t NeededRank(std::string_view text, const std::string& input, bool is_own_shape) {
  const std::string indexed = input + "[";
  std::size_t needed = 0;
  for (std::size_t at = text.find(indexed); at != text.npos; at = text.find(indexed, at + 1)) {
    if (at > 0 && Scanner::IsWord(text[at - 1])) continue;  // the end of a longer name
    std::string_view rest = text.substr(at + indexed.size());
    const bool is_slice = rest.substr(0, 1) == ":";
    if (is_slice) rest.remove_prefix(1);
    std::int64_t index = 0;
    auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), index);
    if (error != std::errc() || end == rest.data() + rest.size() || *end != ']') continue;
    if (is_slice && (index >= 0 || !is_own_shape)) continue;
    needed = std::max(needed, static_cast<std::size_t>(index < 0 ? -index : index + 1));
  }
  return needed;
}

// What is wrong with the first input that has fewer dimensions than the record's shapes need, or
// "".
std::string TooFewDimensions(const Record& record, const Tensor* inputs) {
  for (std::size_t i = 0; i < record.schema.input_count; ++i) {
    if (!inputs[i].present) continue;
    const std::string name(record.schema.input(i).name.view());
    const std::size_t rank = inputs[i].rank;
    std::size_t needed = NeededRank(record.shapes_text, name, false);
    needed = std::max(needed, NeededRank(record.input_shapes_text, name, false));
    needed = std::max(needed, NeededRank(record.input_shape_texts[i], name, true));
    if (rank < needed)
      return name + " has " + std::to_string(rank) + " dimension" + (rank == 1 ? "" : "s") +
             ", expected at least " + std::to_string(needed) + " (unsqueeze adds one)";
  }
  return "";
}

// Fills `shape` from a tensor view.
void ToShape(const Tensor& tensor, Shape* shape) {
  for (std::size_t i = 0; i < tensor.rank; ++i) shape->Push(Dim{tensor.sizes[i], nullptr});
}

// Runs `evaluate(ShapeExpression&)` on the sizes of `inputs`.
template <class Evaluate>
Status WithExpression(const Record& record, std::string_view text, const Tensor* inputs,
                      const Attribute* attributes, Evaluate&& evaluate) {
  const Schema& schema = record.schema;
  Shape shapes[kMaxArguments];
  const Shape* present[kMaxArguments] = {};
  try {
    for (std::size_t i = 0; i < schema.input_count; ++i) {
      if (!inputs[i].present) continue;
      ToShape(inputs[i], &shapes[i]);
      present[i] = &shapes[i];
    }
    ShapeScope scope{&schema, present, attributes};
    ShapeExpression expression(text, scope);
    evaluate(expression);
  } catch (const char* reason) {
    const std::string too_few = TooFewDimensions(record, inputs);
    return Status::Error(too_few.empty() ? std::string(reason) + ": " + std::string(text)
                                         : too_few);
  }
  return {};
}

Status EvaluateShape(const Record& record, std::string_view text, const Tensor* inputs,
                     const Attribute* attributes, std::int64_t* sizes, std::size_t* rank) {
  Status status =
      WithExpression(record, text, inputs, attributes, [&](ShapeExpression& expression) {
        Shape shape = expression.EvaluateShape();
        *rank = shape.rank;
        for (std::size_t i = 0; i < shape.rank; ++i) sizes[i] = shape.dims[i].value;
      });
  return status.ok() ? Status() : Failure(record, inputs, status.message());
}

}  // namespace

std::string Describe(std::string_view name, const Tensor& tensor) {
  if (!tensor.present) return std::string(name) + ": absent";
  return std::string(name) + ": " + std::string(Info(tensor.dtype).name) +
         Sizes(tensor.sizes, tensor.rank);
}

Status Failure(const Record& record, const Tensor* inputs, std::string_view message) {
  const Schema& schema = record.schema;
  std::string text = std::string(record.domain) + "::" + std::string(schema.name.view()) + "(";
  for (std::size_t i = 0; i < schema.input_count; ++i)
    text += (i > 0 ? ", " : "") + Describe(schema.input(i).name.view(), inputs[i]);
  return Status::Error(text + "): " + std::string(message));
}

Status ParseDefault(const Record& record, std::size_t index, Attribute* value,
                    AttributeStorage* storage) {
  const Argument& argument = record.schema.attribute(index);
  std::string_view text = argument.default_text;
  auto number = [](std::string_view digits, auto* result) {
    auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), *result);
    return error == std::errc() && end == digits.data() + digits.size();
  };
  bool ok = true;
  switch (argument.kind) {
    case Kind::kInt:
      ok = number(text, &value->i);
      break;
    case Kind::kBool:
      value->i = text == "True";
      break;
    case Kind::kFloat: {
      ok = number(text, &value->f);
      value->f = static_cast<float>(value->f);
      break;
    }
    case Kind::kString:
      storage->text = text.substr(1, text.size() - 2);
      value->s = std::string_view(storage->text);
      break;
    default: {  // int[]: "[1, 2]"
      Scanner scan(text);
      scan.Expect("[");
      value->ints = storage->ints;
      value->count = 0;
      while (!scan.Accept("]")) {
        if (value->count > 0) scan.Expect(",");
        storage->ints[value->count++] = scan.Integer();
      }
    }
  }
  if (ok) return {};
  return Status::Error("schema " + std::string(record.schema.text) + ": the default of " +
                       std::string(argument.name.view()) + " does not parse");
}

Status CheckAttribute(const Record& record, std::size_t index, const Attribute& value) {
  const Argument& argument = record.schema.attribute(index);
  if (value.count > kMaxList)
    return WrongAttribute(record, argument,
                          "has " + std::to_string(value.count) + " entries, at most " +
                              std::to_string(kMaxList) + " are taken");
  const Limit& limit = record.limit_table[index];
  if (limit.kind == Limit::Kind::kAtLeast) {
    const bool whole = argument.kind == Kind::kInt;
    if (whole ? value.i < limit.minimum
              : !(std::isfinite(value.f) && value.f >= static_cast<double>(limit.minimum)))
      return WrongAttribute(record, argument,
                            "is " + (whole ? std::to_string(value.i) : Number(value.f)) +
                                ", expected a " + (whole ? "" : "finite ") +
                                "number >= " + std::to_string(limit.minimum));
  }
  if (limit.kind == Limit::Kind::kOneOf) {
    Scanner scan(limit.choices);
    do {
      if (scan.Integer() == value.i) return {};
    } while (scan.Accept("|"));
    return WrongAttribute(
        record, argument,
        "is " + std::to_string(value.i) + ", expected one of " + std::string(limit.choices));
  }
  if (argument.kind != Kind::kString) return {};
  std::string_view choices = Entry(record.choices_text, argument.name.view());
  if (choices.empty()) return {};
  Scanner scan(choices);
  do {
    if (scan.Word() == value.s) return {};
  } while (scan.Accept("|"));
  return WrongAttribute(record, argument,
                        "is " + Quote(value.s) + ", expected one of " + std::string(choices));
}

Status FindCombination(const Record& record, const Tensor* inputs, std::size_t* combination) {
  const Schema& schema = record.schema;
  for (std::size_t c = 0; c < record.CombinationCount(); ++c) {
    bool matches = true;
    for (std::size_t i = 0; i < schema.input_count && matches; ++i)
      matches = !inputs[i].present || inputs[i].dtype == record.input_types[c][i];
    if (matches) {
      *combination = c;
      return {};
    }
  }
  return Failure(record, inputs,
                 "no kernel takes these dtypes; the inputs must have one of: " +
                     std::string(record.dtypes_text) +
                     " (all inputs the same but where one is named)");
}

namespace {

// "dim of x"
Status CheckDimensions(const Record& record, const Tensor* inputs, const Attribute* attributes) {
  for (std::size_t i = 0; i < record.schema.attribute_count; ++i) {
    const Limit& limit = record.limit_table[i];
    if (limit.kind != Limit::Kind::kDimension || !inputs[limit.input].present) continue;
    auto rank = static_cast<std::int64_t>(inputs[limit.input].rank);
    if (rank == 0) rank = 1;  // as torch: a scalar's one element lies along dimension 0 or -1
    const std::int64_t value = attributes[i].i;
    if (value >= -rank && value < rank) continue;
    const std::string name(record.schema.attribute(i).name.view());
    return Failure(record, inputs,
                   "attribute " + name + " is " + std::to_string(value) +
                       ", expected a dimension of " +
                       std::string(record.schema.input(limit.input).name.view()) + ": " +
                       std::to_string(-rank) + " to " + std::to_string(rank - 1));
  }
  return {};
}

Status CheckInputShape(const Record& record, std::size_t input, const Tensor* inputs,
                       const Attribute* attributes) {
  const Tensor& tensor = inputs[input];
  std::string_view text = record.input_shape_texts[input];
  std::int64_t expected[kMaxRank];
  std::size_t rank = 0;
  const ShapeSlice& slice = record.input_slices[input];
  if (slice.input >= 0 && inputs[slice.input].present) {
    const Tensor& whole = inputs[slice.input];
    const std::size_t begin = slice.Begin(attributes, whole.rank);
    rank = whole.rank - begin;
    if (SameSizes(tensor, whole.sizes + begin, rank)) return {};
    for (std::size_t i = 0; i < rank; ++i) expected[i] = whole.sizes[begin + i];
  } else {
    TWINOP_RETURN_IF_ERROR(EvaluateShape(record, text, inputs, attributes, expected, &rank));
    if (SameSizes(tensor, expected, rank)) return {};
  }
  if (const std::string too_few = TooFewDimensions(record, inputs); !too_few.empty())
    return Failure(record, inputs, too_few);
  return Failure(record, inputs,
                 std::string(record.schema.input(input).name.view()) + " has shape " +
                     Sizes(tensor.sizes, tensor.rank) + ", expected " + std::string(text) + " = " +
                     Sizes(expected, rank));
}

// numpy's rule, for any number of inputs.
Status Broadcast(const Record& record, const Tensor* inputs, std::int64_t* sizes,
                 std::size_t* rank) {
  *rank = 0;
  for (std::size_t i = 0; i < record.schema.input_count; ++i)
    if (inputs[i].rank > *rank) *rank = inputs[i].rank;
  for (std::size_t k = 0; k < *rank; ++k) sizes[k] = 1;
  for (std::size_t i = 0; i < record.schema.input_count; ++i) {
    std::int64_t* last = sizes + (*rank - inputs[i].rank);
    for (std::size_t k = 0; k < inputs[i].rank; ++k) {
      const std::int64_t size = inputs[i].sizes[k];
      if (size == 1 || size == last[k]) continue;
      if (last[k] != 1)
        return Failure(record, inputs,
                       "the inputs' shapes do not broadcast: " + AllSizes(record, inputs) +
                           "; from the last dimension on, sizes must be equal or 1");
      last[k] = size;
    }
  }
  return {};
}

}  // namespace

Status CheckShapes(const Record& record, const Tensor* inputs, const Attribute* attributes) {
  if (record.is_elementwise && !record.broadcasts) {
    for (std::size_t i = 1; i < record.schema.input_count; ++i)
      if (inputs[i].present && !SameSizes(inputs[i], inputs[0].sizes, inputs[0].rank))
        return Failure(record, inputs,
                       "the inputs must have one shape: " + AllSizes(record, inputs));
  }
  if (record.has_limits) TWINOP_RETURN_IF_ERROR(CheckDimensions(record, inputs, attributes));
  if (record.has_input_shapes) {
    for (std::size_t i = 0; i < record.schema.input_count; ++i)
      if (inputs[i].present && !record.input_shape_texts[i].empty())
        TWINOP_RETURN_IF_ERROR(CheckInputShape(record, i, inputs, attributes));
  }
  return {};
}

Status OutputShape(const Record& record, std::size_t output, const Tensor* inputs,
                   const Attribute* attributes, std::int64_t* sizes, std::size_t* rank) {
  // Nearly every output has the shape of an input: no evaluation then.
  if (int same = record.same_shape_inputs[output];
      same != Schema::kNotFound && inputs[same].present) {
    *rank = inputs[same].rank;
    for (std::size_t i = 0; i < *rank; ++i) sizes[i] = inputs[same].sizes[i];
    return {};
  }
  if (record.broadcasts) return Broadcast(record, inputs, sizes, rank);
  return EvaluateShape(record, record.ShapeText(output), inputs, attributes, sizes, rank);
}

Status ScratchBytes(const Record& record, const Call& call, std::int64_t* bytes) {
  *bytes = 0;
  if (record.scratch_size == nullptr) return {};
  ErrorText error;
  if (record.scratch_size(ToC(call), bytes, &error) == 0) return {};
  return Failure(record, call.inputs, error.text);
}

Status CheckAliases(const Record& record, const Call& call) {
  const Schema& schema = record.schema;
  const Tensor* inputs = call.inputs;
  const Tensor* outputs = call.outputs;
  auto overlap = [](const Tensor& a, const Tensor& b) {
    const char* p = a.as<char>();
    const char* q = b.as<char>();
    return a.numel > 0 && b.numel > 0 && p < q + b.bytes() && q < p + a.bytes();
  };
  for (std::size_t o = 0; o < schema.output_count; ++o) {
    if (!outputs[o].present) continue;
    for (std::size_t i = 0; i < call.input_count; ++i) {
      if (!inputs[i].present || !overlap(inputs[i], outputs[o])) continue;
      bool same = inputs[i].data == outputs[o].data && inputs[i].bytes() == outputs[o].bytes();
      if (same && record.InPlaceInput(o) == static_cast<int>(i)) continue;
      return Failure(
          record, inputs,
          "output " + std::string(schema.outputs[o].view()) + " overlaps the memory of input " +
              std::string(schema.input(std::min(i, schema.input_count - 1)).name.view()) +
              "; give the output memory of its own");
    }
  }
  return {};
}

}  // namespace twinop
