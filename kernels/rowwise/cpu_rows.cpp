#include "twinop/rowwise/cpu_rows.h"

#include <algorithm>

#include "twinop/math/convert.h"
#include "twinop/math/numeric.h"

namespace twinop::rowwise {

template <class T>
void ReadRows(DType dtype, const void* from, const RowBlock& block, T* to, std::int64_t pitch) {
  if (block.inner == 1) return Widen(dtype, from, to, block.columns);
  const auto* const bytes = static_cast<const char*>(from);
  const std::int64_t step = block.inner * static_cast<std::int64_t>(Info(dtype).size);
  alignas(64) T converted[kMaxBlockRows];
  for (std::int64_t c = 0; c < block.columns; ++c) {
    const T* column = converted;
    if (dtype == DTypeOf<T>()) {
      column = reinterpret_cast<const T*>(bytes + c * step);
    } else {
      Widen(dtype, bytes + c * step, converted, block.count);
    }
    for (std::int64_t r = 0; r < block.count; ++r) to[r * pitch + c] = column[r];
  }
}

template <class T>
void WriteRows(DType dtype, const T* from, std::int64_t pitch, const RowBlock& block, void* to) {
  if (block.inner == 1) return Round(dtype, from, to, block.columns);
  auto* const bytes = static_cast<char*>(to);
  const std::int64_t step = block.inner * static_cast<std::int64_t>(Info(dtype).size);
  alignas(64) T converted[kMaxBlockRows];
  for (std::int64_t c = 0; c < block.columns; ++c) {
    const bool is_direct = dtype == DTypeOf<T>();
    T* const column = is_direct ? reinterpret_cast<T*>(bytes + c * step) : converted;
    for (std::int64_t r = 0; r < block.count; ++r) column[r] = from[r * pitch + c];
    if (!is_direct) Round(dtype, converted, bytes + c * step, block.count);
  }
}

template void ReadRows(DType, const void*, const RowBlock&, float*, std::int64_t);
template void ReadRows(DType, const void*, const RowBlock&, double*, std::int64_t);
template void WriteRows(DType, const float*, std::int64_t, const RowBlock&, void*);
template void WriteRows(DType, const double*, std::int64_t, const RowBlock&, void*);

void RoundInPlace(DType dtype, float* values, std::int64_t count) {
  if (dtype == DType::kFloat32) return;
  alignas(64) std::uint16_t stored[256];
  for (std::int64_t i = 0; i < count; i += 256) {
    const std::int64_t piece = std::min<std::int64_t>(256, count - i);
    Round(dtype, values + i, stored, piece);
    Widen(dtype, stored, values + i, piece);
  }
}

}  // namespace twinop::rowwise
