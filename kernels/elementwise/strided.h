// The layout of an elementwise call's tensors, reduced to the fewest dimensions. Both launchers
// loop over it where the tensors are not one contiguous sequence (broadcasting, strided views).
#pragma once

#include <algorithm>
#include <cstdint>

#include "twinop/record/op_spec.h"

namespace twinop::elementwise {

// The operands of a call are its outputs, followed by its inputs; kOperands or fewer.
template <int kOperands>
struct Layout {
  int rank = 0;  // at least 1 once made; the first dimension is the innermost
  std::int64_t numel = 0;
  std::int64_t sizes[kMaxRank];
  std::int64_t strides[kOperands][kMaxRank];  // in elements; 0 where an operand is broadcast

  // Returns whether all kOperands operands are one contiguous sequence in the same order.
  bool IsFlat() const {
    bool flat = rank == 1;
    for (int k = 0; k < kOperands; ++k) flat = flat && strides[k][0] == 1;
    return flat;
  }
  // Returns whether the operand is one contiguous sequence in the order of the call.
  bool IsFlat(int operand) const {
    std::int64_t expected = 1;
    for (int i = 0; i < rank; expected *= sizes[i++])
      if (strides[operand][i] != expected) return false;
    return true;
  }
  // Returns whether the operand has one element, which all elements of the call read.
  bool IsScalar(int operand) const {
    for (int i = 0; i < rank; ++i)
      if (strides[operand][i] != 0) return false;
    return true;
  }
  // Returns whether every `width` elements of the call are neighbours in the operand, and start a
  // multiple of `width` elements from its first one.
  bool HasVectors(int operand, std::int64_t width) const {
    if (IsFlat(operand)) return true;
    bool vector = strides[operand][0] == 1 && sizes[0] % width == 0;
    for (int d = 1; d < rank; ++d) vector = vector && strides[operand][d] % width == 0;
    return vector;
  }
  // Halves the outermost dimension, between vectors of `width` elements. Returns the back half, and
  // how many elements it lies behind the front one in each operand.
  Layout Split(std::int64_t width, std::int64_t (&offsets)[kOperands]) {
    while (sizes[rank - 1] == 1) --rank;
    const int d = rank - 1;
    const std::int64_t size = sizes[d];
    std::int64_t half = size / 2;
    if (d == 0) half -= half % width;
    for (int k = 0; k < kOperands; ++k) offsets[k] = half * strides[k][d];
    Layout back = *this;
    sizes[d] = half;
    numel = numel / size * half;
    back.sizes[d] -= half;
    back.numel -= numel;
    return back;
  }
};

// Returns whether all tensors have as many elements as the first output, in one contiguous order.
inline bool IsFlat(const Call& call, int outputs, int inputs) {
  const std::int64_t numel = call.outputs[0].numel;
  bool flat = true;
  for (int i = 0; i < outputs; ++i) flat = flat && call.outputs[i].strides == nullptr;
  for (int i = 0; i < inputs; ++i)
    flat = flat && call.inputs[i].strides == nullptr && call.inputs[i].numel == numel;
  return flat;
}

// Returns the layout of a call with any number of operands up to kMaxOperands.
template <int kMaxOperands>
Layout<kMaxOperands> MakeLayout(const Call& call, int outputs, int inputs) {
  const int operands = outputs + inputs;
  const Tensor& first = call.outputs[0];
  const int rank = static_cast<int>(first.rank);

  // The dimensions larger than 1, from the last to the first, and every operand's stride there.
  Layout<kMaxOperands> all;
  all.numel = first.numel;
  int index[kMaxRank];  // a dimension's place in `all`, or -1
  for (int d = 0; d < rank; ++d) {
    const std::int64_t size = first.sizes[rank - 1 - d];
    index[d] = size == 1 ? -1 : all.rank;
    if (size == 1) continue;
    for (int k = 0; k < operands; ++k) all.strides[k][all.rank] = 0;
    all.sizes[all.rank++] = size;
  }
  for (int k = 0; k < operands; ++k) {
    const Tensor& tensor = k < outputs ? call.outputs[k] : call.inputs[k - outputs];
    std::int64_t dense = 1;
    for (int d = 0; d < static_cast<int>(tensor.rank); ++d) {
      const std::size_t i = tensor.rank - 1 - static_cast<std::size_t>(d);
      if (tensor.sizes[i] != 1)
        all.strides[k][index[d]] = tensor.strides != nullptr ? tensor.strides[i] : dense;
      dense *= tensor.sizes[i];
    }
  }

  // Order the dimensions by the first output's strides, so that its stores are consecutive.
  int order[kMaxRank];
  for (int d = 0; d < all.rank; ++d) {
    int place = d;
    for (; place > 0 && all.strides[0][order[place - 1]] > all.strides[0][d]; --place)
      order[place] = order[place - 1];
    order[place] = d;
  }

  // Merge a dimension into the one inside it where it continues that one for every operand.
  Layout<kMaxOperands> layout;
  layout.numel = all.numel;
  for (int i = 0; i < all.rank; ++i) {
    const int d = order[i];
    const int last = layout.rank - 1;
    bool continues = last >= 0;
    for (int k = 0; k < operands && continues; ++k)
      continues = all.strides[k][d] == layout.strides[k][last] * layout.sizes[last];
    if (continues) {
      layout.sizes[last] *= all.sizes[d];
      continue;
    }
    for (int k = 0; k < operands; ++k) layout.strides[k][layout.rank] = all.strides[k][d];
    layout.sizes[layout.rank++] = all.sizes[d];
  }
  if (layout.rank == 0) {  // one element
    layout.rank = 1;
    layout.sizes[0] = 1;
    for (int k = 0; k < operands; ++k) layout.strides[k][0] = 1;
  }
  return layout;
}
template <int kOutputs, int kInputs>
Layout<kOutputs + kInputs> MakeLayout(const Call& call) {
  return MakeLayout<kOutputs + kInputs>(call, kOutputs, kInputs);
}

}  // namespace twinop::elementwise
