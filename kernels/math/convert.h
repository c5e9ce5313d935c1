// Conversions between fp32 and the dtypes that are stored beside it, on the CPU.
#pragma once

#include <algorithm>
#include <cstdint>

#include "twinop/record/op_spec.h"

namespace twinop {

// Converts elements exactly.
void Widen(DType dtype, const void* from, float* to, std::int64_t count);
// Rounds elements: to nearest, ties to even. The payload of a NaN is not kept.
void Round(DType dtype, const float* from, void* to, std::int64_t count);

// The same for float64, whose elements are copied.
inline void Widen(DType, const void* from, double* to, std::int64_t count) {
  std::copy_n(static_cast<const double*>(from), count, to);
}
inline void Round(DType, const double* from, void* to, std::int64_t count) {
  std::copy_n(from, count, static_cast<double*>(to));
}

}  // namespace twinop
