// Launch settings of the elementwise skeleton, apart from the kernels.
//
// Measured on an H200 (copy = cudaMemcpyAsync, cold L2, medians of 15; ReLU, share of the copy's
// speed):
//
//   threads x vectors   bf16 2^28   fp32 2^28   fp32 2^26   fp32 2^22 (16 MiB)   bf16 2^22 (8 MiB)
//   128 x 1             1.012       1.006       0.998       0.990                1.004
//   128 x 2             1.003       0.998       0.989       1.016                1.045
//   128 x 4             0.975       0.968       0.959       1.049                1.028
//   256 x 4             0.974       0.967       0.958       1.075                1.036
//   512 x 4             0.980       0.971       0.964       1.052                1.049
//
// One vector per thread fills the machine: 2048 threads x 16 bytes = 32 KiB in flight per
// multiprocessor. More vectors per thread only help where the output stays in L2. Cache hints
// (ld.cs, st.cs) cost 1 to 5 %.
#pragma once

#include <cstdint>

namespace twinop::elementwise {

inline constexpr int kVectorBytes = 16;  // the widest access of sm_75 to sm_90
inline constexpr int kThreads = 128;
inline constexpr int kLoads = 1;        // vectors per thread
inline constexpr int kScalarLoads = 8;  // elements per thread where the tensors are misaligned

// Tensors of these sizes stay in L2 (60 MB on an H200): four vectors per thread.
inline constexpr std::int64_t kResidentMinBytes = 6 << 20;
inline constexpr std::int64_t kResidentMaxBytes = 24 << 20;
inline constexpr int kResidentLoads = 4;

}  // namespace twinop::elementwise
