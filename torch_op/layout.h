// Tests of strides, and the strides of outputs.
#pragma once

#include <algorithm>
#include <limits>
#include <utility>

#include "twinop/record/op_spec.h"

namespace twinop::torch_op {

inline void ContiguousStrides(const std::int64_t* sizes, std::size_t rank, std::int64_t* strides) {
  std::int64_t next = 1;
  for (std::size_t i = rank; i-- > 0;) {
    strides[i] = next;
    if (sizes[i] > 0) next = Times(next, sizes[i]);
  }
}

// Whether the dimensions from `begin` on are those of a contiguous tensor.
inline bool IsContiguous(const Tensor& view, const std::int64_t* strides, std::size_t begin = 0) {
  std::int64_t expected = 1;
  for (std::size_t i = view.rank; i-- > begin; expected = Times(expected, view.sizes[i]))
    if (view.sizes[i] > 1 && strides[i] != expected) return false;
  return true;
}

// Whether a tensor has neither gaps nor overlap. torch.empty_like keeps the strides of such a
// tensor.
inline bool IsDense(const Tensor& view, const std::int64_t* strides) {
  if (IsContiguous(view, strides)) return true;
  bool used[kMaxRank] = {};
  std::int64_t expected = 1;
  for (std::size_t step = 0; step < view.rank; ++step) {
    std::size_t next = view.rank;
    for (std::size_t i = 0; i < view.rank; ++i)
      if (!used[i] && (view.sizes[i] <= 1 || strides[i] == expected)) next = i;
    if (next == view.rank) return false;
    used[next] = true;
    if (view.sizes[next] > 1) expected = Times(expected, view.sizes[next]);
  }
  return true;
}

// Whether two elements of a tensor may share memory.
inline bool OverlapsItself(const Tensor& tensor) {
  std::pair<std::int64_t, std::int64_t> dimensions[kMaxRank];  // strides and sizes
  for (std::size_t i = 0; i < tensor.rank; ++i)
    dimensions[i] = {tensor.strides[i], tensor.sizes[i]};
  std::sort(dimensions, dimensions + tensor.rank);
  std::int64_t last = 0;  // element of the dimensions so far
  for (std::size_t i = 0; i < tensor.rank; ++i) {
    const auto [stride, size] = dimensions[i];
    if (size > 1 && stride <= last) return tensor.numel > 0;
    last += (size - 1) * stride;
  }
  return false;
}

// The bytes that a tensor covers of each `step` bytes from its begin on, or -1 where a larger
// stride is no multiple of `step`.
inline std::int64_t CoveredBytes(const Tensor& tensor, std::int64_t step) {
  const auto size = static_cast<std::int64_t>(Info(tensor.dtype).size);
  std::int64_t covered = size;
  for (std::size_t i = 0; i < tensor.rank; ++i) {
    const std::int64_t stride = tensor.strides[i] * size;
    if (tensor.sizes[i] <= 1) continue;
    if (stride >= step && stride % step != 0) return -1;
    if (stride < step) covered += (tensor.sizes[i] - 1) * stride;
  }
  return covered;
}

// Whether no element of two tensors shares memory: they lie behind each other, or, as the halves
// kv[:, 0] and kv[:, 1], what they cover of each stride does.
inline bool LieApart(const Tensor& a, const Tensor& b) {
  constexpr std::int64_t kAll = std::numeric_limits<std::int64_t>::max();
  const std::int64_t behind = b.as<char>() - a.as<char>();
  if (a.numel == 0 || b.numel == 0 || behind >= CoveredBytes(a, kAll) ||
      -behind >= CoveredBytes(b, kAll))
    return true;
  for (const Tensor* tensor : {&a, &b})
    for (std::size_t i = 0; i < tensor->rank; ++i) {
      if (tensor->sizes[i] <= 1 || tensor->strides[i] == 0) continue;
      const std::int64_t step =
          tensor->strides[i] * static_cast<std::int64_t>(Info(tensor->dtype).size);
      const std::int64_t of_a = CoveredBytes(a, step), of_b = CoveredBytes(b, step);
      const std::int64_t offset = (behind % step + step) % step;
      if (of_a >= 0 && of_b >= 0 && of_a <= offset && offset + of_b <= step) return true;
    }
  return false;
}

// Whether two tensors of one shape have the same order of elements.
inline bool SameOrder(const Tensor& view, const std::int64_t* a, const std::int64_t* b) {
  for (std::size_t i = 0; i < view.rank; ++i)
    if (view.sizes[i] > 1 && a[i] != b[i]) return false;
  return true;
}

// Whether rows are contiguous and lie at a constant distance from each other (Record::rows_text).
inline bool AreRows(const OpSpec& record, const Attribute* attributes, const Tensor& view,
                    const std::int64_t* strides) {
  if (IsContiguous(view, strides)) return true;
  const auto rank = static_cast<std::int64_t>(view.rank);
  std::int64_t axis = record.RowDimension(attributes);
  if (axis < 0) axis += rank;
  if (axis < 0 || axis >= rank || !IsContiguous(view, strides, static_cast<std::size_t>(axis)))
    return false;
  for (std::int64_t i = axis + 1; i < rank && !record.rows.to_the_end; ++i)
    if (view.sizes[i] > 1) return false;
  std::int64_t expected = -1;  // of the next leading dimension
  for (std::int64_t i = axis; i-- > 0;) {
    if (view.sizes[i] == 1) continue;
    if (expected >= 0 && strides[i] != expected) return false;
    expected = Times(strides[i], view.sizes[i]);
  }
  return true;
}

}  // namespace twinop::torch_op
