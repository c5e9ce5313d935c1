// The checks of shapes, and the shapes of outputs (check.h).
#include <algorithm>
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

// A message about the first input that has fewer dimensions than the record's shapes need, or "":
// x[-2] needs two of x, and so does `x[:-2] + ...` if it is the shape of x itself.
std::string TooFewDimensions(const Record& record, const Tensor* inputs) {
  std::int64_t needed[kMaxArguments] = {};
  for (std::int8_t i = 0; i < record.shape_trees.count; ++i) {
    const ShapeNode& node = record.shape_trees[i];
    if (node.operation == ShapeNode::kDimension || node.operation == ShapeNode::kSlice)
      needed[node.index] = std::max(needed[node.index], node.value);
  }
  for (std::size_t i = 0; i < record.schema.input_count; ++i) {
    const std::size_t rank = inputs[i].rank;
    if (!inputs[i].present || static_cast<std::int64_t>(rank) >= needed[i]) continue;
    return std::string(record.schema.input(i).name.view()) + " has " + std::to_string(rank) +
           " dimension" + (rank == 1 ? "" : "s") + ", expected at least " +
           std::to_string(needed[i]) + " (unsqueeze adds one)";
  }
  return "";
}

// Evaluates a shape expression, the tree `root` of this text, on the sizes of `inputs`.
Status EvaluateShape(const Record& record, std::int8_t root, std::string_view text,
                     const Tensor* inputs, const Attribute* attributes, std::int64_t* sizes,
                     std::size_t* rank, const std::int64_t* counts = nullptr) {
  std::optional<Shape> shapes[kMaxArguments];  // few are written: a shape is large
  const Shape* present[kMaxArguments] = {};
  try {
    for (std::size_t i = 0; i < record.schema.input_count; ++i) {
      if (!inputs[i].present) continue;
      Shape& shape = shapes[i].emplace();
      for (std::size_t k = 0; k < inputs[i].rank; ++k) shape.Push(Dim{inputs[i].sizes[k], nullptr});
      present[i] = &shape;
    }
    const Shape shape =
        ShapeScope{record.shape_trees, present, attributes, true, counts}.Evaluate(root);
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
  const std::int8_t root = record.input_trees[input];
  const ShapeNode& node = record.shape_trees[root];
  // Nearly all have the form "x", "x[axis:]" or "x[-1:]", which needs no evaluation.
  if (record.shape_trees.IsSuffix(root) && inputs[node.index].present) {
    const Tensor& whole = inputs[node.index];
    const std::size_t begin = record.shape_trees.Begin(root, attributes, whole.rank);
    rank = whole.rank - begin;
    if (tensor.HasSizes(whole.sizes + begin, rank)) return {};
    for (std::size_t i = 0; i < rank; ++i) expected[i] = whole.sizes[begin + i];
  } else {
    TWINOP_RETURN_IF_ERROR(EvaluateShape(record, root, text, inputs, attributes, expected, &rank));
    if (tensor.HasSizes(expected, rank)) return {};
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
      if (inputs[i].present && !inputs[i].HasSizes(inputs[0].sizes, inputs[0].rank))
        return Failure(record, inputs,
                       "the inputs must have one shape: " + AllSizes(record, inputs));
  }
  if (!record.limits_text.empty())
    TWINOP_RETURN_IF_ERROR(CheckDimensions(record, inputs, attributes));
  if (!record.input_shapes_text.empty()) {
    for (std::size_t i = 0; i < record.schema.input_count; ++i)
      if (inputs[i].present && record.input_trees[i] >= 0)
        TWINOP_RETURN_IF_ERROR(CheckInputShape(record, i, inputs, attributes));
  }
  return {};
}

Status OutputShape(const Record& record, std::size_t output, const Tensor* inputs,
                   const Attribute* attributes, std::int64_t* sizes, std::size_t* rank,
                   const std::int64_t* counts) {
  // Nearly all outputs have the shape of an input, which needs no evaluation.
  if (int same = record.same_shape_inputs[output];
      same != Schema::kNotFound && inputs[same].present) {
    *rank = inputs[same].rank;
    for (std::size_t i = 0; i < *rank; ++i) sizes[i] = inputs[same].sizes[i];
    return {};
  }
  if (record.broadcasts) return Broadcast(record, inputs, sizes, rank);
  return EvaluateShape(record, record.output_trees[output], record.ShapeText(output), inputs,
                       attributes, sizes, rank, counts);
}

Status SizeBound(const Record& record, std::size_t size, const Tensor* inputs,
                 const Attribute* attributes, std::int64_t* bound) {
  std::size_t rank = 0;
  *bound = INT64_MAX;
  if (record.bound_trees[size] < 0) return {};
  return EvaluateShape(record, record.bound_trees[size], record.bound_texts[size], inputs,
                       attributes, bound, &rank);
}

}  // namespace twinop
