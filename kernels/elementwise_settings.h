// Launch settings of the elementwise skeleton, apart from the kernels.
#pragma once

#include <cstdint>

namespace twinop::elementwise {

inline constexpr int kVectorBytes = 16;  // the widest access of sm_75 to sm_90
inline constexpr int kThreads = 256;
inline constexpr int kLoads = 2;  // vectors per thread
inline constexpr int kScalarLoads = 8;  // elements per thread where the tensors are misaligned

// Below this one vector per thread in small blocks: the work spreads over more multiprocessors.
inline constexpr std::int64_t kSmallBytes = 4 << 20;
inline constexpr int kSmallThreads = 128;

}  // namespace twinop::elementwise
