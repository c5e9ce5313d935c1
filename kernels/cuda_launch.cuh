// Launching a kernel on the call's stream.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>

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

// A fact of the current device, asked once for each device: query(device, &value).
template <class Query>
Status DeviceFact(std::atomic<int> (&known)[64], const Query& query, int* value) {
  int device = 0;
  Status status = CudaStatus(cudaGetDevice(&device), "asking for the device");
  if (!status.ok()) return status;
  std::atomic<int>& fact = known[device % 64];
  *value = fact.load(std::memory_order_relaxed);
  if (*value != 0) return status;
  const cudaError_t error = query(device, value);
  if (error == cudaSuccess && device < 64) fact.store(*value, std::memory_order_relaxed);
  return CudaStatus(error, "asking for a property of the device");
}

inline Status Multiprocessors(int* count) {
  static std::atomic<int> known[64];
  return DeviceFact(
      known,
      [](int device, int* value) {
        return cudaDeviceGetAttribute(value, cudaDevAttrMultiProcessorCount, device);
      },
      count);
}

struct Grid {
  std::int64_t blocks;
  dim3 threads;
  unsigned blocks_y = 1;
  int shared_bytes = 0;  // dynamic
  int cluster = 1;       // blocks; more than one needs sm_90
};

// A grid as the runtime wants it. The kernel is allowed its shared memory.
class LaunchConfig {
 public:
  LaunchConfig(const Grid& grid, cudaStream_t stream) : shared_bytes_(grid.shared_bytes) {
    config.gridDim = dim3(static_cast<unsigned>(grid.blocks), grid.blocks_y);
    config.blockDim = grid.threads;
    config.dynamicSmemBytes = static_cast<std::size_t>(grid.shared_bytes);
    config.stream = stream;
    cluster_.id = cudaLaunchAttributeClusterDimension;
    cluster_.val.clusterDim = {static_cast<unsigned>(grid.cluster), 1, 1};
    config.attrs = &cluster_;
    config.numAttrs = grid.cluster > 1 ? 1 : 0;
  }
  LaunchConfig(const LaunchConfig&) = delete;
  LaunchConfig& operator=(const LaunchConfig&) = delete;

  template <class Kernel>
  Status Allow(Kernel kernel) const {
    constexpr int kDefaultSharedBytes = 48 << 10;
    if (shared_bytes_ <= kDefaultSharedBytes) return {};
    return CudaStatus(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes_),
        "asking for shared memory");
  }

  cudaLaunchConfig_t config{};

 private:
  cudaLaunchAttribute cluster_{};
  int shared_bytes_;
};

template <class... Parameters, class... Arguments>
Status LaunchKernel(void (*kernel)(Parameters...), const Grid& grid, const Call& call,
                    const Arguments&... arguments) {
  if (grid.blocks > INT32_MAX)
    return Status::Error("the tensor is too large for one kernel launch");
  const LaunchConfig launch(grid, static_cast<cudaStream_t>(call.context->stream));
  Status allowed = launch.Allow(kernel);
  if (!allowed.ok()) return allowed;
  cudaError_t error =
      cudaLaunchKernelEx(&launch.config, kernel, static_cast<Parameters>(arguments)...);
  cudaError_t last = cudaGetLastError();  // leaves no error behind
  return CudaStatus(error == cudaSuccess ? last : error, "a kernel launch");
}

// How many clusters of the grid (or blocks, where a cluster is one) the device holds at once.
template <class Kernel>
Status ResidentClusters(Kernel kernel, const Grid& grid, int* count) {
  const LaunchConfig launch(grid, nullptr);
  Status allowed = launch.Allow(kernel);
  if (!allowed.ok()) return allowed;
  if (grid.cluster > 1)
    return CudaStatus(cudaOccupancyMaxActiveClusters(count, kernel, &launch.config),
                      "asking how many clusters the device holds");
  int blocks = 0, processors = 0;
  Status status = CudaStatus(
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(
          &blocks, kernel, static_cast<int>(grid.threads.x), launch.config.dynamicSmemBytes),
      "asking how many blocks the device holds");
  if (!status.ok()) return status;
  Status found = Multiprocessors(&processors);
  *count = blocks * processors;
  return found;
}

template <class... Parameters, class... Arguments>
Status LaunchKernel(void (*kernel)(Parameters...), std::int64_t blocks, int threads,
                    const Call& call, const Arguments&... arguments) {
  if (blocks > INT32_MAX) return Status::Error("the tensor is too large for one kernel launch");
  kernel<<<static_cast<unsigned>(blocks), threads, 0,
           static_cast<cudaStream_t>(call.context->stream)>>>(arguments...);
  return CudaStatus(cudaGetLastError(), "a kernel launch");
}

// The architecture that the kernel in use here was compiled for, 90 for sm_90: code for an older
// one, compiled by the driver on a newer device, has none of the newer one's instructions.
template <auto kKernel>
Status KernelArchitecture(int* architecture) {
  static std::atomic<int> known[64];
  return DeviceFact(
      known,
      [](int, int* value) {
        cudaFuncAttributes attributes{};
        cudaError_t error = cudaFuncGetAttributes(&attributes, kKernel);
        *value = attributes.ptxVersion;
        return error;
      },
      architecture);
}

}  // namespace twinop
