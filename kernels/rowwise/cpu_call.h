// A row-wise call on the CPU as the code that all ops share sees it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "kernels/primitives/cpu_convert.h"
#include "kernels/rowwise/cpu.h"

namespace twinop::rowwise {

// Bytes of a buffer for one operand, in the first-level cache, and for the rows and the column
// inputs that are kept, in the second-level one.
inline constexpr std::int64_t kChunkBytes = 4096;
inline constexpr std::int64_t kKeptRowBytes = 128 << 10;
inline constexpr std::int64_t kKeptColumnBytes = 64 << 10;

// The tensors of a call. `conversion` is null where they are of the compute type.
template <class T>
struct RowCall {
  const RowKernels<T>& kernels;
  const void* functor;
  const T* defaults;  // of the column inputs
  Rows rows;
  bool lanes_are_rows;

  struct Format {
    const Conversion* conversion;
    std::int64_t size;  // bytes of an element
  };
  Format row_format, column_format;
  const char* inputs[kMaxOperands];    // null: absent
  std::int64_t strides[kMaxOperands];  // elements from row to row
  const char* columns[kMaxOperands];   // null: absent
  char* outputs[kMaxOperands];         // null: not wanted
  char* sums[kMaxOperands];            // null: not wanted
};

// Copies or converts `count` contiguous elements.
template <class T>
void Load(const typename RowCall<T>::Format& format, const char* from, std::int64_t count, T* to) {
  if constexpr (std::is_same_v<T, float>)
    if (format.conversion != nullptr) return format.conversion->widen(from, to, count);
  std::memcpy(to, from, static_cast<std::size_t>(count) * sizeof(T));
}
template <class T>
void Store(const typename RowCall<T>::Format& format, const T* from, std::int64_t count, char* to) {
  if constexpr (std::is_same_v<T, float>)
    if (format.conversion != nullptr) return format.conversion->round(from, to, count);
  std::memcpy(to, from, static_cast<std::size_t>(count) * sizeof(T));
}

template <class T>
void Clear(Reduction reduction, T* totals, int terms) {
  std::fill_n(totals, terms * kLanes,
              reduction == kMax ? -std::numeric_limits<T>::infinity() : T(0));
}
template <class T>
void Add(Reduction reduction, T* totals, const T* terms, int count) {
  for (std::int64_t i = 0; i < count * kLanes; ++i) {
    const T maximum = terms[i] > totals[i] ? terms[i] : totals[i];
    totals[i] = reduction == kMax ? maximum : totals[i] + terms[i];
  }
}

}  // namespace twinop::rowwise
