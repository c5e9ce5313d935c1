// Tensor maps: what the copy engine of sm_90 and later knows of a matrix in global memory (CUDA
// Driver API, "Tensor Map Object Management").
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "twinop/math/numeric.h"

namespace twinop {

// Bytes of a box's row: the swizzle's span. 16-byte units of 8 rows of a box are permuted in shared
// memory, so that the tensor cores read them without bank conflicts.
inline constexpr int kBoxRowBytes = 128;

// Returns the driver's function, or null if it has none. It comes through the runtime, so nothing
// links the driver.
inline auto TensorMapEncoder() {
  static const auto function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found,
                                                               12000, cudaEnableDefault, &result);
#else
    const cudaError_t error =
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result);
#endif
    if (error != cudaSuccess) cudaGetLastError();  // as CudaStatus does
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
  }();
  return function;
}

// Describes a row-major matrix [rows, columns] of a 16-bit type, which is read in boxes of
// `box_rows` rows of kBoxRowBytes. Columns times 2 bytes, and the address, are multiples of 16.
// What a box has beyond the matrix is read as zeros. L2 fetches `fetched` around what it lacks.
// Returns whether the driver accepts it.
template <class T>
bool DescribeMatrix(const void* data, std::int64_t rows, std::int64_t columns, int box_rows,
                    CUtensorMap* map,
                    CUtensorMapL2promotion fetched = CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
  static_assert(sizeof(T) == 2);
  constexpr CUtensorMapDataType kType =
      std::is_same_v<T, Half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t row_bytes[] = {sizes[0] * sizeof(T)};
  const cuuint32_t box[] = {kBoxRowBytes / sizeof(T), static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[] = {1, 1};
  return TensorMapEncoder() != nullptr &&
         TensorMapEncoder()(map, kType, 2, const_cast<void*>(data), sizes, row_bytes, box, steps,
                            CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, fetched,
                            CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace twinop
