// Tests of strides, and the strides of outputs.
#pragma once

#include "twinop/record/record.h"

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

// The memory of a tensor.
struct Range {
  const char *begin, *end;
  bool has_gaps = false, may_overlap = false;  // between elements; of two elements
};

inline Range RangeOf(const Tensor& view, const std::int64_t* strides, const void* data) {
  const auto* begin = static_cast<const char*>(data);
  if (view.numel == 0) return {begin, begin};
  bool may_overlap = false, used[kMaxRank] = {};
  std::int64_t last = 0;  // element of the dimensions so far, from the smallest stride on
  for (std::size_t step = 0; step < view.rank; ++step) {
    std::size_t next = view.rank;
    for (std::size_t i = 0; i < view.rank; ++i)
      if (!used[i] && view.sizes[i] > 1 && (next == view.rank || strides[i] < strides[next]))
        next = i;
    if (next == view.rank) break;
    used[next] = true;
    may_overlap = may_overlap || strides[next] <= last;
    last += (view.sizes[next] - 1) * strides[next];
  }
  const auto size = static_cast<std::int64_t>(Info(view.dtype).size);
  return {begin, begin + (last + 1) * size, last >= view.numel, may_overlap};
}

// Whether two tensors of one shape have the same order of elements.
inline bool SameOrder(const Tensor& view, const std::int64_t* a, const std::int64_t* b) {
  for (std::size_t i = 0; i < view.rank; ++i)
    if (view.sizes[i] > 1 && a[i] != b[i]) return false;
  return true;
}

// Whether rows are contiguous and lie at a constant distance from each other (Record::rows_text).
inline bool AreRows(const RowDimension& rows, const Attribute* attributes, const Tensor& view,
                    const std::int64_t* strides) {
  if (IsContiguous(view, strides)) return true;
  const auto rank = static_cast<std::int64_t>(view.rank);
  std::int64_t axis = rows.Of(attributes);
  if (axis < 0) axis += rank;
  if (axis < 0 || axis >= rank || !IsContiguous(view, strides, static_cast<std::size_t>(axis)))
    return false;
  for (std::int64_t i = axis + 1; i < rank && !rows.to_the_end; ++i)
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
