// The checks of shapes, and the shapes of outputs (check.h).
#include <algorithm>
#include <charconv>
#include <optional>

#include "twinop/record/check.h"

namespace twinop {
namespace {

// "a has [2, 3], b has [4]", for the inputs that are present.
std::string AllSizes(const Record& record, const Tensor* inputs) {
  std::string text;
  for (std::size_t i = 0; i < record.schema.input_count; ++i)
    if (inputs[i].present)
      text += (text.empty() ? "" : ", ") + std::string(record.schema.input(i).name.view()) +
              " has " + SizesText(inputs[i].sizes, inputs[i].rank);
  return text;
}

bool SameSizes(const Tensor& tensor, const std::int64_t* sizes, std::size_t rank) {
  if (tensor.rank != rank) return false;
  for (std::size_t i = 0; i < rank; ++i)
    if (tensor.sizes[i] != sizes[i]) return false;
  return true;
}

// The number of dimensions that `text` needs of an input: x[-2] needs two, and so does
// `x[:-2] + ...` if it is the shape of the input itself.
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

// A message about the first input that has fewer dimensions than the record's shapes need, or "".
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

// Evaluates a shape expression on the sizes of `inputs`.
Status EvaluateShape(const Record& record, std::string_view text, const Tensor* inputs,
                     const Attribute* attributes, std::int64_t* sizes, std::size_t* rank) {
  std::optional<Shape> shapes[kMaxArguments];  // few are written: a shape is large
  const Shape* present[kMaxArguments] = {};
  try {
    for (std::size_t i = 0; i < record.schema.input_count; ++i) {
      if (!inputs[i].present) continue;
      Shape& shape = shapes[i].emplace();
      for (std::size_t k = 0; k < inputs[i].rank; ++k) shape.Push(Dim{inputs[i].sizes[k], nullptr});
      present[i] = &shape;
    }
    const ShapeScope scope{&record.schema, present, attributes};
    const Shape shape = ShapeExpression(text, scope).EvaluateShape();
    *rank = shape.rank;
    for (std::size_t i = 0; i < shape.rank; ++i) sizes[i] = shape.dims[i].value;
  } catch (const char* reason) {
    const std::string too_few = TooFewDimensions(record, inputs);
    return Failure(record, inputs,
                   too_few.empty() ? std::string(reason) + ": " + std::string(text) : too_few);
  }
  return {};
}

// "dim of x"
Status CheckDimensions(const Record& record, const Tensor* inputs, const Attribute* attributes) {
  for (std::size_t i = 0; i < record.schema.attribute_count; ++i) {
    const Limit& limit = record.limit_table[i];
    if (limit.kind != Limit::Kind::kDimension || !inputs[limit.input].present) continue;
    auto rank = static_cast<std::int64_t>(inputs[limit.input].rank);
    if (rank == 0) rank = 1;  // as in torch, a scalar has dimensions 0 and -1
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
                     SizesText(tensor.sizes, tensor.rank) + ", expected " + std::string(text) +
                     " = " + SizesText(expected, rank));
}

// NumPy's rule for any number of inputs.
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
  Shape shape;
  for (std::size_t k = 0; k < *rank; ++k) shape.Push(Dim{sizes[k], nullptr});
  if (shape.IsTooLarge())
    return Failure(record, inputs,
                   "a tensor would have too many elements: " + SizesText(sizes, *rank));
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
  // Nearly all outputs have the shape of an input, which needs no evaluation.
  if (int same = record.same_shape_inputs[output];
      same != Schema::kNotFound && inputs[same].present) {
    *rank = inputs[same].rank;
    for (std::size_t i = 0; i < *rank; ++i) sizes[i] = inputs[same].sizes[i];
    return {};
  }
  if (record.broadcasts) return Broadcast(record, inputs, sizes, rank);
  return EvaluateShape(record, record.ShapeText(output), inputs, attributes, sizes, rank);
}

}  // namespace twinop
