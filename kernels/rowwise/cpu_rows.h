// Moves rows between tensors of any dtype and buffers of the compute type, on the CPU.
#pragma once

#include <cstdint>

#include "twinop/record/op_spec.h"

namespace twinop::rowwise {

// Rows that are neighbours in memory: element c of row r is c * inner + r. With inner 1 it is one.
struct RowBlock {
  std::int64_t columns, count, inner;
};

inline constexpr std::int64_t kMaxBlockRows = 32;

// Converts the rows of a block exactly. In the buffer, of float or double, one begins `pitch`
// elements after another.
template <class T>
void ReadRows(DType dtype, const void* from, const RowBlock& block, T* to, std::int64_t pitch);
// Rounds them into the tensor.
template <class T>
void WriteRows(DType dtype, const T* from, std::int64_t pitch, const RowBlock& block, void* to);
// Gives elements the values that a dtype stores for them.
void RoundInPlace(DType dtype, float* values, std::int64_t count);
inline void RoundInPlace(DType, double*, std::int64_t) {}

}  // namespace twinop::rowwise
