// Conversions between a 16-bit storage type and fp32 for whole arrays. CPU kernels compute in fp32
// and fp64 only: tensors of a 16-bit type pass through buffers.
#pragma once

#include <cstdint>

#include "kernels/primitives/cpu_features.h"
#include "kernels/record/call.h"

namespace twinop {

// Widening is exact. Rounding is to nearest, ties to even; the payload of a NaN is not kept.
struct Conversion {
  const ByLevel<void(const void* from, float* to, std::int64_t count)>& widen;
  const ByLevel<void(const float* from, void* to, std::int64_t count)>& round;
};

// Returns the conversion of a 16-bit type; null for float32 and float64, which are computed in.
const Conversion* ConversionOf(DType dtype);

}  // namespace twinop
