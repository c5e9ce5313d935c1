// Launching a kernel on the call's stream.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "kernels/record.h"

namespace twinop {

inline bool IsAligned(const void* pointer, std::size_t bytes) {
  return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0;
}

inline Status CudaStatus(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return {};
  std::string text = std::string(what) + " failed: " + cudaGetErrorString(error);
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorUnsupportedPtxVersion) {
    text += "; the library holds no code for this GPU (built for " TWINOP_CUDA_ARCHS
            "): rebuild with TWINOP_CUDA_ARCHS=native, or with the GPU's architecture";
  }
  return Status::Error(std::move(text));
}

template <class... Parameters, class... Arguments>
Status LaunchKernel(void (*kernel)(Parameters...), std::int64_t blocks, int threads,
                    const Call& call, const Arguments&... arguments) {
  if (blocks > INT32_MAX) return Status::Error("the tensor is too large for one kernel launch");
  kernel<<<static_cast<unsigned>(blocks), threads, 0,
           static_cast<cudaStream_t>(call.context->stream)>>>(arguments...);
  return CudaStatus(cudaGetLastError(), "a kernel launch");
}

}  // namespace twinop
