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
  const Tensor* view;
  const std::int64_t* strides;
  bool may_overlap = false;  // two elements
};

inline Range RangeOf(const Tensor& view, const std::int64_t* strides, const void* data) {
  const auto* begin = static_cast<const char*>(data);
  if (view.numel == 0) return {begin, begin, &view, strides};
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
  return {begin, begin + (last + 1) * size, &view, strides, may_overlap};
}

// The bytes that a tensor covers of each `step` bytes from its begin on, where all strides from
// `step` on are multiples of it; else -1.
inline std::int64_t BytesOfStep(const Range& range, std::int64_t step) {
  const auto size = static_cast<std::int64_t>(Info(range.view->dtype).size);
  std::int64_t covered = size;
  for (std::size_t i = 0; i < range.view->rank; ++i) {
    const std::int64_t stride = range.strides[i] * size;
    if (range.view->sizes[i] <= 1) continue;
    if (stride >= step && stride % step != 0) return -1;
    if (stride < step) covered += (range.view->sizes[i] - 1) * stride;
  }
  return covered;
}

// Whether no element of two tensors shares memory: their ranges lie apart, or, as those of the
// halves kv[:, 0] and kv[:, 1], what they cover of each stride does.
inline bool LieApart(const Range& a, const Range& b) {
  if (a.end <= b.begin || b.end <= a.begin) return true;
  for (const Range* range : {&a, &b})
    for (std::size_t i = 0; i < range->view->rank; ++i) {
      if (range->view->sizes[i] <= 1 || range->strides[i] == 0) continue;
      const std::int64_t step =
          range->strides[i] * static_cast<std::int64_t>(Info(range->view->dtype).size);
      const std::int64_t of_a = BytesOfStep(a, step), of_b = BytesOfStep(b, step);
      const std::int64_t behind = ((b.begin - a.begin) % step + step) % step;
      if (of_a >= 0 && of_b >= 0 && of_a <= behind && behind + of_b <= step) return true;
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
