// The checks of shapes, and the shapes of outputs (check.h).
#include <algorithm>
#include <optional>

#include "twinop/record/check.h"

namespace twinop {
namespace {

// "a has [2, 3], b has [4]", for the inputs that are present.
std::string AllSizes(const OpSpec& record, const Tensor* inputs) {
  std::string text;
  for (std::size_t i = 0; i < record.input_count; ++i)
    if (inputs[i].present)
      text += (text.empty() ? "" : ", ") + std::string(record.input(i).name) + " has " +
              SizesText(inputs[i].sizes, inputs[i].rank);
  return text;
}

// A message about the first input that has fewer dimensions than the record's shapes need, or "":
// x[-2] needs two of x, and so does `x[:-2] + ...` if it is the shape of x itself.
std::string TooFewDimensions(const OpSpec& record, const Tensor* inputs) {
  std::int64_t needed[kMaxArguments] = {};
  for (std::size_t i = 0; i < record.node_count; ++i) {
    const twinop_node& node = record.nodes[i];
    if (node.operation == TWINOP_DIMENSION || node.operation == TWINOP_SLICE)
      needed[node.index] = std::max(needed[node.index], node.value);
  }
  for (std::size_t i = 0; i < record.input_count; ++i) {
    const std::size_t rank = inputs[i].rank;
    if (!inputs[i].present || static_cast<std::int64_t>(rank) >= needed[i]) continue;
    return std::string(record.input(i).name) + " has " + std::to_string(rank) + " dimension" +
           (rank == 1 ? "" : "s") + ", expected at least " + std::to_string(needed[i]) +
           " (unsqueeze adds one)";
  }
  return "";
}

// Evaluates a shape expression, the tree `root` of this text, on the sizes of `inputs`.
Status EvaluateShape(const OpSpec& record, std::int32_t root, const twinop_text& text,
                     const Tensor* inputs, const Attribute* attributes, std::int64_t* sizes,
                     std::size_t* rank, const std::int64_t* counts = nullptr) {
  std::optional<Shape> shapes[kMaxArguments];  // few are written: a shape is large
  const Shape* present[kMaxArguments] = {};
  try {
    for (std::size_t i = 0; i < record.input_count; ++i) {
      if (!inputs[i].present) continue;
      Shape& shape = shapes[i].emplace();
      for (std::size_t k = 0; k < inputs[i].rank; ++k) shape.Push(Dim{inputs[i].sizes[k], nullptr});
      present[i] = &shape;
    }
    const Shape shape = ShapeScope{record.nodes, present, attributes, true, counts}.Evaluate(root);
    *rank = shape.rank;
    for (std::size_t i = 0; i < shape.rank; ++i) sizes[i] = shape.dims[i].value;
  } catch (const char* reason) {
    const std::string too_few = TooFewDimensions(record, inputs);
    return Failure(
        record, inputs,
        too_few.empty() ? std::string(reason) + ": " + std::string(View(text)) : too_few);
  }
  return {};
}

// "dim of x"
Status CheckDimensions(const OpSpec& record, const Tensor* inputs, const Attribute* attributes) {
  for (std::size_t i = 0; i < record.limit_count; ++i) {
    const twinop_limit& limit = record.limits[i];
    if (limit.rule != TWINOP_DIMENSION_OF || !inputs[limit.value].present) continue;
    auto rank = static_cast<std::int64_t>(inputs[limit.value].rank);
    if (rank == 0) rank = 1;  // as in torch, a scalar has dimensions 0 and -1
    const std::int64_t value = attributes[limit.attribute].i;
    if (value >= -rank && value < rank) continue;
    const std::string name(record.attribute(limit.attribute).name);
    return Failure(record, inputs,
                   "attribute " + name + " is " + std::to_string(value) +
                       ", expected a dimension of " + std::string(record.input(limit.value).name) +
                       ": " + std::to_string(-rank) + " to " + std::to_string(rank - 1));
  }
  return {};
}

Status CheckInputShape(const OpSpec& record, std::size_t input, const Tensor* inputs,
                       const Attribute* attributes) {
  const Tensor& tensor = inputs[input];
  const twinop_text& text = record.input(input).shape_text;
  std::int64_t expected[kMaxRank];
  std::size_t rank = 0;
  const std::int32_t root = record.input(input).shape;
  const twinop_node& node = record.nodes[root];
  // Nearly all have the form "x", "x[axis:]" or "x[-1:]", which needs no evaluation.
  if (IsSuffix(record.nodes, root) && inputs[node.index].present) {
    const Tensor& whole = inputs[node.index];
    const std::size_t begin = SuffixBegin(record.nodes, root, attributes, whole.rank);
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
                 std::string(record.input(input).name) + " has shape " +
                     SizesText(tensor.sizes, tensor.rank) + ", expected " +
                     std::string(View(text)) + " = " + SizesText(expected, rank));
}

// NumPy's rule for any number of inputs.
Status Broadcast(const OpSpec& record, const Tensor* inputs, std::int64_t* sizes,
                 std::size_t* rank) {
  *rank = 0;
  for (std::size_t i = 0; i < record.input_count; ++i)
    if (inputs[i].rank > *rank) *rank = inputs[i].rank;
  for (std::size_t k = 0; k < *rank; ++k) sizes[k] = 1;
  for (std::size_t i = 0; i < record.input_count; ++i) {
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

Status CheckShapes(const OpSpec& record, const Tensor* inputs, const Attribute* attributes) {
  if (record.is_elementwise && !record.Broadcasts()) {
    for (std::size_t i = 1; i < record.input_count; ++i)
      if (inputs[i].present && !inputs[i].HasSizes(inputs[0].sizes, inputs[0].rank))
        return Failure(record, inputs,
                       "the inputs must have one shape: " + AllSizes(record, inputs));
  }
  TWINOP_RETURN_IF_ERROR(CheckDimensions(record, inputs, attributes));
  for (std::size_t i = 0; i < record.input_count; ++i)
    if (inputs[i].present && record.input(i).shape >= 0)
      TWINOP_RETURN_IF_ERROR(CheckInputShape(record, i, inputs, attributes));
  return {};
}

Status OutputShape(const OpSpec& record, std::size_t output, const Tensor* inputs,
                   const Attribute* attributes, std::int64_t* sizes, std::size_t* rank,
                   const std::int64_t* counts) {
  // Nearly all outputs have the shape of an input, which needs no evaluation.
  if (int same = record.SameShapeInput(output); same != OpSpec::kNotFound && inputs[same].present) {
    *rank = inputs[same].rank;
    for (std::size_t i = 0; i < *rank; ++i) sizes[i] = inputs[same].sizes[i];
    return {};
  }
  if (record.Broadcasts()) return Broadcast(record, inputs, sizes, rank);
  return EvaluateShape(record, record.outputs[output].shape, record.outputs[output].shape_text,
                       inputs, attributes, sizes, rank, counts);
}

Status SizeBound(const OpSpec& record, std::size_t size, const Tensor* inputs,
                 const Attribute* attributes, std::int64_t* bound) {
  std::size_t rank = 0;
  *bound = INT64_MAX;
  if (record.sizes[size].bound < 0) return {};
  return EvaluateShape(record, record.sizes[size].bound, record.sizes[size].bound_text, inputs,
                       attributes, bound, &rank);
}

}  // namespace twinop
