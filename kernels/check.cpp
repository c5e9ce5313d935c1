#include "kernels/check.h"

#include <charconv>

namespace twinop {
namespace {

std::string Quote(std::string_view text) { return "'" + std::string(text) + "'"; }

std::string Sizes(const Tensor& tensor) {
  std::string text = "[";
  for (std::size_t i = 0; i < tensor.rank; ++i)
    text += (i > 0 ? ", " : "") + std::to_string(tensor.sizes[i]);
  return text + "]";
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
    return Failure(record, inputs, reason);
  }
  return {};
}

}  // namespace

std::string Describe(std::string_view name, const Tensor& tensor) {
  if (!tensor.present) return std::string(name) + ": absent";
  return std::string(name) + ": " + std::string(Info(tensor.dtype).name) + Sizes(tensor);
}

Status Failure(const Record& record, const Tensor* inputs, std::string_view message) {
  const Schema& schema = record.schema;
  std::string text = std::string(kDomain) + "::" + std::string(schema.name.view()) + "(";
  for (std::size_t i = 0; i < schema.input_count; ++i)
    text += (i > 0 ? ", " : "") + Describe(schema.input(i).name.view(), inputs[i]);
  return Status::Error(text + "): " + std::string(message));
}

Status ParseDefault(const Record& record, std::size_t index, Attribute* value) {
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
      value->s = text.substr(1, text.size() - 2);
      break;
    default: {  // int[]: "[1, 2]"
      Scanner scan(text);
      scan.Expect("[");
      value->count = 0;
      while (!scan.Accept("]")) {
        if (value->count > 0) scan.Expect(",");
        value->ints[value->count++] = scan.Integer();
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
    return Status::Error(std::string(kDomain) + "::" + std::string(record.schema.name.view()) +
                         ": attribute " + std::string(argument.name.view()) + " has " +
                         std::to_string(value.count) + " entries, at most " +
                         std::to_string(kMaxList) + " are taken");
  std::string_view choices = Entry(record.choices_text, argument.name.view());
  if (argument.kind != Kind::kString || choices.empty()) return {};
  Scanner scan(choices);
  do {
    if (scan.Word() == value.s) return {};
  } while (scan.Accept("|"));
  return Status::Error(std::string(kDomain) + "::" + std::string(record.schema.name.view()) +
                       ": attribute " + std::string(argument.name.view()) + " is " +
                       Quote(value.s) + ", expected one of " + std::string(choices));
}

Status FindCombination(const Record& record, const Tensor* inputs, std::size_t* combination) {
  const Schema& schema = record.schema;
  for (std::size_t c = 0; c < record.CombinationCount(); ++c) {
    bool matches = true;
    for (std::size_t i = 0; i < schema.input_count && matches; ++i)
      matches =
          !inputs[i].present || inputs[i].dtype == record.TypeOf(c, schema.input(i).name.view());
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

Status CheckShapes(const Record& record, const Tensor* inputs) {
  if (!record.is_elementwise) return {};
  for (std::size_t i = 1; i < record.schema.input_count; ++i) {
    bool same = inputs[i].rank == inputs[0].rank;
    for (std::size_t k = 0; k < inputs[0].rank && same; ++k)
      same = inputs[i].sizes[k] == inputs[0].sizes[k];
    if (!same) return Failure(record, inputs, "the inputs must have one shape");
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
  return WithExpression(record, record.ShapeText(output), inputs, attributes,
                        [&](ShapeExpression& expression) {
                          Shape shape = expression.EvaluateShape();
                          *rank = shape.rank;
                          for (std::size_t i = 0; i < shape.rank; ++i)
                            sizes[i] = shape.dims[i].value;
                        });
}

Status ScratchBytes(const Record& record, const Tensor* inputs, const Attribute* attributes,
                    std::int64_t* bytes) {
  *bytes = 0;
  if (record.scratch_text == "0") return {};
  return WithExpression(record, record.scratch_text, inputs, attributes,
                        [&](ShapeExpression& expression) {
                          *bytes = expression.EvaluateInt();
                          if (*bytes < 0) throw "the scratch size would be negative";
                        });
}

Status CheckAliases(const Record& record, const Tensor* inputs, const Tensor* outputs) {
  const Schema& schema = record.schema;
  auto overlap = [](const Tensor& a, const Tensor& b) {
    const char* p = a.as<char>();
    const char* q = b.as<char>();
    return a.numel > 0 && b.numel > 0 && p < q + b.bytes() && q < p + a.bytes();
  };
  for (std::size_t o = 0; o < schema.output_count; ++o) {
    if (!outputs[o].present) continue;
    for (std::size_t i = 0; i < schema.input_count; ++i) {
      if (!inputs[i].present || !overlap(inputs[i], outputs[o])) continue;
      bool same = inputs[i].data == outputs[o].data && inputs[i].bytes() == outputs[o].bytes();
      if (same && record.InPlaceInput(o) == static_cast<int>(i)) continue;
      return Failure(
          record, inputs,
          "output " + std::string(schema.outputs[o].view()) + " overlaps the memory of input " +
              std::string(schema.input(i).name.view()) + "; give the output memory of its own");
    }
  }
  return {};
}

}  // namespace twinop
